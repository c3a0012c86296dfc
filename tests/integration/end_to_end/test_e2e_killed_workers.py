"""Kill -9: of a whole worker in mid-calibration, and of the converting child alone."""

import os
import signal

import psutil
from e2e_services import LONG, STAGES, Json, Person, Services, alive, conversion, wait_for

CHECKPOINT_SEQUENCES = 4


def passes_seen(ada: Person, job: Json, attempt: int) -> int:
    """The first count of sequences that an attempt reports."""

    def reported() -> Json | None:
        now = ada.job(job)
        return now if now["attempts"] == attempt and now["unit"] == "sequences" else None

    return int(wait_for(reported, every_s=0.02)["done"])


def test_a_killed_worker_s_job_goes_on_where_it_was_and_is_published_once(services: Services) -> None:
    ada, worker = services.person(), services.running_worker()
    job = ada.submit(conversion("ada/llama", "ada/killed", calibration=LONG))
    before = ada.see(job, "calibrate", unit="sequences", done=400)["done"]
    family = worker.family()
    assert len(worker.converting()) == 1

    os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
    # The child is in a session of its own: the kernel ends it with the worker.
    wait_for(lambda: not alive(family), 5)
    assert list(services.workspace(job).rglob("statistics.safetensors"))
    stuck = ada.job(job)
    assert (stuck["state"], stuck["attempts"]) == ("running", 1)

    services.start_worker()
    again = passes_seen(ada, job, attempt=2)
    assert again >= before - CHECKPOINT_SEQUENCES, f"{before} sequences were read, and {again} were kept"
    done = ada.reach(job, "succeeded")
    assert done["attempts"] == 2
    assert set(done["stage_seconds"]) == set(STAGES)
    assert services.commits_of(done) == [done["result"]["commit"]]
    assert ada.stages(job, "kept") == ["pull"]
    states = [event["data"] for event in ada.events(job) if event["kind"] == "state"]
    assert [data["state"] for data in states] == ["queued", "running", "queued", "running", "succeeded"]
    assert states[2]["reason"] == "worker_lost"
    assert not alive(family)
    wait_for(lambda: not services.workspace(job).exists())


def test_a_killed_child_fails_its_job_which_can_be_retried(services: Services) -> None:
    ada, worker = services.person(), services.running_worker()
    job = ada.submit(conversion("ada/llama", "ada/childless", calibration=LONG))
    before = ada.see(job, "calibrate", unit="sequences", done=400)["done"]
    [child] = worker.converting()
    child.kill()
    failed = ada.reach(job, "failed", 20)
    assert failed["error"]["code"] == "out_of_memory"  # what a kill -9 from nowhere nearly always is
    assert failed["error"]["remedy"]
    assert not services.exists("ada/childless")
    assert worker.process.poll() is None
    assert not psutil.pid_exists(child.pid)

    assert ada.retry(job)["state"] == "queued"
    assert passes_seen(ada, job, attempt=2) >= before - CHECKPOINT_SEQUENCES
    done = ada.reach(job, "succeeded")
    assert done["attempts"] == 2
    assert done["error"] is None
    assert services.commits_of(done) == [done["result"]["commit"]]
    assert worker.process.poll() is None
