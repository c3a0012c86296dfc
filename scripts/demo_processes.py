"""Starts the demo's parts, waits for what they announce, and ends every one of them. Must not know what they do.

Each is the leader of its own session, so that a Ctrl-C in the terminal reaches only the demo, and is killed by the
kernel when the demo dies, kill -9 included; so are the processes of `kvalign serve` when that dies.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from worker.child import die_with_parent

STOP_S = 20.0
_TICK_S = 0.1
_LAST_LINES = 12
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PartFailed(Exception):
    """A part of the demo ended, or did not begin; the message has its last words and names its log."""


class Signals:
    """The first signal ends the demo as SystemExit (128 + its number); one during the clean-up hurries that."""

    def __init__(self) -> None:
        self.hurry = False
        self._cleaning = False

    def __enter__(self) -> "Signals":
        self._before = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, before in self._before.items():
            if not (number == signal.SIGHUP and before == signal.SIG_IGN):  # nohup
                signal.signal(number, self._asked)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def cleaning(self) -> None:
        """From now on nothing may interrupt the clean-up."""
        self._cleaning = True

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        if self._cleaning:
            self.hurry = True
        else:
            sys.exit(128 + number)


@dataclass(frozen=True)
class Part:
    """A process that was started. `said` is what it wrote to stdout, `log` what it wrote to stderr."""

    name: str
    process: subprocess.Popen[bytes]
    said: Path
    log: Path

    def check(self) -> None:
        """Raises PartFailed when it has ended."""
        status = self.process.poll()
        if status is not None:
            raise PartFailed(f"{self.name} ended with status {status}.\n{self._last_words()}")

    def announced(self, opening: str, within_s: float) -> str:
        """The rest of the line that begins with `opening`, once it is said. Raises PartFailed."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for line in self.said.read_text().splitlines(keepends=True):
                if line.startswith(opening) and line.endswith("\n"):
                    return line.removeprefix(opening).strip()
            self.check()
            time.sleep(_TICK_S)
        raise PartFailed(f"{self.name} was not ready after {within_s:g} s.\n{self._last_words()}")

    def finished(self) -> None:
        """Wait for its end. Raises PartFailed when it has failed."""
        if self.process.wait() != 0:
            self.check()

    def _last_words(self) -> str:
        with self.log.open(errors="replace") as lines:
            return "".join(f"    {line.rstrip()}\n" for line in deque(lines, _LAST_LINES)) + f"Its log is {self.log}."


class Processes:
    """Everything the demo started. To be used from the main thread: the kernel's promise is about that."""

    def __init__(self, signals: Signals, logs: Path) -> None:
        self._signals = signals
        self._logs = logs
        self._parts: list[Part] = []

    def start(self, name: str, command: Sequence[str]) -> Part:
        said, log = self._logs / f"{name}.out", self._logs / f"{name}.log"
        parent = os.getpid()
        with said.open("wb") as stdout, log.open("wb") as stderr, _signals_held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=lambda: _begin(parent),
            )
            part = Part(name, process, said, log)
            self._parts.append(part)
        return part

    def run(self, name: str, command: Sequence[str]) -> None:
        """Start a process that is meant to end, and see it end well. Raises PartFailed."""
        part = self.start(name, command)
        part.finished()
        self._parts.remove(part)

    def check(self) -> None:
        """Raises PartFailed when one has ended."""
        for part in self._parts:
            part.check()

    def stop(self) -> None:
        """End everything, the last started first, and see every process of it gone."""
        self._signals.cleaning()
        while self._parts:
            self._stop(self._parts.pop().process)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            return
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        deadline = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < deadline and not self._signals.hurry:
            time.sleep(_TICK_S)
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(family, timeout=2)
        for each in left:
            each.kill()
        psutil.wait_procs(left, timeout=5)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals wait, so that none can come between the start of a process and the note of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _begin(parent: int) -> None:
    """Runs between fork and exec."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    for number in _SIGNALS:  # a new program has no handlers of ours, and should not inherit that one is ignored
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
