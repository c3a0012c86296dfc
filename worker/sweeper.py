"""Repairs what crashes leave behind: expired leases, rows without a message, workspaces without a job.

Runs in a thread of each worker's main process, and any number of them may run at once. Must not run jobs.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from worker.counters import Counter, count
from worker.database import AWAY
from worker.jobs import ErrorCode, JobError, JobState
from worker.schema import ALIVE, LEASED, IdempotencyRow, JobRow, WorkerRow
from worker.store import JobStore
from worker.transitions import enter, fail, locked
from worker.workspace import Workspaces

IDEMPOTENCY_KEYS_KEPT = timedelta(hours=24)
WORKERS_KEPT = timedelta(days=1)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Swept:
    """Ids of jobs whose worker vanished, by what became of them."""

    requeued: list[str]
    failed: list[str]
    canceled: list[str]

    def __bool__(self) -> bool:
        return bool(self.requeued or self.failed or self.canceled)


def sweep(store: JobStore, *, max_attempts: int) -> Swept:
    """Give jobs of vanished workers back to the queue, or fail them with worker_lost after max_attempts."""
    swept = Swept([], [], [])
    for job_id in _expired(store):
        with store.database.write() as session:
            row = locked(session, job_id)
            at = store.database.now(session)
            if row is not None and _is_expired(row, at):
                _end_attempt(session, row, at, max_attempts, swept)
    return swept


def remove_useless_workspaces(store: JobStore, workspaces: Workspaces, *, failed_kept_s: float) -> list[str]:
    """Delete folders that no attempt will go on with: of jobs that ended well, long ago, or are unknown here."""
    return [
        job_id
        for job_id in _useless(store, workspaces.ids(), failed_kept_s)
        if workspaces.remove_if(job_id, partial(_is_useless, store, job_id, failed_kept_s))
    ]


def seen(store: JobStore, worker: str) -> None:
    """Note that a worker lives, and forget what is long past."""
    with store.database.write() as session:
        at = store.database.now(session)
        session.merge(WorkerRow(name=worker, seen_at=at))
        session.execute(delete(WorkerRow).where(WorkerRow.seen_at < at - WORKERS_KEPT))
        session.execute(delete(IdempotencyRow).where(IdempotencyRow.created_at < at - IDEMPOTENCY_KEYS_KEPT))


def gone(store: JobStore, worker: str) -> None:
    """Note that a worker has stopped, so that nobody waits for it."""
    with store.database.write() as session:
        session.execute(delete(WorkerRow).where(WorkerRow.name == worker))


def _is_useless(store: JobStore, job_id: str, failed_kept_s: float) -> bool:
    return bool(_useless(store, [job_id], failed_kept_s))


def _useless(store: JobStore, job_ids: list[str], failed_kept_s: float) -> list[str]:
    with store.database.read() as session:
        oldest = store.database.now(session) - timedelta(seconds=failed_kept_s)
        wanted = JobRow.state.in_(ALIVE) | ((JobRow.state == JobState.FAILED) & (JobRow.updated_at >= oldest))
        needed = set(session.scalars(select(JobRow.id).where(JobRow.id.in_(job_ids), wanted)))
    return [job_id for job_id in job_ids if job_id not in needed]


def _expired(store: JobStore) -> list[str]:
    with store.database.read() as session:
        at = store.database.now(session)
        query = select(JobRow.id).where(JobRow.state.in_(LEASED), JobRow.lease_expires_at < at)
        return list(session.scalars(query))


def _is_expired(row: JobRow, at: datetime) -> bool:
    return row.state in LEASED and row.lease_expires_at is not None and row.lease_expires_at < at


def _end_attempt(session: Session, row: JobRow, at: datetime, max_attempts: int, swept: Swept) -> None:
    row.losses += 1
    count(session, {(Counter.LEASES_EXPIRED, ""): 1})
    if row.state == JobState.CANCELLING:
        enter(session, row, JobState.CANCELED, at)
        swept.canceled.append(row.id)
    elif row.losses >= max_attempts:
        fail(session, row, _worker_lost(row.losses), at)
        swept.failed.append(row.id)
    else:
        enter(session, row, JobState.QUEUED, at, reason="worker_lost", losses=row.losses)
        swept.requeued.append(row.id)


def _worker_lost(losses: int) -> JobError:
    return JobError(
        ErrorCode.WORKER_LOST,
        f"The worker vanished in the middle of the job, or its conversion stood still, {losses} times.",
        "Retry the job; if it happens again, ask the operator whether the workers have enough memory.",
    )


class Sweeper(threading.Thread):
    """Calls a pass over and over until stopped; a pass that fails is logged and tried again.

    No fork happens during a pass: a child would inherit the pass's SQLite locks and broker sockets. So a pass
    must leave its connections closed.
    """

    def __init__(self, one_pass: Callable[[], None], *, every_s: float) -> None:
        super().__init__(name="sweeper", daemon=True)
        self._one_pass = one_pass
        self._every_s = every_s
        self._stopping = threading.Event()
        self._no_fork = threading.Lock()
        os.register_at_fork(
            before=self._no_fork.acquire,
            after_in_parent=self._no_fork.release,
            after_in_child=self._no_fork.release,
        )

    def run(self) -> None:
        while not self._stopping.is_set():
            with self._no_fork:
                self._guarded_pass()
            self._stopping.wait(self._every_s)

    def stop(self, wait_s: float = 5.0) -> None:
        self._stopping.set()
        if self.is_alive():  # a worker may be told to stop before it was ready
            self.join(wait_s)

    def _guarded_pass(self) -> None:
        try:
            self._one_pass()
        except AWAY as error:
            _log.warning("the database does not answer (%s); the next sweep comes in %s s", error.orig, self._every_s)
        except Exception:  # the edge of the thread: whatever it was may have passed by then
            _log.exception("a sweep failed; the next one comes in %s s", self._every_s)
