"""Measure a codec at a step over all windows, and search the step that meets a target."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.codec import Codec
from kvalign.curve import OperatingPoint
from kvalign.errors import ConfigInvalid
from kvalign.evaluate.coders import round_trip
from kvalign.evaluate.metrics import Divergence, Summary, summarise
from kvalign.evaluate.protocol import PreparedWindow, Trial, try_coder
from kvalign.geometry import Geometry

_ROUNDS = 10
# Slopes of the logarithms over one sixteenth of an octave of step, near where codecs work; secants replace them.
_KL_SLOPE = 0.07
_RATIO_SLOPE = 0.04
_LONGEST_STRIDE = 48


@dataclass(frozen=True)
class Target:
    """A quality or a size to reach; exactly one of the two."""

    max_kl: float | None
    ratio: float | None
    tolerance: float = 0.06

    def describe(self) -> str:
        return f"max_kl {self.max_kl:g}" if self.max_kl is not None else f"ratio {self.ratio:g}"


@dataclass(frozen=True)
class Measurement:
    """A codec at one step, over all windows."""

    step: int
    trials: tuple[Trial, ...]
    geometry: Geometry

    def sizes(self) -> PayloadSizes:
        return accounting.merged([trial.sizes for trial in self.trials])

    def ratio(self) -> float:
        return accounting.coded_ratio(self.geometry, self.sizes())

    def summary(self) -> Summary:
        return self._summary

    @cached_property
    def _summary(self) -> Summary:
        return summarise([trial.divergence for trial in self.trials])

    def domains(self) -> dict[str, "Measurement"]:
        names = dict.fromkeys(trial.domain for trial in self.trials)
        return {
            name: Measurement(self.step, tuple(trial for trial in self.trials if trial.domain == name), self.geometry)
            for name in names
        }

    def divergences(self) -> list[Divergence]:
        return [trial.divergence for trial in self.trials]

    def point(self) -> OperatingPoint:
        summary = self.summary()
        return OperatingPoint(self.step, round(self.ratio(), 4), summary.kl_mean, summary.kl_p99, summary.top1)


def measure(
    model: Any, codec: Codec, prepared: Sequence[PreparedWindow], step: int, on_window: Callable[[], None]
) -> Measurement:
    """Protocol R at one step on every window."""
    coder = round_trip(codec, step)
    trials = []
    for window in prepared:
        trials.append(try_coder(model, window, coder))
        on_window()
    return Measurement(step, tuple(trials), codec.shape.geometry)


def search_step(
    measure_at: Callable[[int], Measurement], target: Target, *, start: int, bounds: tuple[int, int]
) -> list[Measurement]:
    """Measurements made on the way to the target, the one that meets it best first.

    measure_at  called once for each step tried, at most ten
    bounds      smallest and largest step to try; the outermost is taken when even there the target holds with room
    Raises ConfigInvalid when no step tried meets the target.
    """
    tried: dict[int, Measurement] = {}
    step: int | None = min(max(start, bounds[0]), bounds[1])
    while step is not None and len(tried) < _ROUNDS:
        tried[step] = measure_at(step)
        step = _next(tried, target, bounds)
    best, _ = _bracket(tried, target)
    if best is None:
        nearest = min(tried.values(), key=lambda found: abs(_distance(found, target)))
        raise ConfigInvalid(
            f"{target.describe()} cannot be reached on this model: the nearest of {len(tried)} steps tried gives"
            f" ratio {nearest.ratio():.2f} at KL {nearest.summary().kl_mean:.4g}.",
            "Ask for a larger max_kl, or calibrate on more text."
            if target.ratio is None
            else f"Ask for a ratio of at most {max(found.ratio() for found in tried.values()):.0f}, or for a max_kl.",
        )
    return [tried[best], *(found for step, found in tried.items() if step != best)]


def _distance(found: Measurement, target: Target) -> float:
    """Logarithm of what was found over what is wanted."""
    if target.max_kl is not None:
        return math.log(max(found.summary().kl_mean, 1e-12) / target.max_kl)
    assert target.ratio is not None
    return math.log(max(found.ratio(), 1e-12) / target.ratio)


def _met(found: Measurement, target: Target) -> bool:
    distance = _distance(found, target)
    return distance <= 0 if target.max_kl is not None else distance >= 0


def _outwards(target: Target) -> int:
    """Where the target stops holding: at coarser steps for quality, at finer ones for size."""
    return 1 if target.max_kl is not None else -1


def _bracket(tried: dict[int, Measurement], target: Target) -> tuple[int | None, int | None]:
    """The outermost step that meets the target, and the nearest one further out that does not."""
    outwards = _outwards(target)
    inner = max((s for s in tried if _met(tried[s], target)), key=lambda s: outwards * s, default=None)
    failing = [s for s in tried if not _met(tried[s], target) and (inner is None or outwards * (s - inner) > 0)]
    return inner, min(failing, key=lambda s: outwards * s, default=None)


def _next(tried: dict[int, Measurement], target: Target, bounds: tuple[int, int]) -> int | None:
    """The step to try next, between the steps that bracket the target; None when nothing is left to gain."""
    outwards = _outwards(target)
    innermost, outermost = bounds if outwards > 0 else bounds[::-1]
    inner, outer = _bracket(tried, target)
    if inner is None and outer == innermost:
        return None
    near_enough = inner is not None and abs(_distance(tried[inner], target)) <= target.tolerance
    if near_enough or inner == outermost or (inner is not None and outer == inner + outwards):
        return None
    if inner is not None and outer is not None and len(tried) > _ROUNDS // 2:
        return (inner + outer) // 2
    ends = (
        innermost if inner is None else inner + outwards,
        outermost if outer is None else outer - outwards,
    )
    return min(max(_on_the_line(tried, target), min(ends)), max(ends))


def _on_the_line(tried: dict[int, Measurement], target: Target) -> int:
    """Where a straight line meets the target, half the tolerance on its good side.

    The line goes through the steps that bracket the target, or the nearest two where they all lie on one side.
    """
    good_side = -target.tolerance / 2 * _outwards(target)
    slope = _KL_SLOPE if target.max_kl is not None else _RATIO_SLOPE
    near = sorted(tried, key=lambda step: abs(_distance(tried[step], target)))[:2]
    ends = [step for step in _bracket(tried, target) if step is not None]
    if len(ends) == 2:
        near = ends
    secant = slope
    if len(near) == 2:
        secant = (_distance(tried[near[0]], target) - _distance(tried[near[1]], target)) / (near[0] - near[1])
    if secant > slope / 8 or len(ends) == 2:
        stride = (good_side - _distance(tried[near[0]], target)) / secant
        stride = max(-_LONGEST_STRIDE, min(_LONGEST_STRIDE, stride))
        return near[0] + (math.floor(stride) if target.max_kl is not None else math.ceil(stride))
    # A curve as flat as this says nothing: go on twice as far as the last time.
    *_, before, last = tried
    towards = 1 if _met(tried[last], target) else -1
    return last + 2 * towards * _outwards(target) * max(1, abs(last - before))
