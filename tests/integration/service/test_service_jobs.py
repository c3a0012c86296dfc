"""Jobs over HTTP: a real API process, a real Hub client against devhub, a real store."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi
from service_harness import ALICE, BOB, CAROL, READER, Api, DevHub, body, config

from worker.jobs import Progress, Stage
from worker.leases import Leases

_numbers = itertools.count()


def target(owner: str = "alice") -> str:
    return f"{owner}/jobs-{next(_numbers)}"


def submit(api: Api, token: str = ALICE, **config: Any) -> dict[str, Any]:
    with api.client(token) as client:
        answer = client.post(
            "/v1/jobs", json=body(config.pop("target", target("bob" if token == BOB else "alice")), **config)
        )
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem["code"] == code, problem
    assert problem["detail"]
    assert problem["remedy"]
    return problem


def test_a_job_is_accepted_and_read_back(service_api: Api) -> None:
    name = target()
    with service_api.client() as client:
        answer = client.post("/v1/jobs", json=body(name, labels={"team": "blue"}))
        assert answer.status_code == 202
        job = answer.json()
        assert answer.headers["location"] == f"/v1/jobs/{job['id']}" == job["links"]["self"]
        read = client.get(answer.headers["location"]).json()
    assert read["state"] == "queued"
    assert read["place_in_queue"] >= 1
    assert read["labels"] == {"team": "blue"}
    assert read["config"]["target"]["repo"] == name
    assert len(read["source_commit"]) == 40
    assert read["timestamps"]["queued"].endswith(("Z", "+00:00"))
    assert (read["error"], read["result"], read["percent"], read["attempts"]) == (None, None, None, 0)
    assert ALICE not in answer.text


def test_the_same_conversion_is_the_same_job_while_it_is_alive(service_api: Api) -> None:
    name = target()
    first = submit(service_api, target=name)
    with service_api.client() as client:
        again = client.post("/v1/jobs", json=body(name, labels={"other": "label"}))
        assert (again.status_code, again.json()["id"]) == (200, first["id"])
        client.post(f"/v1/jobs/{first['id']}/cancel")
        fresh = client.post("/v1/jobs", json=body(name))
        assert fresh.status_code == 202
        assert fresh.json()["id"] != first["id"]


def test_an_idempotency_key_leads_to_its_first_answer(service_api: Api) -> None:
    name, key = target(), {"Idempotency-Key": "key-1"}
    with service_api.client() as client:
        first = client.post("/v1/jobs", json=body(name), headers=key)
        client.post(f"/v1/jobs/{first.json()['id']}/cancel")
        again = client.post("/v1/jobs", json=body(name), headers=key)
        assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
        refused(client.post("/v1/jobs", json=body(target()), headers=key), 422, "idempotency_conflict")
        refused(client.post("/v1/jobs", json=body(name), headers={"Idempotency-Key": "a b"}), 422, "request_invalid")


def test_a_repeat_is_its_job_although_the_target_is_there_by_now(service_api: Api, service_hub: DevHub) -> None:
    name, key = target(), {"Idempotency-Key": "key-while-publishing"}
    with service_api.client() as client:
        first = client.post("/v1/jobs", json=body(name), headers=key).json()
        HfApi(service_hub.url, token=ALICE).create_repo(name)  # as the publish stage does
        for headers in ({}, key):
            again = client.post("/v1/jobs", json=body(name), headers=headers)
            assert (again.status_code, again.json()["id"]) == (200, first["id"])
        client.post(f"/v1/jobs/{first['id']}/cancel")
        refused(client.post("/v1/jobs", json=body(name)), 409, "target_exists")
        assert client.post("/v1/jobs", json=body(name), headers=key).json()["id"] == first["id"]


def test_a_token_is_asked_for_and_checked(service_api: Api) -> None:
    with service_api.client(None) as client:
        answer = client.get("/v1/jobs")
        refused(answer, 401, "token_missing")
        assert answer.headers["www-authenticate"].startswith("Bearer")
        refused(client.get("/v1/jobs", headers={"Authorization": "Basic YTpi"}), 401, "token_missing")
    with service_api.client("hf_nobody") as client:
        answer = client.get("/v1/jobs")
        refused(answer, 401, "token_invalid")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    with service_api.client("x" * 600) as client:
        refused(client.get("/v1/jobs"), 401, "token_invalid")


@pytest.mark.parametrize(
    ("source", "status", "code"),
    [
        ("carol/nothing", 422, "source_not_found"),
        ("carol/hidden", 422, "source_not_found"),
        ("carol/gated", 403, "source_gated"),
        ("carol/recurrent", 422, "source_unsupported"),
        ("carol/pickled", 422, "weights_unsafe"),
    ],
)
def test_a_source_that_cannot_be_converted_is_refused_at_once(
    service_api: Api, source: str, status: int, code: str
) -> None:
    with service_api.client() as client:
        before = client.get("/v1/jobs?limit=1").json()["data"]
        refused(client.post("/v1/jobs", json=body(target(), source)), status, code)
        assert client.get("/v1/jobs?limit=1").json()["data"] == before


def test_a_target_that_cannot_be_written_is_refused_at_once(service_api: Api) -> None:
    with service_api.client() as client:
        refused(client.post("/v1/jobs", json=body("alice/taken")), 409, "target_exists")
        refused(client.post("/v1/jobs", json=body("bob/mine")), 403, "target_forbidden")
    with service_api.client(READER) as client:
        refused(client.post("/v1/jobs", json=body("reader/mine")), 403, "target_forbidden")


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"webhook": {"url": "http://example.org/hook"}}, "webhook.url is not https"),
        ({"webhook": {"url": "https://127.0.0.1/hook"}}, "not on the public Internet"),
        ({"webhook": {"url": "https://no-such-host.invalid/"}}, "has no address"),
        ({"webhook": {"url": "https://me@example.org/"}}, "webhook.url: carries a user"),
        ({"webhook": {"url": "https://example.org/", "secret": "short"}}, "webhook.secret: is not 'whsec_'"),
        ({"calibration": {"dataset": "/etc/passwd"}}, "calibration.dataset"),
        ({"validation": {"dataset": "texts.jsonl"}}, "validation.dataset"),
        ({"labels": {"a": "b\u0000"}}, "labels"),
        ({"labels": {"a=b": "c"}}, "labels"),
        ({"codec": {"max_kl": 0.1, "ratio": 3}}, "exactly one"),
    ],
)
def test_settings_that_this_service_does_not_take(service_api: Api, more: dict[str, Any], word: str) -> None:
    with service_api.client() as client:
        problem = refused(client.post("/v1/jobs", json=body(target(), **more)), 422, "config_invalid")
    assert word in problem["detail"]


def test_foreign_jobs_do_not_exist(service_api: Api) -> None:
    job_id = submit(service_api)["id"]
    with service_api.client(BOB) as stranger:
        for method, path in [
            ("GET", ""),
            ("POST", "/cancel"),
            ("POST", "/retry"),
            ("GET", "/events"),
            ("GET", "/report"),
            ("GET", "/report/README.md"),
        ]:
            refused(stranger.request(method, f"/v1/jobs/{job_id}{path}"), 404, "job_not_found")
        refused(stranger.get("/v1/jobs/not%20an%00id"), 404, "job_not_found")
        assert job_id not in stranger.get("/v1/jobs?limit=100").text


def test_cancel_and_retry(service_api: Api) -> None:
    job_id = submit(service_api)["id"]
    with service_api.client() as client:
        refused(client.post(f"/v1/jobs/{job_id}/retry"), 409, "job_not_retryable")
        canceled = client.post(f"/v1/jobs/{job_id}/cancel")
        assert (canceled.status_code, canceled.json()["state"]) == (200, "canceled")
        assert canceled.json()["place_in_queue"] is None
        retried = client.post(f"/v1/jobs/{job_id}/retry")
        assert (retried.status_code, retried.json()["state"]) == (202, "queued")
        assert set(retried.json()["timestamps"]) == {"queued", "canceled"}


def test_lists_are_filtered_and_paged(service_api: Api) -> None:
    jobs = [submit(service_api, BOB, labels={"set": "paged", "number": str(n)})["id"] for n in range(3)]
    with service_api.client(BOB) as client:
        client.post(f"/v1/jobs/{jobs[1]}/cancel")
        first = client.get("/v1/jobs", params={"label": "set=paged", "limit": 2}).json()
        assert [job["id"] for job in first["data"]] == [jobs[2], jobs[1]]
        assert first["has_more"]
        second = client.get("/v1/jobs", params={"label": "set=paged", "limit": 2, "after": jobs[1]}).json()
        assert ([job["id"] for job in second["data"]], second["has_more"]) == ([jobs[0]], False)
        assert [job["id"] for job in client.get("/v1/jobs?state=canceled&label=number").json()["data"]] == [jobs[1]]
        for query in ("limit=0", "limit=101", "limit=x", "state=done", "after=%00", "label=%00"):
            refused(client.get(f"/v1/jobs?{query}"), 422, "request_invalid")


def test_one_account_may_not_fill_the_queue(service_api: Api) -> None:
    for number in range(20):
        service_api.store.submit("reader", config(f"reader/full-{number}"), source_commit="0" * 40, token="none")
    with service_api.client(READER) as client:
        job_id = client.get("/v1/jobs?limit=1").json()["data"][0]["id"]
        client.post(f"/v1/jobs/{job_id}/cancel")
        service_api.store.submit("reader", config("reader/full-again"), source_commit="0" * 40, token="none")
        answer = client.post(f"/v1/jobs/{job_id}/retry")
    refused(answer, 429, "quota_exceeded")
    assert int(answer.headers["retry-after"]) > 0


def test_a_hub_that_fails_is_named(service_api: Api, service_hub: DevHub) -> None:
    commit = submit(service_api)["source_commit"]  # by its branch the source is known for a while
    wanted = {**body(target()), "source": {"repo": "carol/tiny", "revision": commit}}
    service_hub.fault(path_regex="/api/models/carol/tiny", status=503, times=50)
    try:
        with service_api.client() as client:
            answer = client.post("/v1/jobs", json=wanted)
    finally:
        service_hub.clear_faults()
    refused(answer, 503, "hub_unavailable")
    assert int(answer.headers["retry-after"]) > 0


def test_a_slow_hub_holds_up_nobody_who_reads(service_api: Api, service_hub: DevHub) -> None:
    """More requests wait for it than the event loop has threads."""
    job = submit(service_api)

    def wait_for_the_hub(_: int) -> int:
        with service_api.client() as client:
            return client.post("/v1/preflight", json=body(target()), timeout=60).status_code

    with ThreadPoolExecutor(60) as pool:
        service_hub.fault(path_regex="/api/models/alice/jobs-", delay_s=0.5, times=60)
        waiting = [pool.submit(wait_for_the_hub, number) for number in range(60)]
        waiting[0].result()  # by now all others wait, too
        with service_api.client() as client:
            assert client.get(f"/v1/jobs/{job['id']}").status_code == 200
        assert not all(answer.done() for answer in waiting)
        assert {answer.result() for answer in waiting} == {200}
    service_hub.clear_faults()


def test_a_flood_of_submissions_asks_about_its_source_once(service_api: Api, service_hub: DevHub) -> None:
    def asked_of_source() -> int:
        return sum("/carol/tiny" in entry["path"] for entry in service_hub.log())

    def of_source(owner: str = "alice") -> dict[str, Any]:
        return {**body(target(owner)), "source": {"repo": "carol/tiny", "revision": commit}}

    commit = submit(service_api)["source_commit"]
    with service_api.client() as alice, service_api.client(BOB) as bob:
        assert alice.post("/v1/jobs", json=of_source()).status_code == 202
        before = asked_of_source()
        for _ in range(3):
            assert alice.post("/v1/jobs", json=of_source()).status_code == 202
        assert asked_of_source() - before <= 2  # a slow machine may take longer than what was found out is believed
        known = asked_of_source()
        assert bob.post("/v1/jobs", json=of_source("bob")).status_code == 202
    assert asked_of_source() > known  # what one caller's token may read says nothing about another's


def test_what_one_account_may_read_is_not_told_to_another(service_api: Api) -> None:
    with service_api.client(CAROL) as owner, service_api.client() as stranger:
        assert owner.post("/v1/preflight", json=body("carol/mine", "carol/hidden")).json()["ok"]
        refused(stranger.post("/v1/jobs", json=body(target(), "carol/hidden")), 422, "source_not_found")


def test_a_running_job_tells_how_far_it_is(service_api: Api) -> None:
    with service_api.client() as client:
        for job in client.get("/v1/jobs?state=queued&limit=100").json()["data"]:
            client.post(f"/v1/jobs/{job['id']}/cancel")
        job_id = submit(service_api)["id"]
        lease = next(
            lease
            for lease in iter(lambda: Leases(service_api.store, lease_s=60, running_limit=9).claim("test"), None)
            if lease.job.id == job_id
        )
        lease.stage_started(Stage.PULL)
        time.sleep(1.05)  # a pace is told of work that took a second
        lease.progress(Progress(Stage.PULL, 250, 1000, "bytes"), tell=True)
        job = client.get(f"/v1/jobs/{job_id}").json()
        assert (job["state"], job["stage"], job["percent"]) == ("running", "pull", 25.0)
        assert (job["bytes_done"], job["bytes_total"], job["attempts"]) == (250, 1000, 1)
        assert 1 < job["eta_s"] < 60
        stopping = client.post(f"/v1/jobs/{job_id}/cancel").json()
        assert stopping["state"] == "cancelling"
        lease.cancel()
        assert client.get(f"/v1/jobs/{job_id}").json()["state"] == "canceled"
