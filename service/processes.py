"""Keeps a set of processes running and ends them in order, whatever happens; must not know what they do.

Each process is the leader of its own session, so that a Ctrl-C in the terminal reaches only the keeper, and is
killed by the kernel when the keeper dies (PR_SET_PDEATHSIG), kill -9 included.
"""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
STEADY_S = 60.0  # one that ran this long is restarted at once, as if it had never failed
_TICK_S = 0.2
_STDERR = 2
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Program:
    """What to run.

    stop_s  how long it may take over SIGTERM before its whole process group is killed
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    stop_s: float = 10.0


class BadStart(Exception):
    """A program refused its settings (exit status 2): starting it again would not help."""


class Keeper:
    """Starts programs in the order given, restarts what dies, stops in the reverse order.

    Call it from the main thread alone: the kernel's promise is about the thread that started a process.
    """

    def __init__(self) -> None:
        self._running: list[_Running] = []

    def start(self, program: Program) -> None:
        running = _Running(program)
        self._running.append(running)
        running.start()

    def tend(self, stop: threading.Event, until_s: float) -> None:
        """Restart what died, for until_s seconds or until stop is set. Raises BadStart."""
        deadline = time.monotonic() + until_s
        while not stop.is_set() and time.monotonic() < deadline:
            for running in self._running:
                running.tend()
            stop.wait(_TICK_S)

    def stop(self, hurry: threading.Event) -> None:
        """End everything, the last started first; `hurry` skips the waiting."""
        while self._running:
            self._running.pop().stop(hurry)


class _Running:
    """One program, its process of the moment, and when to start it again."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._failures = 0
        self._start_again_at = 0.0

    def start(self) -> None:
        keeper = os.getpid()
        self._process = subprocess.Popen(
            self._program.command,
            env=dict(self._program.environment),
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # what the programs say is log; stdout is the keeper's own
            start_new_session=True,
            preexec_fn=lambda: _die_with(keeper),
        )
        self._started = time.monotonic()
        log.info("%s started as process %d", self._program.name, self._process.pid)

    def tend(self) -> None:
        if self._process is None:
            if time.monotonic() >= self._start_again_at:
                self.start()
            return
        if not _has_ended(self._process.pid):
            return
        status = self._bury(self._process)
        if status == 2:
            raise BadStart(f"{self._program.name} refused its settings; its message is above.")
        if time.monotonic() - self._started > STEADY_S:
            self._failures = 0
        wait_s = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        self._failures += 1
        self._start_again_at = time.monotonic() + wait_s
        log.warning("%s ended with status %s; starting again in %g s", self._program.name, status, wait_s)

    def stop(self, hurry: threading.Event) -> None:
        if self._process is None:
            return
        deadline = time.monotonic() + self._program.stop_s
        self._process.terminate()
        while not _has_ended(self._process.pid) and time.monotonic() < deadline and not hurry.is_set():
            time.sleep(_TICK_S / 4)
        status = self._bury(self._process)
        log.info("%s stopped with status %s", self._program.name, status)

    def _bury(self, process: subprocess.Popen[bytes]) -> int:
        """Kill what is left of the process group, then reap its leader; while unreaped, its id is not reused."""
        self._process = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _die_with(keeper: int) -> None:
    """Runs between fork and exec: asks the kernel for SIGKILL at the death of the keeper."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
