"""Atomic writes and locks on a plain folder; knows nothing of what is kept there.

A reader sees the old file or the new one, also when the writer is killed half-way. A loss of power is not
guarded against: nothing is fsynced, which a development server does not need.
"""

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Replace `path` by `value` as JSON in one step; `mode` holds from the first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = temp_beside(path)
    try:
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Raises FileNotFoundError."""
    return json.loads(path.read_text(encoding="utf-8"))


def temp_beside(path: Path) -> Path:
    """A name in the same folder, so that a rename to `path` stays on one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, against other threads and other processes alike; waits for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file systems differ or forbid it."""
    temp = temp_beside(target)
    try:
        try:
            os.link(source, temp)
        except OSError:
            shutil.copyfile(source, temp)
        temp.replace(target)
    finally:
        temp.unlink(missing_ok=True)
