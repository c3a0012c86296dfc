"""A keeper restarts what dies and leaves nothing behind, however it ends itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from service.processes import BadStart, Keeper, Program


def program(code: str, *, name: str = "part", stop_s: float = 5.0) -> Program:
    return Program(name, (sys.executable, "-c", code), dict(os.environ), stop_s)


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    hurry = threading.Event()
    hurry.set()
    made.stop(hurry)


def test_what_dies_is_started_again(keeper: Keeper, tmp_path: Path) -> None:
    log = tmp_path / "pids"
    keeper.start(
        program(f"import os, time; print(os.getpid(), file=open({str(log)!r}, 'a'), flush=True); time.sleep(60)")
    )
    wait_for(lambda: len(lines(log)) == 1)
    os.kill(int(lines(log)[0]), signal.SIGKILL)
    keeper.tend(threading.Event(), 2.0)
    wait_for(lambda: len(lines(log)) == 2)


def test_one_that_refuses_its_settings_is_not_started_again(keeper: Keeper) -> None:
    keeper.start(program("raise SystemExit(2)", name="picky"))
    with pytest.raises(BadStart, match="picky"):
        keeper.tend(threading.Event(), 10.0)


def test_the_last_started_stops_first(tmp_path: Path) -> None:
    log = tmp_path / "order"
    code = """
import signal, sys, time
def leave(*_):
    print({name!r}, file=open({log!r}, "a"), flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print("up", file=open({log!r} + {name!r}, "a"), flush=True)
time.sleep(60)
"""
    keeper = Keeper()
    for name in ("first", "second", "third"):
        keeper.start(program(code.format(name=name, log=str(log))))
    for name in ("first", "second", "third"):
        wait_for(lambda name=name: bool(lines(Path(f"{log}{name}"))))  # type: ignore[misc]
    keeper.stop(threading.Event())
    assert lines(log) == ["third", "second", "first"]


def test_one_that_will_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "child"
    code = f"""
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, file=open({str(log)!r}, "a"), flush=True)
time.sleep(60)
"""
    keeper = Keeper()
    keeper.start(program(code, stop_s=0.3))
    wait_for(lambda: len(lines(log)) == 1)
    keeper.stop(threading.Event())
    wait_for(lambda: not psutil.pid_exists(int(lines(log)[0])))


def test_kill_9_of_the_keeper_ends_what_it_started() -> None:
    code = """
import os, sys, threading
from service.processes import Keeper, Program
part = (sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
keeper = Keeper()
keeper.start(Program("part", part, dict(os.environ)))
keeper.tend(threading.Event(), 60.0)
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # where the keeper sends what its programs say
        part = psutil.Process(int(process.stderr.readline()))
        process.kill()
    wait_for(lambda: not part.is_running() or part.status() == psutil.STATUS_ZOMBIE)
