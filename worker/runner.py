"""Runs the converting child of a job: hands it its spec, listens to it, stops it, and says how it ended.

Must not know what the child computes, and must not trust it: it may hang, die in any way, fill the disk or the
memory, leave grandchildren, or print anything at all.
"""

import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvalign.errors import DiskFull, KvalignError, OutOfMemory, from_code
from worker.jobs import ErrorCode
from worker.journal import clean
from worker.lines import Lines
from worker.messages import (
    ChildSpec,
    ErrorMessage,
    ProgressMessage,
    ResultMessage,
    StageDoneMessage,
    Summary,
    parse_message,
)
from worker.process import Child, Confinement, environment_for, started

TICK_S = 0.2
READ_BYTES = 65_536
LAST_WORDS = 5

_NOT_FOR_A_CHILD_TO_SAY = {ErrorCode.CANCELED, ErrorCode.WORKER_LOST}
_LESS_MEMORY = "Choose a shorter calibration sequence_length or a smaller model, or ask for larger workers."


class Stalled(KvalignError):
    """The child stands still, stopped or stuck, and was ended; another attempt may fare better."""


@dataclass(frozen=True)
class Listener:
    """Where a child's words go: progress and finished stages to on_message, lines of stderr to on_log."""

    on_message: Callable[[ProgressMessage | StageDoneMessage], None]
    on_log: Callable[[str], None]


class Runner:
    """Starts children with one command line.

    command  reads a ChildSpec on stdin, writes messages on stdout and its log on stderr
    cache    where compiled code is kept from job to job
    """

    def __init__(self, command: Sequence[str], confinement: Confinement, cache: Path) -> None:
        self._command = command
        self._confinement = confinement
        self._cache = cache

    def run(self, spec: ChildSpec, folder: Path, check: Callable[[], None], listener: Listener) -> Summary:
        """Run a child in `folder` to its end and return its result.

        check  called several times a second; what it raises is raised, once the child's whole group is dead

        Raises the child's own error, OutOfMemory, DiskFull, Stalled, or KvalignError with its last words. To be called
        on a thread that outlives the child: the kernel kills the child when that thread ends.
        """
        environment = environment_for(folder, self._cache, self._confinement.threads)
        with started(self._command, environment, folder, self._confinement) as child:
            child.send(spec.model_dump_json().encode())
            return _Conversation(child, self._confinement, listener).until_the_end(check)


class _Conversation:
    """One child's output, from its start to its end."""

    def __init__(self, child: Child, confinement: Confinement, listener: Listener) -> None:
        self._child = child
        self._confinement = confinement
        self._listener = listener
        self._output, self._log = Lines(READ_BYTES), Lines(READ_BYTES)
        self._last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self._cpu_s, self._moved_at = 0.0, time.monotonic()
        self._summary: Summary | None = None
        self._error: ErrorMessage | None = None

    def until_the_end(self, check: Callable[[], None]) -> Summary:
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ, self._hear_output)
            selector.register(self._child.stderr, selectors.EVENT_READ, self._hear_log)
            next_tick = 0.0
            while not self._child.has_ended():
                if self._listen(selector, TICK_S):
                    self._moved_at = time.monotonic()
                if time.monotonic() >= next_tick:
                    check()
                    self._check_memory()
                    self._check_movement()
                    next_tick = time.monotonic() + TICK_S
            self._hear_the_rest(selector)
        return self._verdict()

    def _listen(self, selector: selectors.BaseSelector, wait_s: float) -> bool:
        """Take in what was said, waiting for at most wait_s; whether anything was."""
        if not selector.get_map():
            time.sleep(wait_s)
            return False
        ready = selector.select(wait_s)
        for key, _ in ready:
            said = os.read(key.fd, READ_BYTES)
            if said:
                key.data(said)
            else:
                selector.unregister(key.fileobj)
        return bool(ready)

    def _hear_the_rest(self, selector: selectors.BaseSelector) -> None:
        """What is still in the pipes; bounded, for a grandchild may go on writing."""
        for _ in range(64):
            if not self._listen(selector, 0):
                break

    def _hear_output(self, said: bytes) -> None:
        for line in self._output.feed(said):
            message = parse_message(line)
            if isinstance(message, ProgressMessage | StageDoneMessage):
                self._listener.on_message(message)
            elif isinstance(message, ResultMessage):
                self._summary = message.summary
            elif isinstance(message, ErrorMessage):
                self._error = message

    def _hear_log(self, said: bytes) -> None:
        for line in self._log.feed(said):
            text = clean(line.decode(errors="replace"))
            if text.strip():
                self._last_words.append(text)
                self._listener.on_log(text)

    def _check_memory(self) -> None:
        held_bytes, limit_bytes = self._child.memory_bytes(), self._confinement.memory_bytes
        if held_bytes > limit_bytes:
            raise OutOfMemory(
                f"The conversion held {held_bytes:,} bytes of memory; the limit is {limit_bytes:,}.", _LESS_MEMORY
            )

    def _check_movement(self) -> None:
        now, cpu_s = time.monotonic(), self._child.cpu_s()
        if cpu_s != self._cpu_s:
            self._cpu_s, self._moved_at = cpu_s, now
        elif now - self._moved_at > self._confinement.stall_s:
            raise Stalled(
                f"The conversion neither computed nor said anything for {self._confinement.stall_s:,.0f} s.",
                "Another attempt goes on after the last finished stage.",
            )

    def _verdict(self) -> Summary:
        status = self._child.exit_status()
        if self._error is not None:
            raise _child_error(self._error)
        if status == 0 and self._summary is not None:
            return self._summary
        raise self._cause_of_death(status)

    def _cause_of_death(self, status: int) -> KvalignError:
        if status == -signal.SIGXFSZ:
            return DiskFull(
                f"The conversion wrote a file of more than {self._confinement.file_bytes:,} bytes, the limit.",
                "Choose fewer calibration tokens, or ask the operator for a larger limit.",
            )
        if status == -signal.SIGKILL:
            return OutOfMemory(
                "The system killed the conversion, most likely because the machine ran out of memory.",
                _LESS_MEMORY,
            )
        how = f"exit code {status}" if status >= 0 else f"signal {_signal_name(-status)}"
        said = f"its last words: {' | '.join(self._last_words)}" if self._last_words else "it said nothing"
        return KvalignError(f"The conversion ended with {how} and no result; {said}.", "Retry the job.")


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


def _child_error(error: ErrorMessage) -> KvalignError:
    code = ErrorCode.INTERNAL if error.code in _NOT_FOR_A_CHILD_TO_SAY else error.code
    return from_code(code, clean(error.message, 2000), clean(error.remedy, 2000))
