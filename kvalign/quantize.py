"""Steps and symbols. A step is a number of sixteenths of an octave, so that tables and artifacts hold integers."""

import torch
from torch import Tensor

from kvalign.entropy.classes import SIXTEENTHS

_LARGEST_SYMBOL = (1 << 26) - 1


def step_size(step: int) -> float:
    """2^(step / 16), in units of weighted coefficients."""
    return float(2.0 ** (step / SIXTEENTHS))


def quantize(coefficients: Tensor, sizes: Tensor) -> Tensor:
    """Nearest multiples. coefficients [T, R] float32, sizes [T, 1] float32; returns [T, R] int32.

    Plain rounding: shrinking towards centroids lowers squared error and raises KL (docs/algorithm.md).
    """
    return (coefficients / sizes).round_().clamp_(-_LARGEST_SYMBOL, _LARGEST_SYMBOL).to(torch.int32)


def dequantize(symbols: Tensor, sizes: Tensor) -> Tensor:
    """symbols [T, R] int32, sizes [T, 1] float32; returns [T, R] float32."""
    return symbols.float() * sizes
