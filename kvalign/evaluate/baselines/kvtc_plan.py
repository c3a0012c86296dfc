"""KVTC's bit allocation: which runs of principal components share a group, and in which type each group is stored.

A group of 1, 16, 64, 256 or 1024 neighbouring components, for each token, takes a 16-bit scale, a 16-bit shift and
its numbers as int2, int4 or fp8; a component in no group is dropped. Errors are measured on calibration text with
the rounding of the coder (kvtc.py), and dynamic programming finds the segmentation of least total error
for every budget at once. Staniszewski and Lancucki 2025, arXiv 2511.01815. Knows coefficients, not caches.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvalign.compiled import njit

SIZES = (1, 16, 64, 256, 1024)
# fp8 is E4M3.
BITS = {"int2": 2, "int4": 4, "fp8": 8}
TYPES = tuple(BITS)
GROUP_BITS = 32

# Every cost is a multiple of this many bits.
_UNIT = 2
_DROPPED = 255


@dataclass(frozen=True)
class Group:
    """Components start..start + size - 1 of the sorted coefficients, stored as one type."""

    start: int
    size: int
    type: str

    @property
    def bits(self) -> int:
        """Of one token."""
        return self.size * BITS[self.type] + GROUP_BITS


@dataclass(frozen=True)
class Errors:
    """Squared error a token, summed over the components concerned.

    sizes    of groups, in components
    grouped  [P, sizes, TYPES] float64, of a group that starts at a component; infinite where it would not fit
    dropped  [P] float64, of leaving a component out
    """

    sizes: tuple[int, ...]
    grouped: NDArray[np.float64]
    dropped: NDArray[np.float64]

    @classmethod
    def measured(cls, coefficients: NDArray[np.float32], sizes: tuple[int, ...] = SIZES) -> "Errors":
        """Of every possible group, on coefficients [T, P]. About 2 ns for each of T * P * sum(sizes) numbers."""
        tokens, width = coefficients.shape
        sums = np.zeros((width, len(sizes), len(TYPES)))
        for index, size in enumerate(sizes):
            if size <= width:
                _add_errors(np.ascontiguousarray(coefficients), size, sums[:, index])
            sums[max(0, width - size + 1) :, index] = np.inf
        return cls(sizes, sums / tokens, np.square(coefficients, dtype=np.float64).mean(axis=0))


class Allocation:
    """The best plan for every budget up to a largest one.

    O(P * budget * 16 / 2) time; P * budget / 2 bytes are kept to read plans from.
    """

    def __init__(self, errors: Errors, largest_bits: int) -> None:
        self._sizes = errors.sizes
        costs = np.array([[Group(0, size, name).bits // _UNIT for name in TYPES] for size in errors.sizes])
        self._errors, self._choices = _solved(
            errors.grouped, errors.dropped, np.array(errors.sizes), costs, largest_bits // _UNIT
        )

    @property
    def errors(self) -> NDArray[np.float64]:
        """[budgets]: least squared error a token within a budget of 0, 2, 4... bits a token."""
        return self._errors

    def plan(self, budget_bits: int) -> tuple[Group, ...]:
        """Groups in order, of least error, taking at most budget_bits a token together."""
        groups = []
        at, left = self._choices.shape[0] - 1, budget_bits // _UNIT
        while at > 0:
            choice = int(self._choices[at, left])
            if choice == _DROPPED:
                at -= 1
                continue
            size, name = self._sizes[choice // len(TYPES)], TYPES[choice % len(TYPES)]
            at -= size
            groups.append(Group(at, size, name))
            left -= groups[-1].bits // _UNIT
        return tuple(reversed(groups))


def shared_budget(first: Allocation, second: Allocation, budget_bits: int, second_weight: float) -> tuple[int, int]:
    """Bits for each of two allocations, budget_bits together, of least first error + second_weight * second error."""
    units = min(budget_bits // _UNIT, len(first.errors) - 1, len(second.errors) - 1)
    total = first.errors[: units + 1] + second_weight * second.errors[units::-1]
    spent = int(total.argmin())
    return spent * _UNIT, (units - spent) * _UNIT


@njit(cache=True, nogil=True)
def _solved(grouped, dropped, sizes, costs, budget):  # type: ignore[no-untyped-def]
    """best[i, b]: least error of the first i components in b units. Rows before the widest group are forgotten."""
    width = dropped.size
    rows = sizes.max() + 1
    best = np.zeros((rows, budget + 1))
    choices = np.full((width + 1, budget + 1), _DROPPED, np.uint8)
    for i in range(1, width + 1):
        row = best[i % rows]
        before = best[(i - 1) % rows]
        choice = choices[i]
        for b in range(budget + 1):
            row[b] = before[b] + dropped[i - 1]
        for s in range(sizes.size):
            start = i - sizes[s]
            if start < 0:
                continue
            before = best[start % rows]
            for t in range(costs.shape[1]):
                cost = costs[s, t]
                error = grouped[start, s, t]
                number = np.uint8(s * costs.shape[1] + t)
                for b in range(cost, budget + 1):
                    candidate = before[b - cost] + error
                    if candidate < row[b]:
                        row[b] = candidate
                        choice[b] = number
    return best[width % rows].copy(), choices


# Sums may be reordered, so that they run in vector lanes; the roundings may not, and say so themselves, or Numba
# would compile them with their caller's freedom. Comparisons are written out: the compiler keeps Python's min and max
# of floats out of vector lanes.
_REORDER = {"reassoc", "nsz", "nnan"}
_EXACT = False


@njit(cache=True, nogil=True, fastmath=_REORDER)
def _add_errors(coefficients, size, sums):  # type: ignore[no-untyped-def]
    """Add the squared errors of every group of one size: sums [P, TYPES]."""
    for t in range(coefficients.shape[0]):
        for start in range(coefficients.shape[1] - size + 1):
            x = coefficients[t, start : start + size]
            low, high, mean = _range(x)
            shift = _half(low)
            sums[start, 0] += _int_error(x, shift, _half((high - low) / np.float32(3)), np.float32(3))
            sums[start, 1] += _int_error(x, shift, _half((high - low) / np.float32(15)), np.float32(15))
            shift = _half(mean)
            sums[start, 2] += _fp8_error(x, shift, _half(max(high - shift, shift - low)))


@njit(cache=True, fastmath=_REORDER)
def _range(x):  # type: ignore[no-untyped-def]
    """Least, largest and mean."""
    low, high, total = x[0], x[0], np.float32(0)
    for i in range(x.size):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
        total += x[i]
    return low, high, total / np.float32(x.size)


@njit(cache=True, fastmath=_REORDER)
def _int_error(x, shift, scale, largest):  # type: ignore[no-untyped-def]
    error, zero = np.float32(0), np.float32(0)
    divisor = max(scale, np.float32(1e-30))
    for i in range(x.size):
        code = _nearest(x[i] - shift, divisor)
        code = zero if code < zero else code
        code = largest if code > largest else code
        off = x[i] - (code * scale + shift)
        error += off * off
    return error


@njit(cache=True, fastmath=_REORDER)
def _fp8_error(x, shift, peak):  # type: ignore[no-untyped-def]
    error = np.float32(0)
    scale = max(peak, np.float32(1e-30)) / np.float32(448)
    for i in range(x.size):
        off = x[i] - (_e4m3(x[i] - shift, scale) * scale + shift)
        error += off * off
    return error


@njit(cache=True, fastmath=_EXACT)
def _nearest(x, divisor):  # type: ignore[no-untyped-def]
    return np.rint(x / divisor)


@njit(cache=True, fastmath=_EXACT)
def _half(x):  # type: ignore[no-untyped-def]
    """A float32 rounded to float16, to nearest even, saturating at its largest number."""
    size = min(abs(x), np.float32(65504))
    if size < np.float32(2**-14):
        rounded = (size + np.float32(0.5)) - np.float32(0.5)
    else:
        bits = np.float32(size).view(np.uint32)
        rounded = np.uint32((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).view(np.float32)
    return -rounded if x < 0 else rounded


@njit(cache=True, fastmath=_EXACT)
def _e4m3(x, scale):  # type: ignore[no-untyped-def]
    """x / scale rounded to fp8 E4M3, to nearest even, saturating at 448."""
    size = abs(x / scale)
    size = np.float32(448) if size > np.float32(448) else size
    bits = np.float32(size).view(np.uint32)
    normal = np.uint32((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000).view(np.float32)
    subnormal = (size + np.float32(2**14)) - np.float32(2**14)
    rounded = subnormal if size < np.float32(2**-6) else normal
    return -rounded if x < 0 else rounded
