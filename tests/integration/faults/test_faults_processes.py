"""Processes that are killed, stopped, or use too much: the job goes on elsewhere or ends with its reason."""

import json
import os
import signal
import time
from datetime import datetime

import psutil
import pytest
from topology import LEASE_S, Json, Topology, alive, wait_for

SETTINGS = {
    "KVALIGN_CHILD_STALL_S": "3",
    "KVALIGN_CHILD_MEMORY_BYTES": str(900_000_000),
    "KVALIGN_CHILD_FILE_BYTES": str(20_000_000),
    "KVALIGN_FAILED_KEPT_S": "0",
}


def running_again_s(topology: Topology, job: Json, since: float) -> float:
    """Seconds from a moment to the start of the attempt after it."""
    states = [event for event in topology.caller().events(job) if event["data"].get("state") == "running"]
    later = [at for event in states if (at := datetime.fromisoformat(event["at"]).timestamp()) > since]
    return later[0] - since


@pytest.mark.parametrize("victim", ["tree", "main", "pool process"])
def test_a_killed_worker_s_job_runs_again_elsewhere(topology: Topology, victim: str) -> None:
    ada, target = topology.caller(), f"ada/killed-{victim.replace(' ', '-')}"
    topology.mode("hold", target)
    job = ada.submit(target)
    ada.see(job, "fit")
    worker = topology.worker_of(job)
    family = worker.family()
    assert len(family) >= 3
    killed_at = time.time()
    if victim == "tree":
        worker.kill_tree()
    elif victim == "main":
        worker.kill()
    else:
        [process] = worker.pool()
        process.kill()
        family = [each for each in family if each.pid != worker.pid]
    wait_for(lambda: not alive(family), 5)
    ada.see(job, "fit", attempt=2)
    assert running_again_s(topology, job, killed_at) < LEASE_S + 10
    topology.mode("convert", target)
    done = ada.reach(job)
    assert done["attempts"] == 2
    assert ada.stages(job, "kept") == ["pull"]
    topology.assert_published_once(done)


def test_a_stopped_child_is_ended_and_its_job_taken_over(topology: Topology) -> None:
    ada, target = topology.caller(), "ada/stopped-child"
    topology.mode("hold", target)
    job = ada.submit(target)
    ada.see(job, "fit")
    child = topology.child_of(job)
    child.send_signal(signal.SIGSTOP)
    topology.mode("convert", target)
    done = ada.reach(job)
    assert done["attempts"] == 2
    assert not alive([child])
    logged = [line for event in ada.events(job) if event["kind"] == "log" for line in event["data"]["lines"]]
    assert "The conversion neither computed nor said anything for 3 s." in logged
    topology.assert_published_once(done)


def test_a_stopped_worker_loses_its_job_and_is_killed_where_it_holds_the_folder(topology: Topology) -> None:
    ada, target = topology.caller(), "ada/stopped-worker"
    topology.mode("hold", target)
    job = ada.submit(target)
    ada.see(job, "fit")
    worker = topology.worker_of(job)
    [child], [pool_process] = worker.converting(), worker.pool()
    worker.signal_all(signal.SIGSTOP)
    try:
        topology.mode("convert", target)
        done = ada.reach(job)
        assert done["attempts"] == 2
        assert not alive([child, pool_process])
        topology.assert_published_once(done)
    finally:
        worker.signal_all(signal.SIGCONT)
    # Its main process goes on, with a new pool process.
    again = ada.submit("ada/after-the-stop")
    ada.reach(again)
    wait_for(lambda: len(worker.pool()) == 1)


@pytest.mark.parametrize(("mode", "code"), [("eat", "out_of_memory"), ("fill", "disk_full")])
def test_a_child_that_ends_badly_fails_its_job_and_no_other(topology: Topology, mode: str, code: str) -> None:
    ada, target = topology.caller(), f"ada/child-{mode}"
    topology.mode(mode, target)
    job = ada.submit(target)
    failed = ada.reach(job, "failed")
    assert failed["error"]["code"] == code
    assert failed["error"]["remedy"]
    assert all(worker.running for worker in topology.workers)
    topology.mode("convert", target)
    ada.retry(job).raise_for_status()
    topology.assert_published_once(ada.reach(job))


def test_nothing_is_left(topology: Topology) -> None:
    """Of all of the above, which is why it comes last."""
    wait_for(lambda: not topology.workspaces())
    assert not any(worker.converting() for worker in topology.workers)
    for token in topology.tokens.values():
        assert token not in topology.logs()
    child = json.loads((topology.folder / "control" / "environment").read_text())
    assert not [name for name in child if name.startswith("KVALIGN")]
    topology.see_workers()
    for part in (*topology.workers, *topology.apis):
        family = part.family()
        assert part.stop() == 0
        wait_for(lambda family=family: not alive(family), 10)
    assert not [pid for pid in children_so_far(topology) if psutil.pid_exists(pid) and ran_here(topology, pid)]


def children_so_far(topology: Topology) -> list[int]:
    return [int(line) for line in (topology.folder / "control" / "runs").read_text().split()]


def ran_here(topology: Topology, pid: int) -> bool:
    """Whether the process of that number is one of ours, for numbers are used again."""
    try:
        return str(topology.folder) in " ".join(psutil.Process(pid).cmdline()) and pid != os.getpid()
    except psutil.Error:
        return False
