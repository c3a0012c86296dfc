"""One calibration pass for all methods, and our codec fitted from it. Measures no quality and searches no step."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.environment import say
from kvalign import calibrate, fit
from kvalign.align.basis import fit_basis, head_weights
from kvalign.artifact import Artifact, BaseModel, StoredGroup
from kvalign.capture import CacheShape, Captured, capture, load_model, load_tokenizer, measure_shape, position_limit
from kvalign.convert import TOKEN_BETA
from kvalign.recompute import default_count
from kvalign.resident.cache import coded_layers
from kvalign.resident.fit import fit_resident
from kvalign.resident.stored import StoredResident
from kvalign.statistics import Statistics
from kvalign.text import Document, kept_aside, token_sequences

SINK_TOKENS = 4
_SEQUENCE_TOKENS = 1024
_TABLE_RATIO = 20.0


@dataclass(frozen=True)
class Subject:
    """A model to measure on."""

    folder: Path
    model: Any
    tokenizer: Any
    shape: CacheShape

    @classmethod
    def load(cls, folder: Path) -> "Subject":
        model = load_model(folder)
        shape = measure_shape(model)
        shape = replace(shape, recomputed=default_count(model, shape))
        return cls(folder, model, load_tokenizer(folder), shape)

    @property
    def position_limit(self) -> int:
        return position_limit(self.model)

    def describe(self) -> dict[str, Any]:
        """The model by name and hashes; no path of this machine."""
        base = BaseModel.of(self.folder, repo="", commit="")
        return {
            "name": self.folder.resolve().name,
            "model_type": base.model_type,
            "config_sha256": base.config_sha256,
            "weights": base.to_json()["weights"],
            "weight_bytes_bf16": 2 * sum(weight.numel() for weight in self.model.parameters()),
            "cache_values_per_token": self.shape.geometry.values_per_token,
            "dtype": "float32",
        }


@dataclass(frozen=True)
class Calibration:
    """What all methods are fitted on.

    statistics  sums over seven eighths of the sequences
    kept_aside  what the rest leaves
    """

    statistics: Statistics
    kept_aside: list[Captured]
    tokens: int


def calibrated(subject: Subject, documents: Sequence[Document], *, tokens: int, seed: int) -> Calibration:
    """The passes of a conversion over as much text as there is, up to `tokens`."""
    length = min(_SEQUENCE_TOKENS, subject.position_limit)
    sequences = calibration_sequences(subject, documents, tokens=tokens, length=length, seed=seed)
    aside = kept_aside(sequences)
    basis = sequences[: len(sequences) - len(aside)] or sequences

    with tempfile.TemporaryDirectory() as folder:
        statistics = calibrate.calibrate(
            subject.model,
            subject.shape,
            basis,
            seed=seed,
            sink_tokens=SINK_TOKENS,
            token_beta=TOKEN_BETA,
            checkpoint=Path(folder) / "statistics.safetensors",
            on_progress=lambda done, total: say(f"calibrate: {done} of {total} sequences"),
        )
    return Calibration(
        statistics,
        list(capture(subject.model, subject.shape, iter(aside))),
        sum(sequence.numel() for sequence in sequences),
    )


def calibration_sequences(
    subject: Subject, documents: Sequence[Document], *, tokens: int, length: int, seed: int
) -> list[Tensor]:
    """As kvalign.text.token_sequences, of as many tokens as the text holds, at most `tokens`."""
    texts: dict[str, str] = {}
    for document in documents:
        texts[document.domain] = texts.get(document.domain, "") + document.text
    held = sum(len(subject.tokenizer(text, verbose=False)["input_ids"]) // length for text in texts.values())
    wanted = max(1, min(tokens // length, held)) * length
    return token_sequences(list(documents), subject.tokenizer, tokens=wanted, length=length, seed=seed)


def fitted(subject: Subject, calibration: Calibration, *, finest_ratio: float, token_beta: float) -> Artifact:
    """Our codec as convert makes it, but of the rank that a coded-token ratio of `finest_ratio` needs."""
    statistics = calibration.statistics
    weights = head_weights(statistics)
    bases = []
    for group in statistics.groups:
        say(f"align: basis of {group.name}, {group.width} features")
        bases.append(fit_basis(statistics, group, weights[group.name]))
    transforms, orders = fit.full_transforms(bases, calibration.kept_aside, SINK_TOKENS)
    step = fit.expected_step(transforms, subject.shape.geometry, _TABLE_RATIO)
    tables = fit.fit_tables(transforms, calibration.kept_aside, SINK_TOKENS, step)
    finest = fit.expected_step(transforms, subject.shape.geometry, finest_ratio)
    groups = []
    for basis, transform, order in zip(bases, transforms, orders, strict=True):
        rank = transform.classes(finest).size
        deviation = fit.feature_deviation(calibration.kept_aside, SINK_TOKENS)
        groups.append(StoredGroup.of(basis, transform.scales[:rank], order[:rank], deviation))
    return Artifact(
        base=BaseModel.of(subject.folder, repo=subject.folder.resolve().name, commit=""),
        shape=subject.shape,
        groups=tuple(groups),
        tables=tables,
        sink_tokens=SINK_TOKENS,
        recent_tokens=0,
        recommended_step=step,
        token_beta=token_beta,
    )


def fitted_resident(subject: Subject, calibration: Calibration, *, bits: float) -> StoredResident:
    """The resident form as convert fits it."""
    return fit_resident(
        calibration.statistics,
        subject.shape,
        calibration.kept_aside,
        bits=bits,
        sink_tokens=SINK_TOKENS,
        layers=coded_layers(subject.model),
        position_limit=subject.position_limit,
    )


def artifact_bytes(artifact: Artifact) -> int:
    """Size of the tensors that decoding needs."""
    return len(artifact.tensor_bytes)


def joined_tokens(tokenizer: Any, documents: Sequence[Document], count: int) -> Tensor:
    """The first tokens of all documents one after another, [count] int64; raises ValueError when there are fewer."""
    text = "\n\n".join(document.text for document in documents)
    tokens = tokenizer(text, verbose=False)["input_ids"][:count]
    if len(tokens) < count:
        raise ValueError(f"the text holds {len(tokens)} tokens; {count} are needed")
    return torch.tensor(tokens)
