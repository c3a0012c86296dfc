"""Run calibration text through a model and sum what its cache and its gradients show. Knows no codec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.capture import CacheShape, capture, capture_with_gradients
from kvalign.statistics import Statistics, feature_groups

# Each head's sensitivity is one D x D matrix, so that far fewer tokens fix it than the covariance needs.
GRADIENT_TOKENS = 8192
_GRADIENT_LENGTH = 512
_CHECKPOINT_SEQUENCES = 4


def gradient_sequences(sequences: list[Tensor]) -> list[Tensor]:
    """Pieces of the calibration text, taken in turn from its sequences, for backward passes."""
    length = min(_GRADIENT_LENGTH, sequences[0].numel())
    pieces = [sequence[:length] for sequence in sequences]
    return pieces[: max(1, GRADIENT_TOKENS // length)]


def calibrate(
    model: Any,
    shape: CacheShape,
    sequences: list[Tensor],
    *,
    seed: int,
    checkpoint: Path,
    on_progress: Callable[[int, int], None],
) -> Statistics:
    """Sums over all sequences, and over the gradients of some; goes on from `checkpoint` when it is there.

    sequences    [T] int64 each
    checkpoint   written every few passes, atomically
    on_progress  called with (passes done, passes in all); what it raises stops the work
    """
    groups = feature_groups(shape.geometry)
    statistics = Statistics(groups, shape.geometry)
    if checkpoint.exists():
        statistics = Statistics.load(checkpoint, groups, shape.geometry)
    backward = gradient_sequences(sequences)
    total = len(sequences) + len(backward)
    on_progress(statistics.passes, total)
    for captured in capture(model, shape, iter(sequences[statistics.sequences :])):
        statistics.update({"keys": captured.keys, "values": captured.values})
        _kept(statistics, checkpoint, total, on_progress)
    for index in range(statistics.gradient_sequences, len(backward)):
        # A generator for each piece, so that a resumed run samples the same labels.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        captured = capture_with_gradients(model, shape, backward[index], generator)
        assert captured.key_gradients is not None
        assert captured.value_gradients is not None
        statistics.update_sensitivity({"keys": captured.key_gradients, "values": captured.value_gradients})
        _kept(statistics, checkpoint, total, on_progress)
    return statistics


def _kept(statistics: Statistics, checkpoint: Path, total: int, on_progress: Callable[[int, int], None]) -> None:
    if statistics.passes % _CHECKPOINT_SEQUENCES == 0:
        statistics.save(checkpoint)
    on_progress(statistics.passes, total)
