"""What is old is forgotten, with all that hangs on it, and what is alive or young stays: on real databases."""

from datetime import timedelta

import pytest
from sqlalchemy import func, select, update
from worker_harness import claim, config, submit

from worker.jobs import ErrorCode, JobError, Origin
from worker.retention import forget
from worker.schema import AuditRow, Base, JobRow
from worker.store import JobNotFound, JobStore

SECRET = "whsec_" + "A" * 32
ORIGIN = Origin("request-1", "192.0.2.7")


def age(store: JobStore, job_id: str, days: float) -> None:
    with store.database.write() as session:
        at = store.database.now(session) - timedelta(days=days)
        session.execute(update(JobRow).where(JobRow.id == job_id).values(updated_at=at))
        session.execute(update(AuditRow).where(AuditRow.job_id == job_id).values(at=at))


def rows(store: JobStore) -> dict[str, int]:
    with store.database.read() as session:
        counted = {
            name: session.scalar(select(func.count()).select_from(table)) or 0
            for name, table in Base.metadata.tables.items()
        }
    return {name: count for name, count in counted.items() if count}


def failed_job(store: JobStore, name: str) -> str:
    """With everything that can hang on a job."""
    webhook = {"url": "https://example.org/", "secret": SECRET}
    settings = config(name, labels={"a": "b"}, webhook=webhook)
    job = store.submit("alice", settings, source_commit="0" * 40, token="hf_t", idempotency_key=name).job
    lease = claim(store)
    lease.save_report_file("report.json", b"{}")
    lease.fail(JobError(ErrorCode.TIMEOUT, "It took too long."))
    return job.id


def test_old_ended_jobs_go_with_all_that_hangs_on_them(store: JobStore) -> None:
    old, young = failed_job(store, "old"), failed_job(store, "young")
    waiting = submit(store, "waiting").id
    age(store, old, 91)
    age(store, waiting, 91)
    assert forget(store, kept_days=0) == 0
    before = rows(store)
    assert forget(store, kept_days=90) == 3  # a job, its entry, and that of the one that waits
    assert forget(store, kept_days=90) == 0
    with pytest.raises(JobNotFound):
        store.get(old, tenant="alice")
    assert store.get(young, tenant="alice").state == "failed"
    assert store.get(waiting, tenant="alice").state == "queued"
    after = rows(store)
    one_job = {"job_labels": 1, "report_files": 1, "idempotency_keys": 1, "webhook_secrets": 1, "webhook_deliveries": 1}
    gone = {name: count - after.get(name, 0) for name, count in before.items()}
    assert gone == one_job | {"jobs": 1, "job_events": 3, "job_tokens": 0, "audit": 2, "counters": 0}


def test_many_old_jobs_go_in_bounded_passes(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.retention.JOBS_PER_TRANSACTION", 2)
    monkeypatch.setattr("worker.retention.TRANSACTIONS_PER_PASS", 2)
    for number in range(5):
        job = submit(store, f"m{number}")
        store.request_cancel(job.id, tenant="alice")
        age(store, job.id, 2)
    with store.database.write() as session:
        session.execute(AuditRow.__table__.delete())  # type: ignore[attr-defined]
    assert [forget(store, kept_days=1) for _ in range(3)] == [4, 1, 0]


def test_an_entry_is_written_with_its_act_or_not_at_all(store: JobStore) -> None:
    job = store.submit("alice", config(), source_commit="0" * 40, token="hf_t", origin=ORIGIN).job
    again = store.submit("alice", config(), source_commit="0" * 40, token="hf_t", origin=ORIGIN)
    assert not again.created
    store.request_cancel(job.id, tenant="alice", origin=ORIGIN)
    for act in (store.request_cancel, store.retry):
        with pytest.raises(JobNotFound):
            act(job.id, tenant="mallory", origin=ORIGIN, **({"token": "hf_t"} if act == store.retry else {}))  # type: ignore[operator]
    entries = store.audit(tenant="alice")
    assert [(e.action, e.outcome, e.job_id) for e in entries] == [
        ("cancel", "canceled", job.id),
        ("submit", "queued", job.id),
    ]
    assert {(e.request_id, e.address) for e in entries} == {("request-1", "192.0.2.7")}
    assert store.audit(tenant="mallory") == []
    assert [e.id for e in store.audit(tenant="alice", limit=1)] == [entries[0].id]
    assert [e.id for e in store.audit(tenant="alice", after=entries[0].id)] == [entries[1].id]
