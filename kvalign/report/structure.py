"""What shape a picture of channels has: columns, rows, or neither. A sentence computed from numbers; draws nothing."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvalign.geometry import Kind

Array = NDArray[np.floating[Any]]

_STRONG = 0.3  # share of variance, above what chance gives, from which an effect is said to shape a picture
_TREND = 0.5


def column_and_row_structure(picture: Array) -> tuple[float, float]:
    """Shares of a picture's variance that its column means (channels) and its row means (heads) explain.

    picture  [N, D], each row divided by that head's largest; rows with NaN are left out
    returns  two shares from 0 to 1; both 0 for a picture of one value

    Two-way analysis of variance without interaction (Scheffé 1959, ch. 4). Rows divided by each head's largest have
    lost their scale, so heads explain less here than in the activations themselves.
    """
    known = _known_rows(picture)
    if not known.size:
        return 0.0, 0.0
    middle = known.mean()
    total = np.square(known - middle).sum()
    # A float32 constant is not quite one after rounding.
    if total <= 1e-12 * np.square(known).sum():
        return 0.0, 0.0
    heads, channels = known.shape
    columns = heads * np.square(known.mean(axis=0) - middle).sum() / total
    rows = channels * np.square(known.mean(axis=1) - middle).sum() / total
    return min(float(columns), 1.0), min(float(rows), 1.0)


def describe_structure(kind: Kind, absolute: Array, variance: Array) -> str:
    """One sentence, computed from the pictures [N, D]: columns, rows, both or neither, and how variance goes.

    Both pictures have their rows divided by each head's largest. An effect counts from a share of 0.3 on, over and
    above the share that it has by chance in noise; a trend from a rank correlation (Spearman) of 0.5 on.
    """
    known = _known_rows(absolute)
    heads, channels = known.shape
    if heads < 2 or channels < 4:
        size = f"{counted(heads, 'head')} of {counted(channels, 'channel')}"
        return f"{kind.capitalize()}: {size}, too few to tell a structure."
    columns, rows = column_and_row_structure(known)
    chance = heads * channels - 1
    by_channel = _above_chance(columns, (channels - 1) / chance) >= _STRONG
    by_head = _above_chance(rows, (heads - 1) / chance) >= _STRONG
    found = {
        (True, False): f"columns, {_agreement(known)}",
        (False, True): "rows, whole heads being large or small in all their channels",
        (True, True): f"columns and rows both, {_agreement(known)}",
        (False, False): "neither columns nor rows shape it",
    }[by_channel, by_head]
    return (
        f"{kind.capitalize()}: channels explain {100 * columns:.0f} % of the picture's variance and heads"
        f" {100 * rows:.0f} %: {found}; {_trend(variance)}."
    )


def counted(number: int, thing: str) -> str:
    """A number with its noun.

    >>> counted(1, "head"), counted(1200, "head")
    ('1 head', '1,200 heads')
    """
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _above_chance(share: float, chance: float) -> float:
    """Noise alone gives few heads large column effects: with two heads, half of the variance."""
    return (share - chance) / (1 - chance)


def _agreement(known: Array) -> str:
    """In how many heads the tenth of channels that is largest on average is above that head's own mean."""
    channels = known.shape[1]
    largest = np.argsort(known.mean(axis=0))[-max(1, channels // 10) :]
    share = (known[:, largest].mean(axis=1) > known.mean(axis=1)).mean()
    return f"the same channels being large in {100 * share:.0f} % of the heads"


def _trend(variance: Array) -> str:
    known = _known_rows(variance)
    correlation = _rank_correlation(np.arange(known.shape[1]), known.mean(axis=0)) if len(known) else 0.0
    said = f"(rank correlation {round(correlation, 2) + 0.0:.2f})"  # + 0.0: no minus before nought
    if abs(correlation) < _TREND:
        return f"variance has no trend over the channel index {said}"
    return f"variance {'rises' if correlation > 0 else 'falls'} with the channel index {said}"


def _rank_correlation(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Spearman's, equal values sharing their mean rank; 0 where either is constant."""
    a, b = (_ranks(found) - (found.size - 1) / 2 for found in (first, second))
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else 0.0


def _ranks(found: NDArray[Any]) -> NDArray[np.float64]:
    _, place, counts = np.unique(found, return_inverse=True, return_counts=True)
    last = np.cumsum(counts) - 1
    return np.asarray((last - (counts - 1) / 2)[place], np.float64)


def _known_rows(picture: Array) -> NDArray[np.float64]:
    assert picture.ndim == 2
    return np.asarray(picture[~np.isnan(picture).any(axis=1)], np.float64)
