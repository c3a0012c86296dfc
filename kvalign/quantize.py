"""Steps and symbols. A step is a number of sixteenths of an octave, so that tables and artifacts hold integers."""

import numpy as np
from numpy.typing import NDArray

from kvalign.compiled import njit
from kvalign.entropy.classes import LOWEST, SIXTEENTHS

LARGEST_SYMBOL = 1 << 26
STEP_LIMIT = 1600  # 2^-100 to 2^100: wider than any coefficient, and well inside float32


def step_size(step: int) -> float:
    """2^(step / 16), in units of weighted coefficients."""
    return float(2.0 ** (step / SIXTEENTHS))


def quantize(
    coefficients: NDArray[np.float32], sizes: NDArray[np.float32], classes: NDArray[np.int16]
) -> NDArray[np.int32]:
    """Nearest multiples, [T, R]; 0 where the class is below LOWEST, which is not coded.

    coefficients  [T, R]
    sizes         [T, 1]: each token's step
    classes       [T, R]

    Magnitudes from LARGEST_SYMBOL on become LARGEST_SYMBOL.
    Plain rounding: shrinking towards centroids lowers squared error and raises KL (docs/algorithm.md).
    """
    symbols = np.empty(coefficients.shape, dtype=np.int32)
    _quantize(coefficients, 1 / sizes[:, 0], classes, symbols)
    return symbols


def dequantize(symbols: NDArray[np.int32], sizes: NDArray[np.float32]) -> NDArray[np.float32]:
    """symbols [T, R], sizes [T, 1]; returns [T, R]."""
    return symbols * sizes


@njit(cache=True, nogil=True)
def _quantize(coefficients, densities, classes, symbols):  # type: ignore[no-untyped-def]
    for t in range(coefficients.shape[0]):
        for r in range(coefficients.shape[1]):
            if classes[t, r] < LOWEST:
                symbols[t, r] = 0
            else:
                nearest = np.rint(coefficients[t, r] * densities[t])
                symbols[t, r] = np.int32(min(max(nearest, -LARGEST_SYMBOL), LARGEST_SYMBOL))
