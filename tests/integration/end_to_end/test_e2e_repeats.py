"""The same submission more than once: one job while it is alive, a taken target afterwards."""

from collections.abc import Iterator

import pytest
from e2e_services import Json, Services, conversion


@pytest.fixture
def slow_pull(services: Services) -> Iterator[Services]:
    """Jobs stay alive, because the Hub takes its time over one file of the model."""
    services.hub.fault(method="GET", path_regex="/ada/llama/resolve/.*tokenizer.json", delay_s=30, times=20)
    yield services
    for job in services.person().jobs():
        if job["state"] in {"queued", "running"}:
            services.person().cancel(job)
    for job in services.person().jobs():
        if job["state"] == "cancelling":
            services.person().reach(job, "canceled")


def submit(services: Services, status: int, body: Json, **headers: str) -> Json:
    """The answer's body; the status must be the one expected."""
    response = services.person().ask("POST", "/v1/jobs", json=body, headers=headers)
    assert response.status_code == status, response.text
    answer: Json = response.json()
    return answer


def test_a_living_job_answers_its_repeats(slow_pull: Services) -> None:
    body = conversion("ada/llama", "ada/repeated")
    first = submit(slow_pull, 202, body)
    assert submit(slow_pull, 200, body)["id"] == first["id"]
    assert submit(slow_pull, 200, {**body, "labels": {"why": "again"}})["id"] == first["id"]
    pinned = {**body, "source": {"repo": "ada/llama", "revision": first["source_commit"]}}
    assert submit(slow_pull, 200, pinned)["id"] == first["id"]
    other = submit(slow_pull, 202, conversion("ada/llama", "ada/repeated", codec={"ratio": 5.0}))
    assert other["id"] != first["id"]
    elsewhere = submit(slow_pull, 202, conversion("ada/llama", "ada/repeated-elsewhere"))
    assert elsewhere["id"] not in {first["id"], other["id"]}


def test_an_idempotency_key_answers_whatever_became_of_the_job(slow_pull: Services) -> None:
    body, key = conversion("ada/llama", "ada/keyed"), {"Idempotency-Key": "monday-1"}
    first = submit(slow_pull, 202, body, **key)
    assert submit(slow_pull, 200, body, **key)["id"] == first["id"]
    assert submit(slow_pull, 200, body)["id"] == first["id"]
    ada = slow_pull.person()
    ada.cancel(first)
    ada.reach(first, "canceled")
    assert submit(slow_pull, 200, body, **key)["state"] == "canceled"
    conflict = submit(slow_pull, 422, conversion("ada/llama", "ada/keyed", codec={"ratio": 5.0}), **key)
    assert conflict["code"] == "idempotency_conflict"
    assert submit(slow_pull, 202, body)["id"] != first["id"]
