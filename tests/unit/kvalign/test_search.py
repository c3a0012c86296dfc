"""The search for a step on made-up curves: the target is met where it can be, and refused where it cannot."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import WIDE, measured, resident_result

from kvalign.errors import ConfigInvalid
from kvalign.evaluate.search import Measurement, Target, search_step
from kvalign.evaluate.validation import Validation

BOUNDS = (-200, 200)


class Curve:
    """KL 2^(kl_slope s) and ratio 2^(ratio_slope s) about their values at step 0, and the steps asked for."""

    def __init__(self, kl: float = 0.02, ratio: float = 10.0, kl_slope: float = 0.1, ratio_slope: float = 0.05) -> None:
        self._kl, self._ratio, self._slopes = kl, ratio, (kl_slope, ratio_slope)
        self.asked: list[int] = []

    def at(self, step: int) -> tuple[float, float]:
        return self._kl * 2 ** (self._slopes[0] * step), self._ratio * 2 ** (self._slopes[1] * step)

    def __call__(self, step: int) -> Measurement:
        assert BOUNDS[0] <= step <= BOUNDS[1]
        self.asked.append(step)
        return measured(step, *self.at(step))


slopes = st.floats(0.02, 0.4)


@given(st.floats(1e-4, 1.0), slopes, st.integers(*BOUNDS), st.floats(0.001, 0.5))
@settings(max_examples=60)
def test_a_quality_target_is_met_close_by(kl: float, slope: float, start: int, target: float) -> None:
    curve = Curve(kl=kl, kl_slope=slope)
    finest, coarsest = curve.at(BOUNDS[0])[0], curve.at(BOUNDS[1])[0]
    if finest > target:
        with pytest.raises(ConfigInvalid, match=f"max_kl {target:g} cannot be reached"):
            search_step(curve, Target(target, None), start=start, bounds=BOUNDS)
        return
    best, *others = search_step(curve, Target(target, None), start=start, bounds=BOUNDS)
    assert len(curve.asked) == len(set(curve.asked)) == 1 + len(others) <= 10
    assert best.summary().kl_mean <= target * (1 + 1e-6)
    if coarsest <= target:
        assert best.step == BOUNDS[1]
    else:
        # Within the tolerance, or at most one whole step short of the last before the target, on steep curves.
        assert best.summary().kl_mean > target / 1.07 or curve.at(best.step + 2)[0] > target * (1 - 1e-6)


@given(st.floats(2, 100), slopes, st.integers(*BOUNDS), st.floats(3, 60))
@settings(max_examples=60)
def test_a_size_target_is_met_close_by(ratio: float, slope: float, start: int, target: float) -> None:
    curve = Curve(ratio=ratio, ratio_slope=slope)
    if curve.at(BOUNDS[1])[1] < target:
        with pytest.raises(ConfigInvalid, match=f"ratio {target:g} cannot be reached") as caught:
            search_step(curve, Target(None, target), start=start, bounds=BOUNDS)
        assert caught.value.remedy.startswith("Ask for a ratio of at most ")
        return
    best, *_ = search_step(curve, Target(None, target), start=start, bounds=BOUNDS)
    assert len(curve.asked) <= 10
    assert best.ratio() >= target * (1 - 1e-3)
    if curve.at(BOUNDS[0])[1] < target:
        assert best.ratio() < target * 1.07 or curve.at(best.step - 2)[1] < target * 1.001


@given(st.integers(0, 999), st.integers(-60, 60))
@settings(max_examples=60)
def test_a_noisy_curve_is_met_or_refused_but_never_missed(seed: int, start: int) -> None:
    """Measured curves are not smooth: what is returned still holds."""
    noise = 1 + 0.3 * (torch.rand(401, generator=torch.Generator().manual_seed(seed)) - 0.5)

    def measure_at(step: int) -> Measurement:
        return measured(step, 0.02 * 2 ** (0.1 * step) * float(noise[step + 200]), 10 * 2 ** (0.05 * step))

    best, *_ = search_step(measure_at, Target(0.02, None), start=start, bounds=BOUNDS)
    assert best.summary().kl_mean <= 0.02 * (1 + 1e-6)
    assert best.summary().kl_mean > 0.005


def test_a_start_outside_the_bounds_is_moved_inside() -> None:
    for start in (-999, 999):
        assert search_step(Curve(), Target(0.02, None), start=start, bounds=BOUNDS)[0].step <= 0


def test_a_flat_curve_ends() -> None:
    best, *_ = search_step(lambda step: measured(step, 0.01, 10.0), Target(0.02, None), start=0, bounds=BOUNDS)
    assert best.step == BOUNDS[1]
    with pytest.raises(ConfigInvalid, match="the nearest of"):
        search_step(lambda step: measured(step, 0.03, 10.0), Target(0.02, None), start=0, bounds=BOUNDS)


def test_no_distance_at_all_is_a_distance() -> None:
    best, *_ = search_step(lambda step: measured(step, 0.0, 10.0), Target(0.02, None), start=0, bounds=BOUNDS)
    assert best.step == BOUNDS[1]


def test_a_refusal_names_the_nearest_that_was_found() -> None:
    with pytest.raises(ConfigInvalid, match=r"gives ratio 19\.\d+ at KL") as caught:
        search_step(Curve(), Target(None, 40), start=0, bounds=(-20, 19))
    assert "Ask for a ratio of at most 19" in caught.value.remedy


def test_measurements_split_by_domain_and_add_up() -> None:
    together = Measurement(
        3,
        measured(3, 0.1, 10, "a").trials + measured(3, 0.3, 20, "b").trials + measured(3, 0.5, 20, "b").trials,
        WIDE,
    )
    parts = together.domains()
    assert list(parts) == ["a", "b"]
    assert parts["b"].summary().kl_mean == pytest.approx(0.4)
    assert together.summary().kl_mean == pytest.approx(0.3)
    assert together.ratio() == pytest.approx(3 / (1 / 10 + 1 / 20 + 1 / 20), rel=1e-3)
    assert together.point().step == 3


def test_a_validation_keeps_the_chosen_step_and_sorts_the_curve(tmp_path: Path) -> None:
    found = Validation.of(
        [measured(4, 0.1, 10, "a"), measured(-4, 0.05, 8, "a"), measured(12, 0.2, 12, "a")],
        resident_result(),
        floor_kl=1e-9,
        prefix_tokens=60,
        continuation_tokens=20,
    )
    assert found.step == 4
    assert [point.step for point in found.curve] == [-4, 4, 12]
    assert found.overall.ratio == pytest.approx(10, rel=1e-3)
    assert found.overall.cache_ratio < found.overall.ratio
    found.save(tmp_path)
    assert Validation.load(tmp_path) == found
