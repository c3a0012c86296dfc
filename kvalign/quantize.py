"""Steps and symbols. A step is a number of sixteenths of an octave, so that tables and artifacts hold integers."""

import torch
from torch import Tensor

from kvalign.entropy.classes import SIXTEENTHS

LARGEST_SYMBOL = 1 << 26
STEP_LIMIT = 1600  # 2^-100 to 2^100: wider than any coefficient, and well inside float32


def step_size(step: int) -> float:
    """2^(step / 16), in units of weighted coefficients."""
    return float(2.0 ** (step / SIXTEENTHS))


def quantize(coefficients: Tensor, sizes: Tensor) -> Tensor:
    """Nearest multiples. coefficients [T, R] float32, sizes [T, 1] float32; returns [T, R] int32.

    Magnitudes from LARGEST_SYMBOL on become LARGEST_SYMBOL.

    Plain rounding: shrinking towards centroids lowers squared error and raises KL (docs/algorithm.md).
    """
    return (coefficients / sizes).round_().clamp_(-LARGEST_SYMBOL, LARGEST_SYMBOL).to(torch.int32)


def dequantize(symbols: Tensor, sizes: Tensor) -> Tensor:
    """symbols [T, R] int32, sizes [T, 1] float32; returns [T, R] float32."""
    return symbols.float() * sizes
