"""From bases to a codec: component scales and symbol tables. Sees calibration text kept aside only."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.align.basis import Basis
from kvalign.capture import Captured
from kvalign.entropy.classes import Tables, component_bits, fitted_tables, laplace_tables, scale_number
from kvalign.entropy.rans import count_symbols
from kvalign.geometry import Geometry
from kvalign.quantize import quantize, step_size
from kvalign.transform import Transform

# Steps at which symbols are counted, about the one where the codec is expected to work.
_COUNTED_OFFSETS = (-16, -8, 0, 8, 16)


def full_transforms(
    bases: list[Basis], kept_aside: list[Captured], sink_tokens: int
) -> tuple[list[Transform], list[Tensor]]:
    """Transforms of full rank in float32, and for each the columns of its basis by falling scale.

    Scales are mean magnitudes on text that the basis has not seen: on its own text the narrow directions look
    narrower than they are.
    """
    transforms, orders = [], []
    for basis in bases:
        transform = Transform.of(basis, np.zeros(0, dtype=np.int16))
        total = torch.zeros(transform.analysis.shape[1])
        count = 0
        for captured in kept_aside:
            coefficients = _coefficients(captured, transform, sink_tokens)
            total += coefficients.abs().sum(0)
            count += coefficients.shape[0]
        magnitude = total / count
        order = magnitude.argsort(descending=True, stable=True)
        transforms.append(transform.ordered(order, scale_number(magnitude[order].numpy())))
        orders.append(order)
    return transforms, orders


def expected_step(transforms: list[Transform], geometry: Geometry, ratio: float) -> int:
    """Step at which the tables' entropies promise a coded-token ratio; to start a search from."""
    tables = laplace_tables()
    budget = 16.0 * geometry.values_per_token / ratio
    scales = np.concatenate([transform.scales for transform in transforms])
    low, high = int(scales.min()) - 64, int(scales.max()) + 64
    while low < high:
        middle = (low + high) // 2
        if component_bits(tables, scales, middle).sum() > budget:
            low = middle + 1
        else:
            high = middle
    return low


def fit_tables(transforms: list[Transform], kept_aside: list[Captured], sink_tokens: int, step: int) -> Tables:
    """Symbol tables from counts around a step."""
    counts: NDArray[np.int64] | None = None
    for transform in transforms:
        for captured in kept_aside:
            coefficients = _coefficients(captured, transform, sink_tokens)
            for offset in _COUNTED_OFFSETS:
                classes = transform.classes(step + offset)
                coded = np.ascontiguousarray(coefficients[:, : classes.size].numpy())
                every = np.tile(classes, (coded.shape[0], 1))
                sizes = np.full((coded.shape[0], 1), step_size(step + offset), dtype=np.float32)
                counts = count_symbols(quantize(coded, sizes, every), every, counts)
    assert counts is not None
    return fitted_tables(counts)


def feature_deviation(kept_aside: list[Captured], sink_tokens: int) -> Tensor:
    """Standard deviation of each feature over the tokens after the sinks, [F] float32."""
    features = torch.cat([captured.features[sink_tokens:] for captured in kept_aside])
    # Not std, which warns where there is no feature.
    return (features - features.mean(0)).square().mean(0).sqrt()


def _coefficients(captured: Captured, transform: Transform, sink_tokens: int) -> Tensor:
    """All coefficients of the tokens after the sinks, [T, R]."""
    group = transform.group
    x = captured.of(group.kind)[sink_tokens:, group.start : group.stop]
    return transform.coefficients(x, captured.features[sink_tokens:], transform.analysis.shape[1])
