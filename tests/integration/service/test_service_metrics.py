"""/metrics of real API processes: true to the database, silent about tenants, closed when a token is set."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from prometheus_client.parser import text_string_to_metric_families
from service_harness import Api, config, environment, start_api, stop_api
from sqlalchemy import update
from starlette.testclient import TestClient

from kvalign.errors import ConfigInvalid
from service.app import create_app
from service.settings import ServiceSettings
from worker.census import take_census
from worker.counters import Counter, count
from worker.jobs import ErrorCode, JobError, JobResult, Progress, Stage
from worker.leases import Lease, Leases
from worker.schema import JobRow
from worker.store import JobStore
from worker.sweeper import gone, seen, sweep

TENANT, REPO, HUB_TOKEN, METRICS_TOKEN = "tenantcanary", "repocanary", "hf_token_canary", "metrics-token-canary"
PULLED = Progress(Stage.PULL, 1, 2, "bytes")
RESULT = JobResult(f"{TENANT}/{REPO}", "1" * 40, f"http://hub/{REPO}", 12.5, 0.01, 0.97)


@pytest.fixture(scope="module")
def two_apis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Api]]:
    """Two API processes on one database."""
    first = start_api(tmp_path_factory.mktemp("first"))
    shared = {
        "KVALIGN_SECRET_KEY": first.settings["KVALIGN_SECRET_KEY"],
        "KVALIGN_DATABASE_URL": f"sqlite:///{first.settings['KVALIGN_DATA_DIR']}/kvalign.db",
    }
    second = start_api(tmp_path_factory.mktemp("second"), **shared)
    yield first, second
    stop_api(second)
    stop_api(first)


def scrape(api: Api) -> dict[str, float]:
    """Every sample of an answer by its name and labels; the age of the queue moves on, and is checked apart."""
    with api.client(None) as client:
        answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return samples(answer.text)


def samples(text: str) -> dict[str, float]:
    return {
        sample.name + "".join(f":{value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def submit(store: JobStore, number: int) -> str:
    asked = config(f"{TENANT}/{REPO}-{number}", source=f"{TENANT}/{REPO}", labels={"team": TENANT})
    return store.submit(TENANT, asked, source_commit="0" * 40, token=HUB_TOKEN).job.id


def claim(store: JobStore) -> Lease:
    lease = Leases(store, lease_s=60, running_limit=99).claim(TENANT)
    assert lease is not None
    return lease


def change(store: JobStore, job_id: str, **columns: object) -> None:
    with store.database.write() as session:
        session.execute(update(JobRow).where(JobRow.id == job_id).values(**columns))


def fill(store: JobStore) -> None:
    """2 queued, 3 running (one with an expired lease), 1 cancelling, 1 succeeded, 1 failed, 1 canceled."""
    for number in range(9):
        submit(store, number)
    held = [claim(store) for _ in range(7)]
    held[0].succeed(RESULT)
    held[1].fail(JobError(ErrorCode.INTERNAL, f"about {REPO}"))
    held[2].cancel()
    store.request_cancel(held[3].job.id, tenant=TENANT)
    with store.database.read() as session:
        now = store.database.now(session)
    change(store, held[4].job.id, lease_expires_at=now - timedelta(seconds=1))


def test_real_jobs_are_counted_by_every_api_alike(two_apis: tuple[Api, Api]) -> None:
    first, second = two_apis
    empty = {name: value for name, value in scrape(first).items() if not name.startswith("kvalign_http_")}
    assert {name: value for name, value in empty.items() if value} == {
        name: 1.0 for name in empty if name.startswith("kvalign_build_info:")
    }
    fill(first.store)
    seen(first.store, f"worker-of-{TENANT}")
    expected = {
        "kvalign_jobs:queued": 2,
        "kvalign_jobs:running": 3,
        "kvalign_jobs:cancelling": 1,
        "kvalign_jobs:succeeded": 1,
        "kvalign_jobs:failed": 1,
        "kvalign_jobs:canceled": 1,
        "kvalign_jobs_running_lease_expired": 1,
        "kvalign_workers_alive": 1,
        "kvalign_job_attempts_total": 7,
        "kvalign_jobs_ended_total::succeeded": 1,
        "kvalign_jobs_ended_total:internal:failed": 1,
        "kvalign_jobs_ended_total::canceled": 1,
        "kvalign_leases_expired_total": 0,
        "kvalign_stage_seconds_count:pull": 0,
    }
    for api in (first, second, first):
        found = scrape(api)
        assert {name: found[name] for name in expected} == expected
    queued = first.store.find(tenant=TENANT, limit=1).jobs[0]
    change(first.store, queued.id, queued_at=queued.created_at - timedelta(hours=1))
    assert 3600 <= scrape(second)["kvalign_queue_oldest_age_seconds"] < 3720
    first.store.request_cancel(queued.id, tenant=TENANT)
    gone(first.store, f"worker-of-{TENANT}")
    found = scrape(second)
    assert (found["kvalign_jobs:queued"], found["kvalign_jobs:canceled"], found["kvalign_workers_alive"]) == (1, 2, 0)
    assert found["kvalign_queue_oldest_age_seconds"] < 120
    with second.client(None) as client:
        text = client.get("/metrics").text
    for secret in (TENANT, REPO, HUB_TOKEN, "team"):
        assert secret not in text


def test_metrics_answer_as_other_routes_do(two_apis: tuple[Api, Api]) -> None:
    with two_apis[0].client(None) as client:
        answer = client.get("/metrics", headers={"X-Request-Id": "mine-2"})
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert answer.headers["x-request-id"] == "mine-2"
        assert answer.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert client.post("/metrics").headers["allow"] == "GET, HEAD, OPTIONS"
        document = client.get("/openapi.json").json()
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert {"HTTPBearer", "MetricsToken"} <= set(document["components"]["securitySchemes"])


def test_what_happened_is_counted_once_and_for_good(store: JobStore) -> None:
    """By the transaction of the event: at once by many, and not at all where that is rolled back."""
    for number in range(3):
        submit(store, number)
    held = [claim(store) for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(held[n % 3].stage_finished, Stage.FIT, 0.5) for n in range(60)]
        done += [pool.submit(held[n % 3].progress, PULLED, tell=False, moved_bytes=7) for n in range(60)]
        assert [each.result() for each in done] == [None] * 120
    with pytest.raises(RuntimeError, match="rolled back"):
        count_in_vain(store)
    with store.database.read() as session:
        at = store.database.now(session)
    change(store, held[0].job.id, lease_expires_at=at - timedelta(seconds=1))
    assert sweep(store, max_attempts=1).failed == [held[0].job.id]
    held[1].progress(replace(PULLED, stage=Stage.PUBLISH), tell=False, moved_bytes=2**40)
    assert {name: found for name, found in take_census(store, worker_seen_within_s=1).counted.items() if found} == {
        Counter.ATTEMPTS: {"": 3},
        Counter.BYTES_DOWNLOADED: {"": 420},
        Counter.BYTES_UPLOADED: {"": 2**40},
        Counter.JOBS_ENDED: {"worker_lost": 1},
        Counter.LEASES_EXPIRED: {"": 1},
        Counter.STAGES_FINISHED: {"fit": 60},
        Counter.STAGE_SECONDS: {"fit": 30},
    }


def count_in_vain(store: JobStore) -> None:
    with store.database.write() as session:
        count(session, {(Counter.ATTEMPTS, ""): 1000})
        raise RuntimeError("rolled back")


def test_names_and_labels_keep_to_the_conventions(two_apis: tuple[Api, Api]) -> None:
    """As `promtool check metrics` asks: help for each, counters end in _total, units are base units and come last."""
    with two_apis[0].client(None) as client:
        client.get("/v1/jobs/job_no_such")
        client.request("PROPFIND", "/no/such/route")
        answer = client.get("/metrics")
    families = list(text_string_to_metric_families(answer.text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation.endswith(".")
        assert re.fullmatch(r"kvalign_[a-z]+(_[a-z]+)*", family.name)
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb|percent|total|count|sum|bucket|info)$", family.name) or (
            family.name == "kvalign_build_info"
        )
        if family.type == "counter":
            assert {sample.name for sample in family.samples} <= {f"{family.name}_total", f"{family.name}_created"}
        if "duration" in family.name or "age" in family.name:
            assert family.name.endswith("_seconds")
    routes = {(s.labels["method"], s.labels["route"]) for f in families for s in f.samples if "route" in s.labels}
    assert ("GET", "/v1/jobs/{job_id}") in routes
    assert ("other", "none") in routes
    assert "job_no_such" not in answer.text
    assert "PROPFIND" not in answer.text


def test_the_census_is_the_same_in_every_database(store: JobStore) -> None:
    fill(store)
    seen(store, "one")
    census = take_census(store, worker_seen_within_s=60)
    assert list(census.jobs.values()) == [2, 3, 1, 1, 1, 1]
    assert (census.lease_expired, census.workers_alive) == (1, 1)
    assert 0 <= census.oldest_queued_s < 120


def test_the_token_is_wanted_where_it_is_set(tmp_path: Path) -> None:
    api = start_api(tmp_path, KVALIGN_METRICS_TOKEN=METRICS_TOKEN)
    try:
        for token in (None, "wrong", METRICS_TOKEN[:-1], METRICS_TOKEN + "x", "é"):
            headers = {} if token is None else {"Authorization": f"Bearer {token}".encode()}
            with api.client(None) as client:
                answer = client.get("/metrics", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert answer.json()["code"] == ("token_invalid" if token else "token_missing")
            assert "kvalign_jobs" not in answer.text
        with api.client(METRICS_TOKEN) as client:
            answer = client.get("/metrics")
            assert samples(answer.text)["kvalign_jobs:queued"] == 0
            assert METRICS_TOKEN not in answer.text
        assert METRICS_TOKEN not in api.log.read_text()
    finally:
        stop_api(api)


@pytest.mark.parametrize("token", ["", "two words", "\u00e9"])
def test_a_token_that_no_header_can_hold_is_refused(token: str) -> None:
    with pytest.raises(ConfigInvalid, match="KVALIGN_METRICS_TOKEN"):
        ServiceSettings.load(secret_key=Fernet.generate_key().decode(), metrics_token=token)


def test_a_database_that_does_not_answer_is_a_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(environment_names()):
        monkeypatch.delenv(name)
    folder = tmp_path / "data"
    app = create_app(ServiceSettings.load(data_dir=folder, secret_key=Fernet.generate_key().decode()))
    with TestClient(app) as client:
        assert client.get("/metrics").status_code == 200
        app.state.parts.store.close()
        shutil.rmtree(folder)
        answer = client.get("/metrics")
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "database_unavailable"
    assert int(answer.headers["retry-after"]) > 0


def environment_names() -> set[str]:
    """Settings of whoever runs the tests."""
    import os

    return set(os.environ) - set(environment())
