"""The measured curve of a codec: what each step gave, and which step a target asks for. Plain numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvalign.errors import ConfigInvalid


@dataclass(frozen=True)
class OperatingPoint:
    """What one step was measured to give on held-out text (protocol R)."""

    step: int
    ratio: float
    kl_mean: float
    kl_p99: float
    top1: float


def step_for_kl(curve: Sequence[OperatingPoint], max_kl: float) -> int:
    """Coarsest step whose mean KL is at most max_kl, by the curve. Raises ConfigInvalid outside what was measured."""
    return _step_at(curve, "kl_mean", max_kl, math.floor)


def step_for_ratio(curve: Sequence[OperatingPoint], ratio: float) -> int:
    """Finest step whose coded-token ratio is at least `ratio`, by the curve. Raises ConfigInvalid, as above."""
    return _step_at(curve, "ratio", ratio, math.ceil)


def _step_at(curve: Sequence[OperatingPoint], name: str, wanted: float, rounding: Callable[[float], int]) -> int:
    """Step at which the curve reaches a value, by straight lines over its logarithm."""
    known = [getattr(point, name) for point in curve]
    if not known or not min(known) <= wanted <= max(known):
        span = f"{min(known):.4g} to {max(known):.4g}" if known else "no point"
        raise ConfigInvalid(
            f"{name} {wanted:.4g} is outside what this codec was measured for ({span}).",
            "Ask within that range, or convert the model again with this target.",
        )
    logs = np.maximum.accumulate(np.log([max(value, 1e-12) for value in known]))
    at = float(np.interp(math.log(wanted), logs, [point.step for point in curve]))
    return int(rounding(round(at, 6)))
