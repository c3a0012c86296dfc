"""The codec folder: safetensors and JSON, pinned to the base model it was made for. No pickle anywhere.

kvalign_config.json          what, for which model, how good; small enough to read by eye
kvalign_codec.safetensors    predictors and directions (int8), head weights, scales, symbol tables, rotary frequencies
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvalign.align.basis import Basis
from kvalign.capture import CacheShape
from kvalign.codec import Codec
from kvalign.container import CODEC_ID_BYTES
from kvalign.curve import OperatingPoint
from kvalign.entropy.classes import Tables
from kvalign.errors import ArtifactInvalid
from kvalign.geometry import KINDS, Geometry
from kvalign.quantize import STEP_LIMIT
from kvalign.resident.plan import ResidentPlan
from kvalign.resident.stored import StoredResident
from kvalign.rope import Pairing, Rope
from kvalign.statistics import FeatureGroup
from kvalign.transform import Transform, coded_components

SCHEMA_VERSION = 1
CONFIG_NAME = "kvalign_config.json"
TENSORS_NAME = "kvalign_codec.safetensors"
_MAX_CONFIG_BYTES = 16 * 1024**2
_MAX_VERBATIM_TOKENS = 1 << 26
_MAX_TOKEN_BETA = 4.0
_MAX_MEASURED = 1e9
_SMALLEST = 1e-12
_CONVERT_AGAIN = "Pull the artifact again, or convert the model again."


@dataclass(frozen=True)
class BaseModel:
    """The model that an artifact belongs to.

    weights  SHA-256 and size of each weight file, by name
    """

    repo: str
    commit: str
    model_type: str
    config_sha256: str
    weights: Mapping[str, tuple[str, int]]

    @classmethod
    def of(cls, folder: Path, *, repo: str, commit: str) -> "BaseModel":
        """Read and hash a model folder; a second for each gigabyte of weights, about."""
        config = (folder / "config.json").read_bytes()
        files = sorted(folder.glob("*.safetensors"))
        weights = {file.name: (sha256_of(file), file.stat().st_size) for file in files if file.name != TENSORS_NAME}
        return cls(repo, commit, str(json.loads(config).get("model_type", "")), _sha256(config), weights)

    def check(self, folder: Path) -> None:
        """Raise ArtifactInvalid unless the folder holds this model: config by hash, weights by name and size."""
        config = folder / "config.json"
        if not config.is_file() or _sha256(config.read_bytes()) != self.config_sha256:
            raise ArtifactInvalid(
                f"config.json is not the one of {self.repo} at {self.commit[:12]} that this codec was made for.",
                "Load the codec with its own base model, at the commit in kvalign_config.json.",
            )
        for name, (_, size) in self.weights.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise ArtifactInvalid(
                    f"{name} is missing or has another size than the {size:,} bytes this codec was made for.",
                    "Pull the base model again, at the commit in kvalign_config.json.",
                )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "weights": {k: {"sha256": v[0], "size": v[1]} for k, v in self.weights.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "BaseModel":
        weights = {str(k): (str(v["sha256"]), int(v["size"])) for k, v in data["weights"].items()}
        return cls(data["repo"], data["commit"], data["model_type"], data["config_sha256"], weights)


@dataclass(frozen=True)
class StoredGroup:
    """One group's basis as it is stored: truncated to what the operating range codes, directions in int8.

    intercept         [P] float32
    predictor         [F, P] int8, times feature_scale [F] and predictor_scale [P], float32 both
    directions        [P, R] int8, times directions_scale [R] float32
    weights           per layer, [H, D, D] float32: W of each head over the step scale of its kind
    scales            [R] int16, falling: mean magnitude of each coefficient, sixteenths of an octave
    """

    group: FeatureGroup
    intercept: Tensor
    predictor: Tensor
    feature_scale: Tensor
    predictor_scale: Tensor
    weights: tuple[Tensor, ...]
    directions: Tensor
    directions_scale: Tensor
    scales: NDArray[np.int16]

    @classmethod
    def of(cls, basis: Basis, scales: NDArray[np.int16], kept: Tensor, feature_deviation: Tensor) -> "StoredGroup":
        """The basis, rounded.

        kept               [R] int64: the columns to store, by falling scale; scales [R] int16 in that order
        feature_deviation  [F] float32: each feature's standard deviation, so that rounding costs all of them alike
        """
        feature_scale = 1 / feature_deviation.clamp_min(_SMALLEST)
        predictor, predictor_scale = _int8(basis.predictor / feature_scale[:, None])
        directions, directions_scale = _int8(basis.directions[:, kept])
        return cls(
            basis.group,
            basis.intercept,
            predictor,
            feature_scale,
            predictor_scale,
            basis.weights,
            directions,
            directions_scale,
            scales,
        )

    def cut(self, step: int) -> "StoredGroup":
        """Only the components that are coded at a step."""
        rank = coded_components(self.scales, step)
        return replace(
            self,
            directions=self.directions[:, :rank].contiguous(),
            directions_scale=self.directions_scale[:rank].contiguous(),
            scales=self.scales[:rank].copy(),
        )

    def transform(self) -> Transform:
        """What the codec multiplies by: 2 P R D flops."""
        predictor = self.feature_scale[:, None] * self.predictor.float() * self.predictor_scale
        basis = Basis(
            self.group,
            self.intercept,
            predictor,
            self.weights,
            self.directions.float() * self.directions_scale,
            torch.zeros(self.directions.shape[1]),
        )
        return Transform.of(basis, self.scales)


def _int8(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Each column of [N, C] in int8, and its scale, [C] float32."""
    peak = columns.abs().amax(0) if columns.shape[0] else torch.zeros(columns.shape[1])
    scale = peak.clamp_min(_SMALLEST) / 127
    return (columns / scale).round().to(torch.int8), scale


@dataclass(frozen=True)
class Artifact:
    """Everything that is stored of a codec.

    resident    the form that attention reads; None in artifacts made before there was one
    provenance  calibration recipe, tools: for people and for verify; the codec itself does not read it
    """

    base: BaseModel
    shape: CacheShape
    groups: tuple[StoredGroup, ...]
    tables: Tables
    sink_tokens: int
    recent_tokens: int
    recommended_step: int
    token_beta: float = 0.0
    curve: tuple[OperatingPoint, ...] = ()
    resident: StoredResident | None = None
    provenance: Mapping[str, Any] | None = None

    @cached_property
    def tensor_bytes(self) -> bytes:
        """Contents of kvalign_codec.safetensors; the same codec gives the same bytes."""
        tensors: dict[str, Tensor] = {"tables": torch.from_numpy(self.tables.frequencies.astype(np.int16))}
        for index, rope in enumerate(self.shape.ropes):
            if rope.pairing != "none":
                tensors[f"inv_freq.{index}"] = rope.inv_freq.clone()
        for stored in self.groups:
            name = stored.group.name
            tensors[f"intercept.{name}"] = stored.intercept
            tensors[f"predictor.{name}"] = stored.predictor.contiguous()
            tensors[f"predictor_scale.{name}"] = stored.predictor_scale
            tensors[f"feature_scale.{name}"] = stored.feature_scale
            tensors[f"directions.{name}"] = stored.directions.contiguous()
            tensors[f"directions_scale.{name}"] = stored.directions_scale
            tensors[f"scales.{name}"] = torch.from_numpy(stored.scales)
            for offset, weight in enumerate(stored.weights):
                tensors[f"weights.{stored.group.kind}.{stored.group.first_layer + offset}"] = weight.contiguous()
        if self.resident is not None:
            tensors |= self.resident.tensors()
        # One entry only: safetensors writes several in an order of chance.
        return save(tensors, metadata={"format": f"kvalign-{SCHEMA_VERSION}"})

    @property
    def codec_id(self) -> bytes:
        """A hash of all that a payload's meaning depends on: the tensors, and what the config says of their use."""
        digest = hashlib.sha256(self.tensor_bytes)
        digest.update(json.dumps(self._layout(), sort_keys=True).encode())
        return digest.digest()[:CODEC_ID_BYTES]

    def with_curve(self, curve: Sequence[OperatingPoint], recommended_step: int) -> "Artifact":
        return replace(self, curve=tuple(curve), recommended_step=recommended_step)

    def cut(self, step: int) -> "Artifact":
        """Without the directions that no token needs whose step is `step` or coarser. A codec of its own."""
        return replace(self, groups=tuple(stored.cut(step) for stored in self.groups))

    def codec(self, model: Any = None) -> Codec:
        """Ready to use. model: the base model, needed to encode or decode where layers are recomputed."""
        return Codec(
            self.shape,
            [stored.transform() for stored in self.groups],
            self.tables,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            recommended=self.recommended_step,
            token_beta=self.token_beta,
            curve=self.curve,
            codec_id=self.codec_id,
            model=model,
            resident=self.resident_plan,
        )

    @cached_property
    def resident_plan(self) -> ResidentPlan | None:
        """What a resident cache works with: an inverse for each layer's keys and values."""
        if self.resident is None:
            return None
        return self.resident.plan(self.sink_tokens, self.recent_tokens)

    def save(self, folder: Path) -> None:
        """Write both files, each atomically."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / TENSORS_NAME, self.tensor_bytes)
        _write(folder / CONFIG_NAME, (json.dumps(self._config(), indent=2) + "\n").encode())

    def _config(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "kvalign_version": metadata.version("kvalign"),
            "codec_id": self.codec_id.hex(),
            "base": self.base.to_json(),
            **self._layout(),
            "sink_tokens": self.sink_tokens,
            "recent_tokens": self.recent_tokens,
            "recommended_step": self.recommended_step,
            "token_beta": self.token_beta,
            "operating_points": [asdict(point) for point in self.curve],
            "provenance": dict(self.provenance or {}),
        }

    def _layout(self) -> dict[str, Any]:
        """How the tensors are used."""
        resident = {} if self.resident is None else {"resident": self.resident.to_json()}
        return {
            **resident,
            "geometry": self.shape.geometry.to_json(),
            "recomputed_layers": self.shape.recomputed,
            "ropes": [{"pairing": rope.pairing, "scaling": rope.scaling} for rope in self.shape.ropes],
            "groups": [{**asdict(stored.group), "rank": int(stored.directions.shape[1])} for stored in self.groups],
        }


def read_config(folder: Path) -> dict[str, Any]:
    """kvalign_config.json of a folder; raises ArtifactInvalid."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise ArtifactInvalid(f"{folder.name} holds no {CONFIG_NAME}.", "Name a model converted by kvalign.")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise ArtifactInvalid(f"{CONFIG_NAME} is larger than {_MAX_CONFIG_BYTES:,} bytes.", _CONVERT_AGAIN)
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"{CONFIG_NAME} is not JSON: {str(error)[:200]}.", _CONVERT_AGAIN) from error
    if not isinstance(config, dict) or config.get("schema_version") != SCHEMA_VERSION:
        found = config.get("schema_version") if isinstance(config, dict) else None
        raise ArtifactInvalid(
            f"{CONFIG_NAME} has schema version {found!r}; this kvalign reads {SCHEMA_VERSION}.", "Update kvalign."
        )
    return config


def load_artifact(folder: Path) -> Artifact:
    """Read a codec folder and check that its parts fit each other. Raises ArtifactInvalid naming what does not."""
    config = read_config(folder)
    try:
        data = (folder / TENSORS_NAME).read_bytes()
        tensors = load(data)
        artifact = _assembled(config, tensors)
        _ = artifact.resident_plan  # bases without an inverse are refused here
    except OSError as error:
        raise ArtifactInvalid(f"{TENSORS_NAME} cannot be read.", _CONVERT_AGAIN) from error
    except KeyError as error:
        raise ArtifactInvalid(f"The artifact lacks {str(error)[:200]}.", _CONVERT_AGAIN) from error
    except (SafetensorError, ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ArtifactInvalid(f"The artifact's parts do not fit: {str(error)[:200]}.", _CONVERT_AGAIN) from error
    # The bytes as they were read, whatever order this version would write them in.
    artifact.__dict__["tensor_bytes"] = data
    if artifact.codec_id.hex() != config.get("codec_id"):
        raise ArtifactInvalid(
            f"The codec_id in {CONFIG_NAME} is not that of {TENSORS_NAME} and the layout beside it.", _CONVERT_AGAIN
        )
    return artifact


def _assembled(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Artifact:
    geometry = Geometry.from_json(config["geometry"])
    ropes = tuple(_rope(item, tensors.get(f"inv_freq.{index}")) for index, item in enumerate(config["ropes"]))
    if len(ropes) != len(geometry.layers):
        raise ValueError("ropes and geometry differ in layers")
    recomputed = _number(config, "recomputed_layers", 0, len(geometry.layers) - 1)
    groups = tuple(_stored_group(item, tensors, geometry) for item in config["groups"])
    covered = [
        (part.kind, layer) for part in (s.group for s in groups) for layer in range(part.first_layer, part.end_layer)
    ]
    if covered != [(kind, layer) for kind in KINDS for layer in range(recomputed, len(geometry.layers))]:
        raise ValueError("the groups are not the keys of each stored layer in turn, then the values")
    if len({stored.predictor.shape[0] for stored in groups}) != 1 or (groups[0].predictor.shape[0] > 0) != (
        recomputed > 0
    ):
        raise ValueError("the groups are predicted from different features")
    return Artifact(
        base=BaseModel.from_json(config["base"]),
        shape=CacheShape(geometry, ropes, recomputed),
        groups=groups,
        tables=Tables(tensors["tables"].numpy().astype(np.uint16)),
        sink_tokens=_number(config, "sink_tokens", 0, _MAX_VERBATIM_TOKENS),
        recent_tokens=_number(config, "recent_tokens", 0, _MAX_VERBATIM_TOKENS),
        recommended_step=_number(config, "recommended_step", -STEP_LIMIT, STEP_LIMIT),
        token_beta=_number(config, "token_beta", 0.0, _MAX_TOKEN_BETA),
        curve=tuple(_operating_point(item) for item in config["operating_points"]),
        resident=StoredResident.from_json(config["resident"], tensors, geometry.layers)
        if "resident" in config
        else None,
        provenance=config.get("provenance"),
    )


N = TypeVar("N", int, float)


def _number(config: Mapping[str, Any], name: str, low: N, high: N) -> N:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int if isinstance(low, int) else (int, float)):
        raise TypeError(f"{name} is {str(value)[:40]!r}, not a number")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, outside {low} to {high}")
    return type(low)(value)


def _operating_point(item: Mapping[str, Any]) -> OperatingPoint:
    measured = {name: _number(item, name, 0.0, _MAX_MEASURED) for name in ("ratio", "kl_mean", "kl_p99", "top1")}
    return OperatingPoint(step=_number(item, "step", -STEP_LIMIT, STEP_LIMIT), **measured)


def _rope(item: Mapping[str, Any], inv_freq: Tensor | None) -> Rope:
    pairing: Pairing = item["pairing"]
    if pairing not in ("none", "half", "interleaved"):
        raise ValueError(f"unknown rotary pairing {str(pairing)[:40]!r}")
    if pairing == "none":
        return Rope("none", torch.zeros(0))
    if inv_freq is None:
        raise ValueError("rotary frequencies are missing")
    return Rope(pairing, inv_freq.float(), float(item["scaling"]))


def _stored_group(item: Mapping[str, Any], tensors: Mapping[str, Tensor], geometry: Geometry) -> StoredGroup:
    fields = {key: item[key] for key in ("kind", "first_layer", "end_layer", "start", "stop")}
    group = FeatureGroup(**fields)
    if not 0 <= group.first_layer < group.end_layer <= len(geometry.layers):
        raise ValueError(f"group {str(group.name)[:40]} is outside the geometry")
    offsets = geometry.offsets(group.kind)
    if (group.start, group.stop) != (offsets[group.first_layer], offsets[group.end_layer]):
        raise ValueError(f"group {group.name} takes other features than its layers have")
    name, rank = group.name, int(item["rank"])
    layers = geometry.layers[group.first_layer : group.end_layer]
    weights = tuple(tensors[f"weights.{group.kind}.{group.first_layer + i}"].float() for i in range(len(layers)))
    features = tensors[f"predictor.{name}"].shape[0]
    expected: list[tuple[Tensor, tuple[int, ...], torch.dtype]] = [
        (tensors[f"intercept.{name}"], (group.width,), torch.float32),
        (tensors[f"predictor.{name}"], (features, group.width), torch.int8),
        (tensors[f"feature_scale.{name}"], (features,), torch.float32),
        (tensors[f"predictor_scale.{name}"], (group.width,), torch.float32),
        (tensors[f"directions.{name}"], (group.width, rank), torch.int8),
        (tensors[f"directions_scale.{name}"], (rank,), torch.float32),
        (tensors[f"scales.{name}"], (rank,), torch.int16),
    ]
    for layer, weight in zip(layers, weights, strict=True):
        dim = layer.head_dim(group.kind)
        expected.append((weight, (layer.kv_heads, dim, dim), torch.float32))
    for tensor, shape, dtype in expected:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"a tensor of group {name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
        if dtype == torch.float32 and not torch.isfinite(tensor).all():
            raise ValueError(f"a tensor of group {name} is not finite")
    for weight in weights:
        if torch.linalg.cholesky_ex(weight).info.any():
            raise ValueError(f"a head weight of group {name} is not positive definite")
    intercept, predictor, feature_scale, predictor_scale, directions, scale, scales = (
        tensor for tensor, _, _ in expected[:7]
    )
    if (scales[1:] > scales[:-1]).any():
        raise ValueError(f"the scales of group {name} do not fall")
    return StoredGroup(
        group, intercept, predictor, feature_scale, predictor_scale, weights, directions, scale, scales.numpy()
    )


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)
