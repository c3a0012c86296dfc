"""The database's clock jumps: nothing is lost, and nothing takes effect twice; things may come early or late."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from sqlalchemy.orm import Session
from worker_harness import claim, submit

from worker.database import Database
from worker.jobs import JobResult, JobState
from worker.leases import LeaseLost
from worker.outbox import Outbox, Outcome
from worker.retention import forget
from worker.store import JobStore
from worker.sweeper import sweep

RESULT = JobResult("alice/out", "1" * 40, "http://hub/alice/out", 12.5, 0.01, 0.97)
WEBHOOK = {"url": "https://example.org/", "secret": "whsec_" + "A" * 32, "events": ["job.queued", "job.succeeded"]}


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Moves the clock of whichever database is asked, from now on."""
    true_now = Database.now

    def by(offset: timedelta) -> None:
        def now(database: Database, session: Session) -> datetime:
            return true_now(database, session) + offset

        monkeypatch.setattr(Database, "now", now)

    return by


def test_a_jump_ahead_takes_the_job_from_its_worker_which_can_do_no_harm(
    store: JobStore, jump: Callable[[timedelta], None]
) -> None:
    job = submit(store)
    slow = claim(store, lease_s=30)
    jump(timedelta(hours=1))
    assert sweep(store, max_attempts=3).requeued == [job.id]
    quick = claim(store, lease_s=30)
    with pytest.raises(LeaseLost):
        slow.succeed(RESULT)
    quick.succeed(RESULT)
    assert store.get(job.id, tenant="alice").state == JobState.SUCCEEDED
    assert forget(store, kept_days=1) == 0


def test_a_jump_back_leaves_leases_queue_and_webhooks_working(
    store: JobStore, jump: Callable[[timedelta], None]
) -> None:
    first = submit(store, "first", webhook=WEBHOOK)
    lease = claim(store, lease_s=30)
    outbox = Outbox(store.database, store.cipher)
    [taken] = outbox.take(8, per_tenant=8)
    jump(timedelta(hours=-1))
    assert not sweep(store, max_attempts=3)
    lease.renew()
    lease.log(["still here"], limit=10)
    second = submit(store, "second")
    assert claim(store).job.id == second.id
    lease.succeed(RESULT)
    outbox.settle(taken, Outcome(200), [1])
    [told] = outbox.take(8, per_tenant=8)
    assert (told.job_id, told.attempt) == (first.id, 1)
    events = store.events(first.id, tenant="alice")
    assert [event.sequence for event in events] == [1, 2, 3, 4]
    assert store.get(first.id, tenant="alice").state == JobState.SUCCEEDED
    store.request_cancel(second.id, tenant="alice")
    jump(timedelta())
    assert sweep(store, max_attempts=3).canceled == [second.id]
