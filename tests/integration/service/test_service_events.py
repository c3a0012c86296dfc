"""Events over HTTP: replay, live news, the end. The events are written by real leases on the real store."""

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from httpx_sse import ServerSentEvent, connect_sse
from service_harness import ALICE, BOB, Api, config, start_api, stop_api

from kvalign.errors import TimeLimit
from worker.jobs import Job, JobError, JobResult, Progress, Stage
from worker.leases import Lease, Leases

_numbers = itertools.count()
RESULT = JobResult("alice/x", "c" * 40, "http://hub/alice/x", 12.5, 0.01, 0.97)


def new_job(api: Api) -> Job:
    name = f"alice/events-{next(_numbers)}"
    return api.store.submit("alice", config(name), source_commit="0" * 40, token="none").job


def claim(api: Api, job: Job) -> Lease:
    leases = Leases(api.store, lease_s=60, running_limit=99)
    return next(lease for lease in iter(lambda: leases.claim("test"), None) if lease.job.id == job.id)


def follow(api: Api, job: Job, **headers: str) -> Iterator[ServerSentEvent]:
    token = ALICE if job.tenant == "alice" else BOB
    with (
        api.client(token) as client,
        connect_sse(client, "GET", f"/v1/jobs/{job.id}/events", headers=headers) as source,
    ):
        yield from source.iter_sse()


def test_events_are_replayed_and_the_stream_ends_with_the_job(service_api: Api) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    lease.stage_started(Stage.PULL)
    lease.progress(Progress(Stage.PULL, 5, 10, "bytes"), tell=True)
    lease.succeed(RESULT)
    events = list(follow(service_api, job))
    assert [int(event.id) for event in events] == [1, 2, 3, 4, 5]
    assert [event.event for event in events] == ["state", "state", "stage", "progress", "state"]
    assert events[3].json()["percent"] == 50.0
    assert events[-1].json()["state"] == "succeeded"
    assert events[-1].json()["at"].startswith("20")


def test_news_arrives_while_the_job_runs(service_api: Api) -> None:
    job = new_job(service_api)
    stream = follow(service_api, job)
    assert next(stream).json()["state"] == "queued"
    lease = claim(service_api, job)
    assert next(stream).json()["state"] == "running"
    lease.log(["a line"], limit=10)
    assert next(stream).event == "log"
    lease.fail(JobError.of(TimeLimit("It took too long.", "Ask for less.")))
    last = next(stream)
    assert last.json()["error"]["code"] == "timeout"
    assert list(stream) == []


def test_a_stream_goes_on_after_the_last_event_seen(service_api: Api) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    lease.stage_started(Stage.PULL)
    lease.stage_finished(Stage.PULL, 1.0)
    lease.cancel()
    events = list(follow(service_api, job, **{"Last-Event-ID": "3"}))
    assert [int(event.id) for event in events] == [4, 5]


def test_a_retried_job_is_followed_past_its_first_end(service_api: Api) -> None:
    job = new_job(service_api)
    service_api.store.request_cancel(job.id, tenant="alice")
    service_api.store.retry(job.id, tenant="alice", token="none")
    stream = follow(service_api, job)
    assert [next(stream).json()["state"] for _ in range(3)] == ["queued", "canceled", "queued"]
    service_api.store.request_cancel(job.id, tenant="alice")
    assert [event.json()["state"] for event in stream] == ["canceled"]


def test_who_reconnects_after_the_end_is_told_to_stop(service_api: Api) -> None:
    job = new_job(service_api)
    service_api.store.request_cancel(job.id, tenant="alice")
    with service_api.client() as client:
        answer = client.get(f"/v1/jobs/{job.id}/events", headers={"Last-Event-ID": "2"})
        assert (answer.status_code, answer.content) == (204, b"")


def test_events_as_json_pages(service_api: Api) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    for stage in Stage:
        lease.stage_started(stage)
    lease.cancel()
    with service_api.client(Accept="application/json") as client:
        path = f"/v1/jobs/{job.id}/events"
        first = client.get(path, params={"limit": 6}).json()
        rest = client.get(path, params={"after": 6}).json()
        assert [event["id"] for event in first["data"]] == [1, 2, 3, 4, 5, 6]
        assert first["has_more"]
        assert [event["id"] for event in rest["data"]] == [7, 8, 9, 10, 11]
        assert not rest["has_more"]
        assert rest["data"][-1] | {"at": ""} == {"id": 11, "kind": "state", "at": "", "data": {"state": "canceled"}}
        assert client.get(path, headers={"Accept": "image/png"}).json()["code"] == "not_acceptable"
        assert client.get(path, headers={"Last-Event-ID": "x"}).json()["code"] == "request_invalid"


def test_more_events_than_a_page_all_arrive(service_api: Api) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    for number in range(1030):
        lease.progress(Progress(Stage.PULL, number, 2000, "bytes"), tell=True)
    lease.cancel()
    assert [int(event.id) for event in follow(service_api, job)] == list(range(1, 1034))


def test_many_streams_of_many_jobs_bring_each_event_once(service_api: Api) -> None:
    """Jobs of two accounts change at the same time, in different numbers, and end together."""
    jobs = [
        service_api.store.submit(owner, config(f"{owner}/many-{n}"), source_commit="0" * 40, token="none").job
        for owner in ("alice", "bob")
        for n in range(12)
    ]
    leases = {
        lease.job.id: lease
        for lease in iter(lambda: Leases(service_api.store, lease_s=60, running_limit=99).claim("test"), None)
    }

    def change(share: int) -> None:
        for number, job in list(enumerate(jobs))[share::3]:
            for done in range(number):
                leases[job.id].progress(Progress(Stage.PULL, done, 100, "bytes"), tell=True)
            leases[job.id].cancel()

    with ThreadPoolExecutor(len(jobs) + 3) as pool:
        streams = [pool.submit(lambda job=job: [int(event.id) for event in follow(service_api, job)]) for job in jobs]
        list(pool.map(change, range(3)))
        for number, stream in enumerate(streams):
            assert stream.result(60) == list(range(1, number + 4))  # queued, running, its changes, canceled


@pytest.fixture(scope="module")
def quick_api(tmp_path_factory: pytest.TempPathFactory, service_hub: Any, service_redis: str) -> Iterator[Api]:
    """An API that sends keep-alives often and allows few streams."""
    api = start_api(
        tmp_path_factory.mktemp("quick"),
        KVALIGN_HUB_ENDPOINT=service_hub.url,
        KVALIGN_REDIS_URL=service_redis,
        KVALIGN_SSE_KEEPALIVE_S="0.2",
        KVALIGN_STREAMS_PER_TENANT="2",
    )
    try:
        yield api
    finally:
        stop_api(api)


def test_silence_is_filled_with_comments(quick_api: Api) -> None:
    job = new_job(quick_api)
    with quick_api.client() as client, client.stream("GET", f"/v1/jobs/{job.id}/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":"))


def test_one_account_may_not_hold_every_stream(quick_api: Api) -> None:
    job = new_job(quick_api)
    streams = [follow(quick_api, job) for _ in range(2)]
    for stream in streams:
        next(stream)
    with quick_api.client() as client:
        path = f"/v1/jobs/{job.id}/events"
        answer = client.get(path)
        assert (answer.status_code, answer.json()["code"]) == (429, "too_many_streams")
        assert client.get(path, headers={"Accept": "application/json"}).status_code == 200
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 10
        while True:
            with client.stream("GET", path) as again:
                if again.status_code == 200:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_many_streams_leave_room_for_other_requests(service_api: Api) -> None:
    job = new_job(service_api)
    seen: list[str] = []

    def watch() -> None:
        seen.extend(event.event for event in follow(service_api, job))

    threads = [threading.Thread(target=watch) for _ in range(20)]
    for thread in threads:
        thread.start()
    with service_api.client() as client:
        began = time.monotonic()
        assert client.get(f"/v1/jobs/{job.id}").status_code == 200
        assert time.monotonic() - began < 5
    service_api.store.request_cancel(job.id, tenant="alice")
    for thread in threads:
        thread.join(20)
    assert len(seen) == 40


def test_a_stopping_server_closes_its_streams(tmp_path: Any, service_hub: Any, service_redis: str) -> None:
    api = start_api(tmp_path, KVALIGN_HUB_ENDPOINT=service_hub.url, KVALIGN_REDIS_URL=service_redis)
    try:
        job = new_job(api)
        stream = follow(api, job)
        next(stream)
        began = time.monotonic()
        api.process.terminate()
        assert list(stream) == []  # and no TransportError: it ends as a stream should
        assert api.process.wait(10) == 0
        assert time.monotonic() - began < 8
    finally:
        stop_api(api)
    assert ALICE not in api.log.read_text()
