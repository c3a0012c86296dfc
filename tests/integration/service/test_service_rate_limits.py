"""Rate limits: shared by real API processes through a real Redis, told in headers, and open when Redis is away."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_harness import ALICE, BOB, Api, DevHub, body, start_api, stop_api

from service.rate_limits import RateLimits

BUDGETS = {
    "KVALIGN_SUBMISSIONS_PER_MINUTE": "4",
    "KVALIGN_READS_PER_MINUTE": "6",
    "KVALIGN_FAILED_LOGINS_PER_MINUTE": "3",
}


@pytest.fixture
def apis(tmp_path: Path, service_hub: DevHub, redis_server: Any) -> Iterator[list[Api]]:
    """Two API processes on one Redis and one database."""
    settings = {"KVALIGN_HUB_ENDPOINT": service_hub.url, "KVALIGN_REDIS_URL": redis_server.url, **BUDGETS}
    first = start_api(tmp_path, **settings)
    second = start_api(tmp_path, **settings, KVALIGN_SECRET_KEY=first.settings["KVALIGN_SECRET_KEY"])
    yield [first, second]
    stop_api(second)
    stop_api(first)


def standing(answer: httpx.Response) -> tuple[str, int, int, int]:
    """Name, quota, what is left, seconds: as the draft's structured fields say them."""
    name, quota, window = re.fullmatch(r'"(\w+)";q=(\d+);w=(\d+)', answer.headers["ratelimit-policy"]).groups()  # type: ignore[union-attr]
    again, left, reset = re.fullmatch(r'"(\w+)";r=(\d+);t=(\d+)', answer.headers["ratelimit"]).groups()  # type: ignore[union-attr]
    assert (name, window) == (again, "60")
    assert 1 <= int(reset) <= 60
    return name, int(quota), int(left), int(reset)


def refused(answer: httpx.Response) -> None:
    assert (answer.status_code, answer.json()["code"]) == (429, "rate_limited"), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert int(answer.headers["retry-after"]) == standing(answer)[3]
    assert standing(answer)[2] == 0


def test_budgets_are_shared_told_and_given_up_when_redis_is_away(apis: list[Api], redis_server: Any) -> None:
    first, second = (api.client() for api in apis)
    with first, second, apis[0].client(BOB) as other:
        seen = [standing(client.post("/v1/preflight", json=body("alice/limited"))) for client in (first, second, first)]
        assert [one[:3] for one in seen] == [("submissions", 4, left) for left in (3, 2, 1)]
        assert second.post("/v1/jobs", json={}).status_code == 422  # what is refused counts too
        refused(first.post("/v1/jobs", json=body("alice/limited")))
        refused(second.post("/v1/preflight", json=body("alice/limited")))
        assert standing(first.get("/v1/jobs"))[:3] == ("reads", 6, 5)
        assert standing(other.post("/v1/preflight", json=body("bob/limited")))[2] == 3
        for client in (first, second, first, second, first):
            assert client.get("/v1/audit").status_code == 200
        refused(second.get("/v1/jobs/job_nothing"))
        assert "ratelimit" not in first.get("/healthz").headers

        for number in range(3):
            answer = first.get("/v1/jobs", headers={"Authorization": f"Bearer hf_wrong_{number}"})
            assert answer.status_code == 401
        refused(second.get("/v1/jobs", headers={"Authorization": "Bearer hf_wrong_3"}))
        assert first.get("/v1/jobs").headers["ratelimit"].startswith('"reads"'), "who is known is not kept out"

        redis_server.kill()
        began = time.monotonic()
        answers = [second.get("/v1/jobs") for _ in range(20)]
        assert {answer.status_code for answer in answers} == {200}
        assert time.monotonic() - began < 10
        assert "ratelimit" not in answers[-1].headers
    assert apis[1].log.read_text().count("rate limits are not held") in {1, 2}
    for token in (ALICE, BOB):
        assert token not in apis[0].log.read_text() + apis[1].log.read_text()


def test_no_budget_is_no_limit_and_asks_nobody() -> None:
    limits = RateLimits("redis://127.0.0.1:9/0", {"reads": 0, "submissions": 1})
    assert [limits.spend("reads", "alice") for _ in range(3)] == [None] * 3
    assert limits._away_until < 0
    assert [limits.spend("submissions", "alice") for _ in range(3)] == [None] * 3
    assert limits._away_until > time.monotonic()
    limits.close()
