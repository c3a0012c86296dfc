"""Symbol models: every component at every step belongs to a class, and a class has one table. No coding here.

A coefficient with mean magnitude b, rounded to multiples of a step, has symbols whose distribution depends on
b / step alone. Scales and steps count in sixteenths of an octave, classes in quarters, all as integers, so that
another step is a shift of class and a decoder anywhere picks the same tables:

    class = (scale - step + token_shift + 2) >> 2

A class below LOWEST is not coded: its symbols are zero. A class above HIGHEST codes the symbol's low bits raw, one
bit for each octave, and what is left with the table of a lower class.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIXTEENTHS = 16
LOWEST = -6  # b / step = 2^-1.5 = 0.35: three symbols in four would be zero; coding lower gains nothing (docs/log.md)
HIGHEST = 11  # b / step = 2^2.75 = 6.7
CLASSES = HIGHEST - LOWEST + 1
LARGEST = 63  # symbols of larger magnitude are escaped
ESCAPE = 2 * LARGEST + 1
ALPHABET = ESCAPE + 1
PRECISION_BITS = 12
# A frequency of 1 costs all other symbols 1 / (4096 ln 2) bits, an escape some 32 bits more than it: a symbol of less
# than this share of 1/4096 is cheaper to escape.
_RARE = 0.045
TOTAL = 1 << PRECISION_BITS


@dataclass(frozen=True)
class Tables:
    """Frequencies of all classes.

    frequencies  [CLASSES, ALPHABET] uint16, each row summing to 4096; column s + 63 is symbol s, the last the escape.
                 A symbol of frequency 0 is escaped; the escape itself has one of 1 at least
    """

    frequencies: NDArray[np.uint16]

    def __post_init__(self) -> None:
        if self.frequencies.shape != (CLASSES, ALPHABET) or self.frequencies.dtype != np.uint16:
            raise ValueError(f"frequencies must be uint16 of shape {(CLASSES, ALPHABET)}")
        if (self.frequencies[:, ESCAPE] == 0).any() or (self.frequencies.sum(axis=1, dtype=np.int64) != TOTAL).any():
            raise ValueError("each class must give the escape a frequency, and 4096 in all")

    def cumulative(self) -> NDArray[np.uint16]:
        """[CLASSES, ALPHABET]: sum of the frequencies before each symbol."""
        sums = np.cumsum(self.frequencies, axis=1, dtype=np.int64)
        return (sums - self.frequencies).astype(np.uint16)

    def slots(self) -> NDArray[np.uint8]:
        """[CLASSES, 4096]: the symbol's column at each slot."""
        columns = np.arange(ALPHABET, dtype=np.uint8)
        return np.stack([np.repeat(columns, row) for row in self.frequencies])


def scale_number(magnitude: NDArray[np.float32]) -> NDArray[np.int16]:
    """Mean magnitude of each component in sixteenths of an octave, rounded."""
    floor = np.float32(2.0**-100)
    return np.rint(SIXTEENTHS * np.log2(np.maximum(magnitude, floor))).astype(np.int16)


def component_bits(tables: Tables, scales: NDArray[np.int16], step: int) -> NDArray[np.float64]:
    """Bits of each component at a step: the entropy of its class, an octave above the last class at one bit more.

    scales  [R] int16
    returns [R]; 0 where a component is not coded
    """
    shares = tables.frequencies / TOTAL
    entropies = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    classes = ((scales.astype(np.int64) - step + 2) >> 2) - LOWEST
    inner = entropies[np.clip(classes, 0, CLASSES - 1)] + np.maximum(classes - (CLASSES - 1), 0) / 4
    return np.where(classes >= 0, inner, 0.0)


def laplace_tables() -> Tables:
    """Tables of rounded Laplace variables at the middle of each class."""
    classes = np.arange(LOWEST, HIGHEST + 1)
    return Tables(_quantised(np.stack([_laplace(2.0 ** (c / 4)) for c in classes])))


def fitted_tables(counts: NDArray[np.int64], weight: float = 64.0) -> Tables:
    """Tables from measured counts, leaning on the Laplace model with the weight of `weight` symbols.

    counts  [CLASSES, ALPHABET]
    """
    prior = np.stack([_laplace(2.0 ** (c / 4)) for c in range(LOWEST, HIGHEST + 1)])
    # A symbol and its negative are equally likely: sharing their counts halves the noise of the tails.
    mirrored = counts.astype(np.float64)
    body = mirrored[:, :ESCAPE]
    mirrored[:, :ESCAPE] = (body + body[:, ::-1]) / 2
    return Tables(_quantised(mirrored + weight * prior))


def _laplace(scale: float) -> NDArray[np.float64]:
    """Probabilities of symbols -63..63 and of an escape, for mean magnitude `scale` in steps."""
    edges = np.arange(LARGEST + 1) + 0.5
    tail = np.exp(-edges / scale)
    positive = (tail[:-1] - tail[1:]) / 2
    return np.concatenate([positive[::-1], [1 - tail[0]], positive, [tail[-1]]])


def _quantised(weights: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Integer rows of sum 4096 under which the weighted symbols take the fewest bits; rare ones escape."""
    share = weights / weights.sum(axis=1, keepdims=True)
    rare = share * TOTAL < _RARE
    rare[:, ESCAPE] = False
    share[:, ESCAPE] += np.where(rare, share, 0).sum(axis=1)
    share[rare] = 0
    frequencies = np.where(rare, 0, np.maximum(1, np.floor(share * TOTAL))).astype(np.int64)
    for row, wanted in zip(frequencies, share, strict=True):
        while (excess := int(row.sum()) - TOTAL) != 0:
            if excess < 0:
                row[np.argmax(wanted * np.log1p(1 / np.maximum(row, 1)))] += 1
            else:
                lost = np.where(row > 1, -wanted * np.log1p(-1 / np.maximum(row, 2)), np.inf)
                row[np.argmin(lost)] -= 1
    return frequencies.astype(np.uint16)
