"""Forgets what is older than the operator wants kept: ended jobs with all that hangs on them, and audit entries.

A little in each transaction, so that nobody waits for it; any number of sweepers may do it at once. Knows no workspace:
a folder without a job is removed by worker.sweeper.
"""

from datetime import datetime, timedelta
from typing import Any, cast

from sqlalchemy import CursorResult, Delete, delete, select

from worker.schema import AuditRow, JobRow, has_ended
from worker.store import JobStore

JOBS_PER_TRANSACTION = 20
ENTRIES_PER_TRANSACTION = 500
TRANSACTIONS_PER_PASS = 10


def forget(store: JobStore, *, kept_days: float) -> int:
    """Delete what ended, or was done, more than kept_days ago; 0 keeps all. Returns how many rows, jobs and entries.

    A pass is bounded: after a shortened setting it takes many of them.
    """
    if not kept_days:
        return 0
    with store.database.read() as session:
        oldest = store.database.now(session) - timedelta(days=kept_days)
    return _in_batches(store, _old_jobs(oldest)) + _in_batches(store, _old_entries(oldest))


def _old_jobs(oldest: datetime) -> Delete:
    """Events, labels, reports, deliveries and keys go with their job. A job retried meanwhile stays."""
    old = (has_ended, JobRow.updated_at < oldest)
    batch = select(JobRow.id).where(*old).order_by(JobRow.updated_at).limit(JOBS_PER_TRANSACTION)
    return delete(JobRow).where(JobRow.id.in_(batch), *old)


def _old_entries(oldest: datetime) -> Delete:
    batch = select(AuditRow.id).where(AuditRow.at < oldest).order_by(AuditRow.at).limit(ENTRIES_PER_TRANSACTION)
    return delete(AuditRow).where(AuditRow.id.in_(batch))


def _in_batches(store: JobStore, some: Delete) -> int:
    gone = 0
    for _ in range(TRANSACTIONS_PER_PASS):
        with store.database.write() as session:
            result = session.execute(some.execution_options(synchronize_session=False))
            deleted = cast(CursorResult[Any], result).rowcount
        if not deleted:
            break
        gone += deleted
    return gone
