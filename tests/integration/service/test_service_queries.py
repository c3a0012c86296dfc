"""How often the API asks its database: as often for many jobs as for few. Routes are called as FastAPI calls them."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import config
from sqlalchemy import Engine, event

from service.auth import Caller
from service.routes.jobs import find, get
from service.settings import ServiceSettings
from service.wiring import ServiceParts, wire
from worker.jobs import NO_ORIGIN, Progress, Stage
from worker.leases import Leases

ALICE = Caller("alice", "hf_none", NO_ORIGIN)


@pytest.fixture
def parts(database_url: str, secret_key: str, tmp_path: Path) -> Iterator[ServiceParts]:
    opened = wire(ServiceSettings.load(database_url=database_url, secret_key=secret_key, data_dir=tmp_path))
    yield opened
    opened.close()


def statements(call: Callable[[], Any]) -> int:
    """How many statements a call sends to any database; on SQLite each transaction's BEGIN is one."""
    sent: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        call()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    return len(sent)


def submit(parts: ServiceParts, count: int, tenant: str = "alice") -> None:
    for _ in range(count):
        name = f"{tenant}/queries-{next(_numbers)}"
        parts.store.submit(tenant, config(name), source_commit="0" * 40, token="none")


_numbers = iter(range(10**6))


def test_a_list_asks_as_often_for_many_waiting_jobs_as_for_one(parts: ServiceParts) -> None:
    submit(parts, 1)
    one = statements(lambda: find(ALICE, parts))
    submit(parts, 15)
    submit(parts, 2, tenant="bob")
    page = find(ALICE, parts)
    assert [job.place_in_queue for job in page.data] == [*range(18, 4, -1), 3, 1]
    assert statements(lambda: find(ALICE, parts)) == one <= 5  # SQLite is told to BEGIN twice


def test_a_running_job_is_read_without_its_events(parts: ServiceParts) -> None:
    submit(parts, 1)
    lease = Leases(parts.store, lease_s=60, running_limit=9).claim("test")
    assert lease is not None
    lease.stage_started(Stage.PULL)
    time.sleep(1.1)  # before that a pace means nothing
    lease.progress(Progress(Stage.PULL, 1, 1000, "bytes"), tell=True)
    few = statements(lambda: get(lease.job.id, ALICE, parts))
    for done in range(2, 120):
        lease.progress(Progress(Stage.PULL, done, 1000, "bytes"), tell=True)
    assert statements(lambda: get(lease.job.id, ALICE, parts)) == few <= 5
    assert get(lease.job.id, ALICE, parts).eta_s is not None


def test_a_look_for_news_is_one_query_for_a_thousand_jobs(parts: ServiceParts) -> None:
    submit(parts, 3)
    ids = [job.id for job in parts.store.find(tenant="alice").jobs]
    assert parts.store.last_events(ids) == dict.fromkeys(ids, 1)
    unknown = [f"job_{number}" for number in range(1, 998)]
    assert statements(lambda: parts.store.last_events([*ids, *unknown])) <= 2
    assert parts.store.last_events([*ids, *unknown, *(f"more_{number}" for number in range(2500))]).keys() == set(ids)
    parts.store.request_cancel(ids[0], tenant="alice")
    assert parts.store.last_events(ids).keys() == set(ids[1:])  # an ended job has no more news
