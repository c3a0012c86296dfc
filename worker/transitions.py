"""How a job's row changes state and gains events: the one place for both. Must not begin transactions.

Callers hold the row's lock (see locked), so that `last_event` grows by one for each event, without gaps.

    queued --> running --> succeeded | failed
      |           `--> cancelling --> canceled
      `--> canceled
    running --> queued            handed back, or its worker vanished
    failed | canceled --> queued  retried
"""

from dataclasses import asdict
from datetime import datetime
from typing import Any

from sqlalchemy import delete
from sqlalchemy.orm import Session

from worker.counters import Counter, count
from worker.jobs import JobError, JobState
from worker.outbox import tell
from worker.schema import EventRow, JobRow, TokenRow


def locked(session: Session, job_id: str) -> JobRow | None:
    """The job's row, kept from other writers until the transaction ends."""
    return session.get(JobRow, job_id, with_for_update=True)


def enter(session: Session, row: JobRow, state: JobState, at: datetime, **details: Any) -> None:
    """Change state, with the event and the webhook's message that tell of it.

    A job that has ended keeps no lease and no token.
    """
    row.state = state
    row.updated_at = at
    row.timestamps = {**row.timestamps, state.value: row.timestamps.get(state.value, at.isoformat())}
    if state not in {JobState.RUNNING, JobState.CANCELLING}:
        row.lease_owner = None
        row.lease_expires_at = None
    if not state.alive:
        session.execute(delete(TokenRow).where(TokenRow.job_id == row.id))
    add_event(session, row, "state", at, {"state": state.value, **details})
    tell(session, row, at)
    if not state.alive:
        failed = state == JobState.FAILED and row.error
        count(session, {(Counter.JOBS_ENDED, row.error["code"] if failed and row.error else state.value): 1})


def fail(session: Session, row: JobRow, error: JobError, at: datetime) -> None:
    row.error = asdict(error)
    enter(session, row, JobState.FAILED, at, error=row.error)


def add_event(session: Session, row: JobRow, kind: str, at: datetime, data: dict[str, Any]) -> None:
    row.last_event += 1
    session.add(EventRow(job_id=row.id, sequence=row.last_event, kind=kind, at=at, data=data))
