"""Workspaces on a real disk: locks, finished stages, shares of the disk."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvalign.errors import Canceled, DiskFull
from worker.workspace import Workspace, Workspaces, stage_key

JOB, OTHER = "job_" + "1" * 26, "job_" + "2" * 26


def nothing() -> None:
    pass


def canceled() -> None:
    raise Canceled("The job was canceled.")


def test_a_stage_is_finished_for_its_inputs_alone(tmp_path: Path) -> None:
    with Workspaces(tmp_path).open(JOB, nothing) as workspace:
        key = stage_key("a/b", {"tokens": 1})
        folder = workspace.folder("pull", key)
        (folder / "config.json").write_text("{}")
        assert workspace.finished("pull", key) is None
        workspace.finish("pull", key, {"text": None})
    with Workspaces(tmp_path).open(JOB, nothing) as workspace:
        assert workspace.finished("pull", key) == {"text": None}
        assert (workspace.folder("pull", key) / "config.json").exists()
        assert workspace.finished("pull", stage_key("a/b", {"tokens": 2})) is None


def test_the_output_of_other_inputs_is_deleted(tmp_path: Path) -> None:
    with Workspaces(tmp_path).open(JOB, nothing) as workspace:
        old = workspace.folder("pull", "old")
        kept = workspace.folder("convert", "old")
        workspace.finish("pull", "old", {})
        workspace.folder("pull", "new")
        assert not old.exists()
        assert kept.exists()
        assert workspace.finished("pull", "old") is None


def test_a_torn_mark_counts_as_unfinished(tmp_path: Path) -> None:
    with Workspaces(tmp_path).open(JOB, nothing) as workspace:
        (workspace.root / "pull-k.done").write_text('{"te')
        assert workspace.finished("pull", "k") is None
        (workspace.root / "pull-k.done").write_text("[]")
        assert workspace.finished("pull", "k") is None


def test_equal_inputs_have_equal_keys() -> None:
    assert stage_key({"a": 1, "b": 2}) == stage_key({"b": 2, "a": 1}) != stage_key({"a": 1})


def test_an_attempt_waits_for_another_in_the_same_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from pathlib import Path; from worker.workspace import Workspaces\n"
         f"with Workspaces(Path({str(tmp_path)!r})).open({JOB!r}, lambda: None): print('in', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"in\n"
        with pytest.raises(Canceled), Workspaces(tmp_path).open(JOB, canceled):
            pytest.fail("two attempts in one folder")
    finally:
        holder.kill()
        holder.communicate()
    with Workspaces(tmp_path).open(JOB, canceled) as workspace:  # the lock of a killed process is gone
        assert workspace.root.is_dir()


def test_a_folder_removed_by_its_holder_is_made_anew(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with workspaces.open(JOB, nothing) as workspace:
            inside.set()
            leave.wait(10)
            workspace.remove()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with workspaces.open(JOB, leave.set) as workspace:
        assert workspace.root.is_dir()
        (workspace.root / "x").write_text("x")
    thread.join()
    assert workspaces.ids() == [JOB]


def test_folders_are_private(tmp_path: Path) -> None:
    with Workspaces(tmp_path / "data").open(JOB, nothing) as workspace:
        assert workspace.root.stat().st_mode & 0o077 == 0


def reserved(workspaces: Workspaces, job_id: str, size_bytes: int) -> Workspace:
    with workspaces.open(job_id, nothing) as workspace:
        workspace.reserve(size_bytes)
        return workspace


def test_a_reservation_is_taken_from_others_until_it_is_filled(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    free = workspaces.free_bytes(OTHER)
    share = 10**9
    workspace = reserved(workspaces, JOB, share)
    slack = 200_000_000  # other processes use this disk too
    assert abs(workspaces.free_bytes(OTHER) - (free - share)) < slack
    assert abs(workspaces.free_bytes(JOB) - free) < slack
    (workspace.root / "big").write_bytes(bytes(8_000_000))
    assert abs(workspaces.free_bytes(OTHER) - (free - share)) < slack
    workspace.release()
    assert abs(workspaces.free_bytes(OTHER) - free) < slack


def test_more_than_the_free_disk_is_refused(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    with pytest.raises(DiskFull, match="bytes of disk"):
        reserved(workspaces, JOB, 10**18)
    half = workspaces.free_bytes(JOB) * 6 // 10
    reserved(workspaces, JOB, half)
    with pytest.raises(DiskFull):
        reserved(workspaces, OTHER, half)


def test_other_folders_are_no_jobs(tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    (tmp_path / "jobs" / "lost+found").mkdir()
    with workspaces.open(JOB, nothing):
        assert workspaces.ids() == [JOB]


HOLD = """
import sys, time
from pathlib import Path
from worker.workspace import Workspaces
with Workspaces(Path(sys.argv[1])).open(sys.argv[2], lambda: None):
    print("held", flush=True)
    time.sleep(60)
"""


def held_elsewhere(folder: Path) -> "subprocess.Popen[str]":
    """Another process that works in the job's folder and does not let go."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), JOB], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    holder.stdout.close()
    return holder


def test_who_holds_a_folder_without_a_lease_is_killed_after_a_while(tmp_path: Path) -> None:
    holder = held_elsewhere(tmp_path)
    holder.send_signal(signal.SIGSTOP)
    with Workspaces(tmp_path).open(JOB, nothing, patience_s=0.3):
        assert holder.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("wrong", [{"place": "another machine"}, {"started": 1.0}, {"pid": -1}, {"pid": "x"}])
def test_nobody_else_is_killed(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Not on another machine, nor a process that has the number by now."""
    holder = held_elsewhere(tmp_path)
    lock = tmp_path / "jobs" / JOB / ".lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), **wrong}))
    waited_until = time.monotonic() + 1.0

    def give_up() -> None:
        if time.monotonic() > waited_until:
            raise TimeoutError

    with pytest.raises(TimeoutError), Workspaces(tmp_path).open(JOB, give_up, patience_s=0.1):
        pass
    assert holder.poll() is None
    holder.kill()
    holder.wait()
