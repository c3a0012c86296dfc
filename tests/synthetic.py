"""Made-up caches with one rotated, anisotropic covariance over all layers and heads; codecs for them; measurements.

A transposed or mis-scaled basis cannot hide here, as it could among independent channels. Knows no test.
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign import fit
from kvalign.accounting import PayloadSizes
from kvalign.align.basis import fit_basis, head_weights
from kvalign.artifact import Artifact, BaseModel, StoredGroup
from kvalign.calibrate import calibrate
from kvalign.capture import CacheShape, Captured, capture, layer_tensors, measure_shape
from kvalign.curve import OperatingPoint
from kvalign.evaluate.comparison import BaselineResult
from kvalign.evaluate.greedy import GreedyResult
from kvalign.evaluate.heads import HeadPictures
from kvalign.evaluate.metrics import Divergence, by_position, summarise
from kvalign.evaluate.protocol import PreparedWindow, Trial, copied
from kvalign.evaluate.recall import RecallResult
from kvalign.evaluate.resident import ResidentResult
from kvalign.evaluate.search import Measurement
from kvalign.evaluate.speed import SpeedResult
from kvalign.geometry import KINDS, Geometry, Kind, LayerGeometry
from kvalign.report.findings import Findings
from kvalign.resident.cache import coded_layers
from kvalign.resident.fit import fit_resident
from kvalign.resident.layout import Codebook
from kvalign.resident.stored import StoredGroup as ResidentGroup
from kvalign.resident.stored import StoredResident, StoredSide
from kvalign.rope import NO_ROPE, Rope
from kvalign.statistics import Statistics, feature_groups
from kvalign.text import Window
from kvalign.watch import Watched

# Widths that differ between layers and between keys and values, and every kind of rotation.
SHAPE = CacheShape(
    Geometry((LayerGeometry(2, 8, 6), LayerGeometry(1, 8, 4), LayerGeometry(2, 4, 6))),
    (
        Rope("half", torch.tensor([1.0, 0.3, 0.1, 0.03]), scaling=1.1),
        NO_ROPE,
        Rope("interleaved", torch.tensor([0.5])),
    ),
)
WIDE = Geometry((LayerGeometry(4, 64, 64),))
CURVE = (
    OperatingPoint(step=-20, ratio=4.0, kl_mean=0.001, kl_p99=0.01, top1=0.99),
    OperatingPoint(step=-10, ratio=8.0, kl_mean=0.004, kl_p99=0.04, top1=0.97),
    OperatingPoint(step=0, ratio=16.0, kl_mean=0.016, kl_p99=0.16, top1=0.95),
)


class CacheSource:
    """One distribution of caches; a seed picks a cache from it."""

    def __init__(self, shape: CacheShape = SHAPE, seed: int = 0, scale: float = 1.0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self._mean: dict[Kind, Tensor] = {}
        self._mixing: dict[Kind, Tensor] = {}
        for kind in KINDS:
            width = shape.geometry.width(kind)
            rotation = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
            # Standard deviations over two orders of magnitude, in directions that cut across layers and heads.
            self._mixing[kind] = scale * torch.logspace(0.5, -1.5, width)[:, None] * rotation
            self._mean[kind] = 3 * scale * torch.randn(width, generator=generator)

    def features(self, tokens: int, seed: int) -> dict[Kind, Tensor]:
        """[T, P] for each kind, keys unrotated."""
        generator = torch.Generator().manual_seed(seed)
        return {
            kind: torch.randn(tokens, self.shape.geometry.width(kind), generator=generator) @ self._mixing[kind]
            + self._mean[kind]
            for kind in KINDS
        }

    def cache(
        self, tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, paddings: tuple[int, ...] = (0,)
    ) -> DynamicCache:
        """[B, H, tokens, D] in every layer: one row for each padding, with noise where nothing is held."""
        rows = [self._row(tokens, padding, seed + index, dtype) for index, padding in enumerate(paddings)]
        cache = DynamicCache()
        for layer in range(len(self.shape.geometry.layers)):
            keys, values = (torch.stack([row[layer][part] for row in rows]) for part in (0, 1))
            cache.update(keys, values, layer)
        return cache

    def _row(self, tokens: int, padding: int, seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        features = self.features(tokens - padding, seed)
        noise = torch.Generator().manual_seed(seed + 1000)
        layers = []
        for index, (layer, rope) in enumerate(zip(self.shape.geometry.layers, self.shape.ropes, strict=True)):
            found = []
            for kind in KINDS:
                start, stop = self.shape.geometry.offsets(kind)[index : index + 2]
                heads = features[kind][:, start:stop].unflatten(1, (layer.kv_heads, -1)).transpose(0, 1)
                if kind == "keys":
                    heads = rope.redo(heads, torch.arange(tokens - padding), dtype)
                empty = torch.randn(layer.kv_heads, padding, layer.head_dim(kind), generator=noise)
                found.append(torch.cat([empty, heads], dim=1).to(dtype))
            layers.append((found[0], found[1]))
        return layers


def fitted(
    source: CacheSource, *, sink_tokens: int = 2, recent_tokens: int = 3, layer_group_size: int | None = None
) -> Artifact:
    """A codec calibrated on the source, of full rank, recommended at step -10."""
    shape = source.shape
    statistics = Statistics(feature_groups(shape.geometry, layer_group_size), shape.geometry)
    gradients = CacheSource(shape, seed=99)
    for seed in range(4):
        statistics.update(source.features(256, 10_000 + seed), torch.zeros(256, 0))
        statistics.update_sensitivity(gradients.features(64, 20_000 + seed), torch.ones(64))
    held_out = source.features(256, 30_000)
    kept_aside = [Captured(held_out["keys"], held_out["values"], torch.zeros(256, 0))]
    return _artifact(shape, statistics, kept_aside, sink_tokens, recent_tokens)


def fitted_to(
    model: Any,
    *,
    recomputed: int = 1,
    sink_tokens: int = 2,
    recent_tokens: int = 3,
    resident_bits: float | None = None,
) -> Artifact:
    """A codec calibrated on a model's reading of random tokens, of full rank, recommended where it promises 8 : 1."""
    shape = replace(measure_shape(model), recomputed=recomputed)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(256, (200,), generator=generator) for _ in range(4)]
    with TemporaryDirectory() as folder:
        statistics = calibrate(
            model,
            shape,
            sequences[:3],
            seed=0,
            checkpoint=Path(folder) / "statistics.safetensors",
            on_progress=lambda done, total: None,
            sink_tokens=sink_tokens,
            token_beta=0.4,
        )
    kept_aside = list(capture(model, shape, iter(sequences[3:])))
    artifact = _artifact(shape, statistics, kept_aside, sink_tokens, recent_tokens, ratio=8.0)
    if resident_bits is None:
        return artifact
    resident = fit_resident(
        statistics,
        shape,
        kept_aside,
        bits=resident_bits,
        sink_tokens=sink_tokens,
        layers=coded_layers(model),
        position_limit=model.config.max_position_embeddings,
    )
    return replace(artifact, resident=resident)


def _artifact(
    shape: CacheShape,
    statistics: Statistics,
    kept_aside: list[Captured],
    sink_tokens: int,
    recent_tokens: int,
    *,
    ratio: float | None = None,
) -> Artifact:
    """Recommended at step -10, or at the step that promises a ratio of the stored layers."""
    weights = head_weights(statistics)
    bases = [fit_basis(statistics, group, weights[group.name]) for group in statistics.groups]
    transforms, orders = fit.full_transforms(bases, kept_aside, sink_tokens)
    step = fit.expected_step(transforms, shape.stored, ratio) if ratio else -10
    return Artifact(
        base=BaseModel("org/model", "c" * 40, "llama", "0" * 64, {"model.safetensors": ("1" * 64, 1234)}),
        shape=shape,
        groups=tuple(
            StoredGroup.of(basis, transform.scales, order, fit.feature_deviation(kept_aside, sink_tokens))
            for basis, transform, order in zip(bases, transforms, orders, strict=True)
        ),
        tables=fit.fit_tables(transforms, kept_aside, sink_tokens, step),
        sink_tokens=sink_tokens,
        recent_tokens=recent_tokens,
        recommended_step=step,
        token_beta=0.4,
        curve=CURVE,
    )


def with_other_id(artifact: Artifact) -> Artifact:
    """The same codec but for one number: another id."""
    first, *others = artifact.groups
    return replace(artifact, groups=(replace(first, intercept=first.intercept + 1), *others))


def window_of(cache: DynamicCache) -> PreparedWindow:
    """A cache as a coder of the protocol gets it, for coders that look at nothing else."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return PreparedWindow(Window("noise", nothing, nothing), cache, Watched(), torch.zeros(0), 0.0)


def lossless(prepared: PreparedWindow) -> DynamicCache:
    """A coder that loses nothing."""
    return copied(prepared.cache)


def blank(prepared: PreparedWindow) -> DynamicCache:
    """A coder that leaves zeros."""
    result = DynamicCache()
    for index, (keys, values) in enumerate(layer_tensors(prepared.cache)):
        result.update(torch.zeros_like(keys), torch.zeros_like(values), index)
    return result


def measured(step: int, kl: float, ratio: float, domain: str = "d") -> Measurement:
    """What a codec of this KL and ratio would have measured."""
    values = torch.full((10,), kl)
    coded = round(2 * WIDE.values_per_token * 10_000 / ratio)
    sizes = PayloadSizes(coded=coded, verbatim=3072, side_info=0, body_tokens=10_000, verbatim_tokens=3)
    return Measurement(step, (Trial(domain, Divergence(values, values, torch.ones(10), values), sizes),), WIDE)


def made_up_resident(geometry: Geometry, width: int = 4) -> StoredResident:
    """A resident form of every layer, its bases turned at random."""
    generator = torch.Generator().manual_seed(0)
    book = Codebook(width, 0.3, 0.01)
    layers = {}
    for index, layer in enumerate(geometry.layers):
        sides: dict[Kind, StoredSide] = {}
        for kind in KINDS:
            features = layer.width(kind)
            turned, _ = torch.linalg.qr(torch.randn(features, features, generator=generator))
            deviation = torch.linspace(2.0, 0.5, features)
            widths = torch.full((features,), width, dtype=torch.uint8)
            sides[kind] = StoredSide.of(torch.zeros(features), deviation[:, None] * turned, deviation, widths)
        layers[index] = (ResidentGroup(0, layer.kv_heads, sides),)
    books = {kind: {width: book} for kind in KINDS}
    return StoredResident(4.0, "joint", books, dict(enumerate(geometry.layers)), layers)


def resident_result(kl: float = 0.002, *, floor_kl: float = 1e-9, kernel_error: float | None = 1e-6) -> ResidentResult:
    """Protocol C on domains a and b, as if it had been measured."""
    summary = summarise([trial.divergence for trial in measured(0, kl, 4.0).trials])
    return ResidentResult(
        summary=summary,
        domains={"a": summary, "b": summary},
        floor_kl=floor_kl,
        recent_tokens=64,
        coded_ratio=3.9,
        bits_per_value=4.1,
        kernels={"numba": 960, "tiled": 210},
        dense_layers=0,
        kernel_error=kernel_error,
        positions=by_position([trial.divergence for trial in measured(0, kl, 4.0).trials], 128),
    )


def recall_results() -> list[RecallResult]:
    scores = {"uncompressed": 0.95, "at rest": 0.9, "resident": 0.95}
    return [
        RecallResult("key_value", True, 8, 20, 512, scores),
        RecallResult("needle", False, 3, 20, 512, {"uncompressed": 0.4}),
    ]


def greedy_results() -> dict[str, GreedyResult]:
    return {"at rest": GreedyResult(64, (64, 12)), "resident": GreedyResult(64, (64, 64))}


def findings(kl: float = 0.03) -> Findings:
    """What the report stage measures, made up: six heads of keys and of values, one baseline."""
    generator = torch.Generator().manual_seed(1)

    def pictures() -> HeadPictures:
        maps = torch.rand(4, 6, 6, generator=generator)
        return HeadPictures(*((maps[:2] + maps[:2].mT) / 2), *maps[2:], left_out=0)

    summary = summarise([trial.divergence for trial in measured(0, kl, 4.0).trials])
    return Findings(
        heads={kind: pictures() for kind in KINDS},
        sensitivity={kind: torch.full((3,), 1 / 6) for kind in KINDS},
        baselines=(BaselineResult("KIVI-style", "4 bit", 3.2, 0, summary),),
        speed=SpeedResult(768, 1.0, 0.2, 0.1, 20.0, 19.0),
    )
