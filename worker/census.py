"""Counts over all tenants' jobs, for whoever operates the service. Reads only; must not know any one job."""

from dataclasses import dataclass

from sqlalchemy import func, select

from worker.counters import Counter, read
from worker.jobs import JobState
from worker.schema import LEASED, JobRow
from worker.store import JobStore


@dataclass(frozen=True)
class Census:
    """The store at one moment.

    jobs             by state; states without jobs count 0
    oldest_queued_s  how long the first of the queue has had its place there; 0 when nothing waits
    lease_expired    jobs that a worker holds whose lease has run out
    workers_alive    workers that were seen lately
    counted          what has happened so far, by counter and label
    """

    jobs: dict[JobState, int]
    oldest_queued_s: float
    lease_expired: int
    workers_alive: int
    counted: dict[Counter, dict[str, float]]


def take_census(store: JobStore, *, worker_seen_within_s: float) -> Census:
    """Four aggregate queries by way of the index on states, and one for the few rows of counters.

    Raises SQLAlchemyError.
    """
    oldest = select(func.min(JobRow.queued_at)).where(JobRow.state == JobState.QUEUED)
    with store.database.read() as session:
        at = store.database.now(session)
        expired = select(func.count()).where(JobRow.state.in_(LEASED), JobRow.lease_expires_at < at)
        queued_at, lease_expired = session.scalar(oldest), session.scalar(expired)
        counted = read(session)
    return Census(
        jobs=store.count_by_state(),
        oldest_queued_s=max(0.0, (at - queued_at).total_seconds()) if queued_at else 0.0,
        lease_expired=lease_expired or 0,
        workers_alive=store.live_workers(worker_seen_within_s),
        counted=counted,
    )
