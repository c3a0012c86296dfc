"""Stages run once for their inputs, go on after a crash, and run again when anything before them changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvalign.stages import StageProgress, Stages


class Work:
    """Two stages that leave a file each, and a log of what was done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.told: list[StageProgress] = []

    def run(self, root: Any = "root", first: Any = None, second: Any = None, fails_in: str = "") -> str:
        stages = Stages(self.folder, self.told.append, root)
        a = stages.run("first", first, lambda folder: self._make("first", folder, fails_in), self._load)
        b = stages.run("second", second, lambda folder: self._make("second", folder, fails_in), self._load)
        self.seconds = stages.seconds
        return f"{a()}, {a()}, {b()}"

    def _make(self, stage: str, folder: Path, fails_in: str) -> None:
        checkpoint = folder / "checkpoint"
        self.log.append(f"{stage} goes on" if checkpoint.exists() else stage)
        checkpoint.write_text("half")
        if fails_in == stage:
            raise RuntimeError("the power went")
        (folder / "output").write_text(f"{stage} made {len(self.log)}")

    def _load(self, folder: Path) -> str:
        self.log.append(f"load {folder.name.split('-')[0]}")
        return (folder / "output").read_text()


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path)


def test_a_finished_stage_is_loaded_and_only_once(work: Work) -> None:
    assert work.run() == "first made 1, first made 1, second made 2"
    assert work.log == ["first", "second", "load first", "load second"]
    assert work.run() == "first made 1, first made 1, second made 2"
    assert work.log[4:] == ["load first", "load second"]


def test_a_crashed_stage_goes_on_from_what_it_left(work: Work) -> None:
    with pytest.raises(RuntimeError, match="the power went"):
        work.run(fails_in="second")
    work.run()
    assert work.log == ["first", "second", "second goes on", "load first", "load second"]


def test_other_inputs_of_a_stage_run_it_and_those_after_it(work: Work) -> None:
    work.run(second=1)
    work.log.clear()
    work.run(second=2)
    assert work.log == ["second", "load first", "load second"]
    work.log.clear()
    work.run(first=1, second=2)
    assert work.log == ["first", "second", "load first", "load second"]
    work.log.clear()
    work.run(second=1)
    assert work.log == ["load first", "load second"]


def test_other_root_inputs_run_everything(work: Work) -> None:
    work.run(root={"weights": 1})
    work.log.clear()
    work.run(root={"weights": 2})
    assert work.log[:2] == ["first", "second"]


def test_progress_opens_and_closes_each_stage_that_runs(work: Work) -> None:
    work.run()
    assert [(told.stage, told.done, told.total) for told in work.told] == [
        ("first", 0, 1),
        ("first", 1, 1),
        ("second", 0, 1),
        ("second", 1, 1),
    ]
    work.told.clear()
    work.run()
    assert work.told == []


def test_seconds_are_those_of_the_run_that_finished(work: Work) -> None:
    work.run()
    for finished in work.folder.glob("*/finished.json"):
        finished.write_text(json.dumps({"seconds": 1234.5}))
    work.run()
    assert work.seconds == {"first": 1234.5, "second": 1234.5}
