"""The converting process: reads a model folder, writes an artifact folder, tells worker.runner how it goes.

It meets untrusted files, so it holds no token, has no network (see worker.sandbox) and dies with its parent. Must not
import the store, the queue or the Hub's client.
"""

import ctypes
import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvalign.config import ConversionConfig
from kvalign.errors import KvalignError
from worker.jobs import ErrorCode
from worker.messages import (
    UNIT_CHARACTERS,
    ChildSpec,
    ErrorMessage,
    Message,
    ProgressMessage,
    ResultMessage,
    StageDoneMessage,
    Summary,
)
from worker.sandbox import take_network

if TYPE_CHECKING:
    from kvalign.convert import ConversionResult
    from kvalign.stages import StageProgress

PROGRESS_EVERY_S = 0.1

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Read a spec, convert, and end with 0 after a result or 1 after an error."""
    die_with_parent()
    if not take_network():
        print("this kernel has no seccomp filter: the conversion could reach the network", file=sys.stderr)  # noqa: T201
    say = _speaker(_own_stdout())
    spec = ChildSpec.model_validate_json(sys.stdin.buffer.read())
    if os.getppid() != spec.parent_pid:  # it died before the kernel knew that we wanted to follow
        return 1
    try:
        say(ResultMessage(summary=_convert(spec, say)))
    except BaseException as error:  # the edge of the process; parsers in Rust panic with a BaseException
        if not isinstance(error, KvalignError):
            traceback.print_exc()
        say(explain(error))
        return 1
    return 0


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def explain(error: BaseException) -> ErrorMessage:
    """The error message that a failure of any kind becomes."""
    if isinstance(error, KvalignError):
        return ErrorMessage(code=ErrorCode(error.code), message=error.message, remedy=error.remedy)
    if _is_out_of_memory(error):
        return ErrorMessage(
            code=ErrorCode.OUT_OF_MEMORY,
            message="The conversion asked for more memory than there is.",
            remedy="Choose a shorter calibration sequence_length or a smaller model.",
        )
    if _is_disk_full(error):
        return ErrorMessage(
            code=ErrorCode.DISK_FULL,
            message="The disk filled up during the conversion.",
            remedy="Retry when other jobs have ended; finished stages are kept.",
        )
    return ErrorMessage(
        code=ErrorCode.INTERNAL,
        message=f"The conversion failed with {type(error).__name__}: {str(error)[:300]}.",
        remedy="Retry the job; if it fails again, report it with the job's id.",
    )


def _convert(spec: ChildSpec, say: Callable[[Message], None]) -> Summary:
    from kvalign.convert import convert

    stages = StageReporter(say)
    result: ConversionResult = convert(
        Path(spec.source_dir),
        Path(spec.out_dir),
        ConversionConfig.parse(spec.config),
        work_dir=Path(spec.work_dir),
        source_commit=spec.source_commit,
        calibration_path=Path(spec.calibration_path) if spec.calibration_path else None,
        validation_path=Path(spec.validation_path) if spec.validation_path else None,
        on_progress=stages.progress,
    )
    stages.finish()
    return Summary.model_validate(result.report["summary"])


class StageReporter:
    """Turns convert's progress into messages: ten a second at most, and one when each stage has finished."""

    def __init__(self, say: Callable[[Message], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._current: StageProgress | None = None
        self._began_at = self._said_at = 0.0

    def progress(self, progress: "StageProgress") -> None:
        now = self._clock()
        begins = self._current is None or self._current.stage != progress.stage
        if begins:
            self.finish()
            self._began_at = now
        self._current = progress
        if begins or progress.done >= progress.total or now - self._said_at >= PROGRESS_EVERY_S:
            self._said_at = now
            self._say(_progress_message(progress))

    def finish(self) -> None:
        """The stage that was told of last has ended."""
        if self._current is not None:
            seconds = self._clock() - self._began_at
            self._say(StageDoneMessage.model_validate({"stage": self._current.stage, "seconds": seconds}))
            self._current = None


def _progress_message(progress: "StageProgress") -> ProgressMessage:
    fields = {"stage": progress.stage, "done": progress.done, "total": progress.total}
    return ProgressMessage.model_validate({**fields, "unit": progress.unit[:UNIT_CHARACTERS]})


def _own_stdout() -> BinaryIO:
    """The pipe to the parent, for messages alone: whatever else prints to stdout lands in the log."""
    pipe = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return pipe


def _speaker(pipe: BinaryIO) -> Callable[[Message], None]:
    return lambda message: _write_line(pipe, message.model_dump_json().encode())


def _write_line(pipe: BinaryIO, line: bytes) -> None:
    rest = memoryview(line + b"\n")
    while rest:
        rest = rest[pipe.write(rest) :]


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return True
    return os.strerror(errno.ENOSPC) in str(error)  # libraries in Rust and C++ keep the words, not the number


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in said or "can't allocate memory" in said)


if __name__ == "__main__":
    sys.exit(main())
