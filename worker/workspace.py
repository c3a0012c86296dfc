"""The folder that a job works in, and its share of the disk. Must not know what the stages do.

DATA_DIR/jobs/<job id>/
    .lock               held while an attempt works here; says which process holds it
    .reserved           bytes this job may still need; other jobs leave them free
    <stage>-<key>/      what a stage made; key is a hash of its inputs
    <stage>-<key>.done  JSON, written once the stage has finished
DATA_DIR/cache/         compiled code, shared by all jobs
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from kvalign.errors import DiskFull, KvalignError

_JOB_ID = re.compile(r"job_[0-9a-z]{26}")
_LOCK = ".lock"
_RESERVED = ".reserved"
_POLL_S = 0.2
_SAME_PROCESS_S = 5.0

_log = logging.getLogger(__name__)


def stage_key(*inputs: Any) -> str:
    """A short hash of JSON-ready inputs: equal inputs, equal key."""
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


class Workspaces:
    """All jobs' folders on this machine's disk."""

    def __init__(self, data_dir: Path) -> None:
        self._jobs = data_dir / "jobs"
        self.cache = data_dir / "cache"
        for folder in (self._jobs, self.cache):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def open(
        self, job_id: str, while_waiting: Callable[[], None], *, patience_s: float = float("inf")
    ) -> "Iterator[Workspace]":
        """A job's folder, made if need be; waits for an attempt that still works in it.

        while_waiting  called while another process holds the folder; what it raises ends the waiting
        patience_s     after which the other process is killed. Whoever opens holds the job's lease, so the other one
                       has lost it, and would have seen so unless it is stopped or stuck. One in another container or
                       on another machine is waited for.

        Raises DiskFull, or KvalignError where no folder can be made.
        """
        root = self._jobs / job_id
        kill_at = time.monotonic() + patience_s
        while (lock := _lock_or_explain(root)) is None:
            while_waiting()
            if time.monotonic() > kill_at:
                _kill_holder(root)
            time.sleep(_POLL_S)
        with lock:
            _sign(lock)
            yield Workspace(root, self)

    def ids(self) -> list[str]:
        """Jobs that have a folder here."""
        return [folder.name for folder in self._jobs.iterdir() if _JOB_ID.fullmatch(folder.name)]

    def remove_if(self, job_id: str, still_useless: Callable[[], bool]) -> bool:
        """Delete a job's folder, unless an attempt works in it; asks again once no attempt can begin."""
        lock = _try_lock(self._jobs / job_id)
        if lock is None:
            return False
        with lock:
            useless = still_useless()
            if useless:
                shutil.rmtree(self._jobs / job_id, ignore_errors=True)
            return useless

    def free_bytes(self, job_id: str) -> int:
        """What a job may fill the disk to, what it has written already included; others' shares left out."""
        others = sum(_unwritten(folder) for folder in self._jobs.iterdir() if folder.name != job_id)
        return max(0, shutil.disk_usage(self._jobs).free - others + _size(self._jobs / job_id))

    def reserve(self, job_id: str, needed_bytes: int) -> None:
        """Keep disk space for a job until its folder is removed or released. Raises DiskFull."""
        with (self._jobs / _LOCK).open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            free = self.free_bytes(job_id)
            if needed_bytes > free:
                raise DiskFull(
                    f"The job needs {needed_bytes:,} bytes of disk; {free:,} are free of other jobs' shares.",
                    "Retry when other jobs have ended, or ask the operator for a larger disk.",
                )
            (self._jobs / job_id / _RESERVED).write_text(str(needed_bytes))


class Workspace:
    """One job's folder, locked for this attempt.

    root  holds the stages' folders
    """

    def __init__(self, root: Path, all_of_them: Workspaces) -> None:
        self.root = root
        self.all = all_of_them
        self.job_id = root.name

    def folder(self, stage: str, key: str) -> Path:
        """The folder of a stage with these inputs; that of other inputs is deleted."""
        wanted = self.root / f"{stage}-{key}"
        for old in self.root.glob(f"{stage}-*"):
            if old.name not in {wanted.name, f"{wanted.name}.done"}:
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        wanted.mkdir(exist_ok=True)
        return wanted

    def finished(self, stage: str, key: str) -> dict[str, Any] | None:
        """What finish() noted for a stage with these inputs; None when it has not finished."""
        try:
            noted = json.loads((self.root / f"{stage}-{key}.done").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return noted if isinstance(noted, dict) else None

    def finish(self, stage: str, key: str, note: dict[str, Any]) -> None:
        """Mark a stage as finished; all or nothing, whenever the machine dies."""
        mark = self.root / f"{stage}-{key}.done"
        draft = mark.with_suffix(".draft")
        with draft.open("w") as file:
            json.dump(note, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(mark)

    def reserve(self, needed_bytes: int) -> None:
        self.all.reserve(self.job_id, needed_bytes)

    def release(self) -> None:
        """Give the reserved disk space back and keep the files."""
        (self.root / _RESERVED).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _lock_or_explain(root: Path) -> BinaryIO | None:
    try:
        return _try_lock(root)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(
                "The worker's disk has no room for the job's folder.", "Retry when other jobs have ended."
            ) from None
        _log.exception("the folder of job %s cannot be made", root.name)
        raise KvalignError(
            f"The worker cannot make the job's folder ({error.strerror}).", "Ask the operator about the worker's disk."
        ) from None


def _sign(lock: BinaryIO) -> None:
    """Write down whose lock it is; on a full disk it stays unsigned."""
    holder = {"pid": os.getpid(), "started": psutil.Process().create_time(), "place": _place()}
    try:
        lock.truncate(0)
        lock.write(json.dumps(holder).encode())
        lock.flush()
    except OSError as error:
        _log.warning("a job's lock is unsigned: %s", error.strerror)


def _kill_holder(root: Path) -> None:
    """Kill the process that signed the lock, if it runs here and is still that process."""
    try:
        holder = json.loads((root / _LOCK).read_bytes())
        process = psutil.Process(int(holder["pid"]))
        apart_s = abs(process.create_time() - holder["started"])  # it moves with the machine's clock
        same = holder["place"] == _place() and apart_s < _SAME_PROCESS_S
    except (OSError, ValueError, TypeError, KeyError, psutil.Error):  # unsigned, torn, or gone by now
        return
    if same and process.pid != os.getpid():
        _log.warning("process %d holds job %s without a lease and does not let go; killing it", process.pid, root.name)
        process.send_signal(signal.SIGKILL)


def _place() -> str:
    """Where a process number means what it means here."""
    return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"


def _try_lock(root: Path) -> BinaryIO | None:
    """The folder's lock file, open and locked; None when another process has it."""
    root.mkdir(mode=0o700, exist_ok=True)
    path = root / _LOCK
    try:
        file = path.open("ab")
    except FileNotFoundError:  # the folder was deleted since
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):  # held, or deleted by its last holder
        pass
    file.close()
    return None


def _unwritten(folder: Path) -> int:
    """Bytes a job has reserved and not yet filled."""
    try:
        reserved = int((folder / _RESERVED).read_text())
    except (OSError, ValueError):
        return 0
    return max(0, reserved - _size(folder))


def _size(folder: Path) -> int:
    """Bytes on disk under a folder; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
