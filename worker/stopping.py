"""Whether this worker is going down: one flag that its main process raises and its pool processes see.

A shared page of memory, because a pool process has no other way to learn of it while it runs a task: Celery
lets running tasks finish. Must not act on it; see worker.watch.
"""

import mmap
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """To be made before the pool forks."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self._here = False

    def set(self) -> None:
        """Ask every process of this worker to stop. Safe in a signal handler."""
        self._shared[0] = 1

    def is_set(self) -> bool:
        return self._here or self._shared[0] == 1

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Let SIGTERM to this process raise the flag in it, as when a whole process group is told to end."""
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _hear(self, _signal: int, _frame: FrameType | None) -> None:
        self._here = True
