"""Calibration on a tiny model: stopped anywhere and called again, it ends at the same sums, bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvalign.calibrate import calibrate
from kvalign.capture import capture, capture_with_gradients, measure_shape
from kvalign.config import Metric
from kvalign.geometry import KINDS
from kvalign.statistics import Statistics, feature_groups
from kvalign.token_steps import shifts_by_attention
from kvalign.windows import prefix_tokens

SINK = 3


class Stop(Exception):
    """The caller wants no more."""


def sequences(count: int = 7, length: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (length,), generator=generator) for _ in range(count)]


def run(
    model: Any, folder: Path, *, stop_at: int | None = None, beta: float = 0.3, metric: Metric = "gradient"
) -> Statistics:
    def on_progress(done: int, total: int) -> None:
        assert total == 7
        if done == stop_at:
            raise Stop

    return calibrate(
        model,
        replace(measure_shape(model), recomputed=1),
        sequences(),
        seed=5,
        checkpoint=folder / "checkpoint.safetensors",
        on_progress=on_progress,
        sink_tokens=SINK,
        token_beta=beta,
        metric=metric,
    )


def sums(statistics: Statistics, folder: Path) -> bytes:
    statistics.save(folder / "sums.safetensors")
    return (folder / "sums.safetensors").read_bytes()


@pytest.mark.parametrize("stops", [(0,), (3,), (5, 6), (4,), (7,), (2, 4, 5)])
def test_resumed_sums_are_the_same_bits(
    tiny_model: Callable[[str], Any], tmp_path: Path, stops: tuple[int, ...]
) -> None:
    model = tiny_model("llama")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    for stop in stops:
        with pytest.raises(Stop):
            run(model, parts, stop_at=stop)
    assert sums(run(model, parts), parts) == sums(run(model, whole), whole)


@pytest.mark.parametrize("metric", ["forward", "none"])
def test_resumed_sums_are_the_same_bits_by_any_metric(
    tiny_model: Callable[[str], Any], tmp_path: Path, metric: Metric
) -> None:
    model = tiny_model("llama")
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    with pytest.raises(Stop):
        run(model, tmp_path / "parts", stop_at=5, metric=metric)
    found, whole = (run(model, tmp_path / name, metric=metric) for name in ("parts", "whole"))
    assert sums(found, tmp_path) == sums(whole, tmp_path)


def test_a_resumed_run_repeats_no_more_than_a_checkpoint_apart(
    tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        run(tiny_model("llama"), tmp_path, stop_at=6)
    with pytest.raises(Stop):
        run(tiny_model("llama"), tmp_path, stop_at=4)  # told first of all, so that it went on from there


@pytest.mark.parametrize("metric", ["gradient", "forward", "none"])
def test_sums_leave_sinks_out(tiny_model: Callable[[str], Any], tmp_path: Path, metric: Metric) -> None:
    model = tiny_model("llama")
    statistics = run(model, tmp_path, metric=metric)
    shape = replace(measure_shape(model), recomputed=1)
    wanted = Statistics(feature_groups(shape.geometry, first=1), shape.geometry)
    for captured in capture(model, shape, iter(sequences())):
        wanted.update({kind: captured.of(kind)[SINK:] for kind in KINDS}, captured.features[SINK:])
    assert statistics.sequences == 7
    assert statistics.features is not None
    assert statistics.features.count == statistics.moments["keys.0-1"].count == 7 * (24 - SINK)
    for group in wanted.groups:
        found, plain = statistics.moments_of(group), wanted.moments_of(group)
        torch.testing.assert_close(found.mean(), plain.mean(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.covariance(), plain.covariance(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            statistics.cross_covariance(group), wanted.cross_covariance(group), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_token_counts_by_the_square_of_its_step(
    tiny_model: Callable[[str], Any], tmp_path: Path, beta: float
) -> None:
    """Each generator is the sequence's own, so that the last one's gradients can be drawn again."""
    model = tiny_model("llama")
    shape = replace(measure_shape(model), recomputed=1)
    with pytest.raises(Stop):
        run(model, tmp_path, stop_at=4, beta=beta)
    groups = feature_groups(shape.geometry, first=1)
    before = Statistics.load(tmp_path / "checkpoint.safetensors", groups, shape.geometry)
    weight, outer = 0.0, torch.zeros(2, 8, 8, dtype=torch.float64)
    for index, tokens in enumerate(sequences()[:4]):
        labels = torch.Generator().manual_seed(5 * 1_000_003 + index)
        _, gradients = capture_with_gradients(model, shape, tokens, prefix_tokens(24), labels)
        shifts = shifts_by_attention([received[SINK:] for received in gradients.attention], beta)
        for g, shift in zip(gradients.keys[SINK:, 16:].double().unflatten(1, (2, 8)), shifts, strict=True):
            square = 2.0 ** (int(shift) / 2)
            weight += square
            outer += square * torch.einsum("hd,he->hde", g, g)
        assert (len(set(shifts)) > 1) == (beta > 0)
    assert before.gradient_weight == pytest.approx(weight)
    torch.testing.assert_close(before.sensitivity["keys.1"].double(), outer, rtol=1e-3, atol=1e-6)


def test_without_gradients_nothing_is_known_of_the_loss(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    statistics = run(tiny_model("llama"), tmp_path, metric="none")
    assert statistics.sequences == 7
    assert (statistics.gradient_weight, statistics.sensitivity) == (0, {})
