"""Finished stages of a conversion, each in its own folder under a hash of everything that went into it.

Knows folders and hashes; not what a stage does.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_FINISHED = "finished.json"
# Raised when what a stage leaves changes its form: folders of another form are not read.
_FORM = 4


@dataclass(frozen=True)
class StageProgress:
    """How far a stage is; unit names what is counted."""

    stage: str
    done: int
    total: int
    unit: str


class Stages:
    """Runs stages in order; one that an earlier run finished on the same inputs is not run again.

    seconds   what each stage took in the run that finished it
    """

    def __init__(self, folder: Path, on_progress: Callable[[StageProgress], None], root_inputs: Any) -> None:
        self._folder = folder
        self._on_progress = on_progress
        self._key = _hashed("", [_FORM, metadata.version("kvalign"), root_inputs])
        self.seconds: dict[str, float] = {}

    def run(self, stage: str, inputs: Any, make: Callable[[Path], None], load: Callable[[Path], T]) -> Callable[[], T]:
        """Have the stage's output made in a folder of its own unless it lies there; returns how to load it, once.

        inputs  what this stage depends on besides the stages before it; JSON-ready
        make    writes the output; finds in the folder what an interrupted run of it left
        """
        self._key = _hashed(self._key, [stage, inputs])
        folder = self._folder / f"{stage}-{self._key[:16]}"
        finished = folder / _FINISHED
        if not finished.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with self.timed(stage):
                make(folder)
            partial = finished.with_suffix(".partial")
            partial.write_text(json.dumps({"seconds": self.seconds[stage]}))
            partial.replace(finished)
        self.seconds[stage] = float(json.loads(finished.read_text())["seconds"])
        return cache(lambda: load(folder))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Announce the stage, and note how long the block took."""
        self.tell(stage, 0, 1)
        begun = time.monotonic()
        yield
        self.seconds[stage] = round(time.monotonic() - begun, 2)
        self.tell(stage, 1, 1)

    def tell(self, stage: str, done: int, total: int, unit: str = "") -> None:
        self._on_progress(StageProgress(stage, done, total, unit))


def _hashed(key: str, inputs: Any) -> str:
    return hashlib.sha256(f"{key}/{json.dumps(inputs, sort_keys=True)}".encode()).hexdigest()
