"""Cancel in every kind of stage: it takes seconds, and leaves nothing on the Hub, on the disk or running."""

import time

from e2e_services import LONG, Json, Person, Services, alive, conversion, wait_for

LIMIT_S = 5
STALL_S = 8


def cancel(ada: Person, job: Json) -> Json:
    """Cancel a running job, and wait for its end, which must come soon."""
    began = time.monotonic()
    assert ada.cancel(job)["state"] == "cancelling"
    ended = ada.reach(job, "canceled", LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
    assert ended["result"] is None
    states = [event["data"]["state"] for event in ada.events(job) if event["kind"] == "state"]
    assert states == ["queued", "running", "cancelling", "canceled"]
    return ended


def assert_nothing_left(services: Services, job: Json) -> None:
    wait_for(lambda: not services.workspace(job).exists(), LIMIT_S)
    assert not services.exists(job["config"]["target"]["repo"])


def test_while_calibrating(services: Services) -> None:
    ada, worker = services.person(), services.running_worker()
    job = ada.submit(conversion("ada/llama", "ada/canceled-calibrate", calibration=LONG))
    ada.see(job, "calibrate", unit="sequences", done=50)
    children = worker.converting()
    assert len(children) == 1
    cancel(ada, job)
    assert not alive(children)
    assert_nothing_left(services, job)


def test_while_pulling(services: Services) -> None:
    ada = services.person()
    services.hub.fault(method="GET", path_regex="/ada/qwen2/resolve/.*tokenizer.json", delay_s=STALL_S)
    job = ada.submit(conversion("ada/qwen2", "ada/canceled-pull"))
    ada.see(job, "pull")
    cancel(ada, job)
    assert_nothing_left(services, job)


def test_while_publishing(services: Services) -> None:
    """Once the files are on their way, and once the Hub has been asked for the commit and has not answered."""
    ada, moments = services.person(), ("preupload", "commit")
    for moment in moments:
        services.hub.fault(method="POST", path_regex=f"canceled-{moment}/{moment}/", delay_s=STALL_S, times=3)
    jobs = [ada.submit(conversion("ada/gpt2", f"ada/canceled-{moment}")) for moment in moments]
    for job in jobs:
        ada.see(job, "publish")
        wait_for(lambda job=job: services.exists(job["config"]["target"]["repo"]))
    time.sleep(1)
    for job in jobs:
        cancel(ada, job)
        assert_nothing_left(services, job)
    time.sleep(STALL_S)  # what the Hub was asked for must not come true later
    for job in jobs:
        assert_nothing_left(services, job)


def test_while_queued(services: Services) -> None:
    """A job that no worker has begun is canceled at once."""
    ada = services.person()
    services.hub.fault(method="GET", path_regex="/ada/qwen2/resolve/.*tokenizer.json", delay_s=STALL_S, times=2)
    running = [ada.submit(conversion("ada/qwen2", f"ada/canceled-front-{place}")) for place in range(2)]
    waiting = ada.submit(conversion("ada/qwen2", "ada/canceled-queued"))
    for job in running:
        ada.see(job, "pull")
    assert ada.job(waiting)["place_in_queue"] == 1
    assert ada.cancel(waiting)["state"] == "canceled"
    for job in running:
        cancel(ada, job)
    assert ada.job(waiting)["attempts"] == 0
    assert all(not services.exists(job["config"]["target"]["repo"]) for job in [*running, waiting])
