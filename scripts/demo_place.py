"""The demo's folder: what stays in it from run to run, and what no run leaves behind. Knows no process.

model/          the source model, built once
.compiled/      kernels that conversions compiled for this processor
NAME-kvalign/   the converted model that a run pulled, report card and all; replaced by the next such run
logs/           what the parts of the latest run said
run/            everything of the run at work: both services' data, the Hub client's cache; gone when it ends
.kvalign-demo   held locked by the run at work
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LOCK = ".kvalign-demo"
# Of whoever runs the demo: settings that would lead it elsewhere, and tokens that are none of its business.
_FOREIGN = ("KVALIGN_", "HF_", "HUGGING_FACE_", "HUGGINGFACE_", "TRANSFORMERS_")


class PlaceRefused(Exception):
    """The folder cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Place:
    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def compiled(self) -> Path:
        """Kept from run to run."""
        return self.root / ".compiled"

    def keep_converted(self, snapshot: Path, name: str) -> Path:
        """Put what the Hub client pulled where it outlives the run; whole or not at all."""
        draft, kept = self.run / "converted", self.root / name
        # The client's cache is made of links to files that it names by hash, and ends with the run.
        shutil.copytree(snapshot, draft, copy_function=lambda source, to: os.link(Path(source).resolve(), to))
        shutil.rmtree(kept, ignore_errors=True)
        draft.rename(kept)
        return kept


@contextmanager
def claimed(root: Path) -> Iterator[Place]:
    """The folder, for this run alone, with an empty run/ that is deleted at the end. Raises PlaceRefused."""
    place = Place(root)
    try:
        if root.is_dir() and any(root.iterdir()) and not (root / _LOCK).exists():
            raise PlaceRefused(f"{root} holds other things than demos. Name an empty or a new folder.")
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (root / _LOCK).open("ab")
    except OSError as error:
        raise PlaceRefused(f"{root} cannot be used: {error.strerror}.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlaceRefused(f"Another demo is at work in {root}. Wait for it, or stop it with Ctrl-C.") from None
        shutil.rmtree(place.run, ignore_errors=True)  # of a run that was killed
        for folder in (place.run, place.run / "tmp", place.logs):
            folder.mkdir(exist_ok=True)
        try:
            yield place
        finally:
            shutil.rmtree(place.run, ignore_errors=True)


def isolate(place: Place) -> None:
    """Let this process and those it starts see no settings, token or cache but the run's own.

    To be called before anything imports the Hub's client, which reads its environment once.
    """
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    here = "127.0.0.1,localhost"
    os.environ.update(
        HF_HOME=str(place.run / "hf"),
        HF_HUB_DISABLE_XET="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        XDG_CACHE_HOME=str(place.run / "cache"),
        TMPDIR=str(place.run / "tmp"),
        TOKENIZERS_PARALLELISM="false",
    )
    for name in ("NO_PROXY", "no_proxy"):  # a proxy for the world is none for this machine
        os.environ[name] = f"{os.environ[name]},{here}" if os.environ.get(name) else here
    tempfile.tempdir = None
