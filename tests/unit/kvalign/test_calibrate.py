"""Calibration on a tiny model: stopped anywhere and called again, it ends at the same sums, bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvalign.calibrate import calibrate, gradient_sequences
from kvalign.capture import measure_shape
from kvalign.statistics import Statistics


class Stop(Exception):
    """The caller wants no more."""


def sequences(count: int = 7, length: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (length,), generator=generator) for _ in range(count)]


def run(model: Any, folder: Path, *, stop_at: int | None = None) -> Statistics:
    def on_progress(done: int, total: int) -> None:
        assert total == 14
        if done == stop_at:
            raise Stop

    return calibrate(
        model,
        measure_shape(model),
        sequences(),
        seed=5,
        checkpoint=folder / "checkpoint.safetensors",
        on_progress=on_progress,
    )


def sums(statistics: Statistics, folder: Path) -> bytes:
    statistics.save(folder / "sums.safetensors")
    return (folder / "sums.safetensors").read_bytes()


@pytest.mark.parametrize("stops", [(0,), (3,), (5, 6), (8,), (9, 13), (14,), (5, 10, 12)])
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


def test_a_resumed_run_repeats_no_more_than_a_checkpoint_apart(
    tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    with pytest.raises(Stop):
        run(tiny_model("llama"), tmp_path, stop_at=6)
    with pytest.raises(Stop):
        run(tiny_model("llama"), tmp_path, stop_at=4)  # told first of all, so that it went on from there


def test_every_pass_is_counted(tiny_model: Callable[[str], Any], tmp_path: Path) -> None:
    statistics = run(tiny_model("llama"), tmp_path)
    assert (statistics.sequences, statistics.gradient_sequences, statistics.gradient_count) == (7, 7, 168)
    assert {moments.count for moments in statistics.moments.values()} == {168}


def test_gradient_pieces_are_bounded() -> None:
    long = [torch.zeros(2048, dtype=torch.int64)] * 40
    assert [piece.numel() for piece in gradient_sequences(long)] == [512] * 16
    assert [piece.numel() for piece in gradient_sequences(sequences(3, 100))] == [100] * 3
