"""A confined child process: its environment, its limits, its end. Must not know what it is for or what it says."""

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import psutil

NICENESS = 10
OOM_SCORE = 900  # of 1000: where memory runs out, the kernel ends the child and not the worker

_INHERITED = {
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
}
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Confinement:
    """What a child may use.

    memory_bytes  it and its descendants together, files mapped from disk not counted
    file_bytes    the largest single file
    threads       for numerical work, unless the operator set OMP_NUM_THREADS
    stall_s       how long it may neither compute nor say anything
    """

    memory_bytes: int
    file_bytes: int
    threads: int
    stall_s: float = 300.0


@dataclass(frozen=True)
class Child:
    """A running child and its pipes."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def has_ended(self) -> bool:
        """Looks without waiting for it, so that its group keeps its number until it is killed."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def exit_status(self) -> int:
        """Of a child that has ended; negative for the signal that ended it."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if ended is None:
            raise ChildProcessError(f"process {self.pid} is not a child that has ended")
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def memory_bytes(self) -> int:
        """What it and its descendants hold and could not read again from a file."""
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    memory = each.memory_info()
                    total += memory.rss - memory.shared
        return total

    def cpu_s(self) -> float:
        """Seconds of processor time that it and its living descendants took; stands still when they do."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(each.cpu_times()[:4])
        return total

    def send(self, said: bytes) -> None:
        """Write all of its stdin; a child that died before reading is judged by its end."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.write(said)
            self.stdin.flush()
        _close(self.stdin)


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, confinement: Confinement
) -> Iterator[Child]:
    """A child in a session of its own. However this is left, its group is dead then, and waited for."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
    )
    pipes = [cast(IO[bytes], pipe) for pipe in (process.stdin, process.stdout, process.stderr)]
    try:
        _confine(process.pid, confinement)
        yield Child(process.pid, *pipes)
    finally:
        # Not yet waited for, so its number cannot have passed to another process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in pipes:
            _close(pipe)


def environment_for(folder: Path, cache: Path, threads: int) -> dict[str, str]:
    """All that a child gets to see of the environment: nothing of KVALIGN_*, no token, no way online.

    folder  its home and place for temporary files
    cache   where compiled code is kept from job to job
    """
    inherited = {name: value for name, value in os.environ.items() if name in _INHERITED}
    return {
        "OMP_NUM_THREADS": str(threads),
        **inherited,
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DISABLE_SAFETENSORS_CONVERSION": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),  # it looks through all fonts once
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }


def machine_memory_bytes() -> int:
    """Of this machine, or of the container it runs in where that has less."""
    machine: int = psutil.virtual_memory().total
    try:
        return min(machine, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        return machine


def _confine(pid: int, confinement: Confinement) -> None:
    """Set from outside, because code between fork and exec is not safe in a process with threads."""
    resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (confinement.file_bytes, confinement.file_bytes))
    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    Path(f"/proc/{pid}/oom_score_adj").write_text(str(OOM_SCORE))


def _close(pipe: IO[bytes]) -> None:
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
