"""Run calibration text through a model and sum what its cache and its gradients show. Knows no codec."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalign.capture import CacheShape, CapturedGradients, capture, capture_with_gradients, capture_with_queries
from kvalign.config import Metric
from kvalign.geometry import KINDS
from kvalign.statistics import FeatureGroup, Statistics, feature_groups
from kvalign.token_steps import shifts_by_attention, step_sizes
from kvalign.windows import prefix_tokens

_CHECKPOINT_SEQUENCES = 4


def calibrate(
    model: Any,
    shape: CacheShape,
    sequences: list[Tensor],
    *,
    seed: int,
    checkpoint: Path,
    on_progress: Callable[[int, int], None],
    sink_tokens: int = 4,
    token_beta: float = 0.0,
    metric: Metric = "gradient",
    layer_group_size: int | None = None,
) -> Statistics:
    """Sums over all sequences; goes on from `checkpoint` when it is there.

    sequences    [T] int64 each
    checkpoint   written every few sequences, atomically
    on_progress  called with (sequences done, sequences in all); what it raises stops the work
    sink_tokens  first tokens of each sequence, never coded and so left out
    metric       of the sensitivity: by gradients, by what a forward pass shows, or none: all errors alike
    layer_group_size  layers that share a basis; None: as many as a dense basis can hold
    token_beta   as the codec's: a token counts in the sensitivity by the square of the step it will have
    """
    statistics = Statistics(stored_groups(shape, layer_group_size), shape.geometry)
    if checkpoint.exists():
        statistics = load_statistics(checkpoint, shape, layer_group_size)
    on_progress(statistics.sequences, len(sequences))
    for index in range(statistics.sequences, len(sequences)):
        # A generator for each sequence, so that a resumed run samples the same labels.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        tokens = sequences[index]
        if metric == "gradient":
            prefix = prefix_tokens(tokens.numel())
            captured, gradients = capture_with_gradients(model, shape, tokens, prefix, generator)
            weights = _weights(gradients, sink_tokens, token_beta)[sink_tokens:]
            statistics.update_sensitivity({kind: gradients.of(kind)[sink_tokens:] for kind in KINDS}, weights)
        elif metric == "forward":
            captured, found = capture_with_queries(model, shape, tokens)
            statistics.add_sensitivity({kind: found.of(kind) for kind in KINDS}, tokens.numel())
        else:
            captured = next(capture(model, shape, iter([tokens])))
        statistics.update({kind: captured.of(kind)[sink_tokens:] for kind in KINDS}, captured.features[sink_tokens:])
        if statistics.sequences % _CHECKPOINT_SEQUENCES == 0:
            statistics.save(checkpoint)
        on_progress(statistics.sequences, len(sequences))
    return statistics


def stored_groups(shape: CacheShape, layer_group_size: int | None) -> list[FeatureGroup]:
    """Groups of the layers that are stored at rest."""
    return feature_groups(shape.geometry, layer_group_size, first=shape.recomputed)


def load_statistics(path: Path, shape: CacheShape, layer_group_size: int | None) -> Statistics:
    """What calibrate left, finished or not."""
    return Statistics.load(path, stored_groups(shape, layer_group_size), shape.geometry)


def _weights(gradients: CapturedGradients, sink_tokens: int, token_beta: float) -> Tensor:
    """Square of each token's step over the step, [T] float32."""
    if not gradients.attention or not token_beta:
        return torch.ones(gradients.keys.shape[0])
    coded = [received[sink_tokens:] for received in gradients.attention]
    sizes = torch.from_numpy(step_sizes(0, shifts_by_attention(coded, token_beta))[:, 0])
    return torch.cat([torch.zeros(sink_tokens), sizes.square()])
