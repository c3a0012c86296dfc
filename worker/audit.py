"""The log of who did what: entries written in the transaction of the act, and read by the tenant they are about.

An entry outlives its job. Must not hold a token, a body or a reason in free text: outcomes are words of ours.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from worker.jobs import Origin
from worker.schema import AuditRow

ADDRESS_CHARACTERS = 64


@dataclass(frozen=True)
class AuditEntry:
    """One act. `outcome` is what came of it, or the code of the error that it was refused with."""

    id: int
    at: datetime
    action: str
    outcome: str
    job_id: str | None
    request_id: str
    address: str


def note(
    session: Session,
    at: datetime,
    origin: Origin,
    action: str,
    outcome: str,
    *,
    tenant: str | None,
    job_id: str | None = None,
) -> None:
    """Write an entry in the caller's transaction. tenant is None when nobody could be told."""
    session.add(
        AuditRow(
            at=at,
            tenant=tenant,
            action=action,
            outcome=outcome,
            job_id=job_id,
            request_id=origin.request_id,
            address=origin.address[:ADDRESS_CHARACTERS],
        )
    )


def entries_of(session: Session, tenant: str, *, after: int | None, limit: int) -> list[AuditEntry]:
    """A tenant's own, newest first; `after` is the id of the last one of the page before."""
    query = select(AuditRow).where(AuditRow.tenant == tenant)
    if after is not None:
        query = query.where(AuditRow.id < after)
    return [
        AuditEntry(row.id, row.at, row.action, row.outcome, row.job_id, row.request_id, row.address)
        for row in session.scalars(query.order_by(AuditRow.id.desc()).limit(limit))
    ]
