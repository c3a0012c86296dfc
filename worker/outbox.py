"""Messages to webhooks: written in the transaction that changes a job, taken and settled by those who send them.

Any number of senders may work at once. Taking a delivery counts its attempt up and puts it off beyond the length of
any attempt; a sender that dies leaves it to be taken again then, so each arrives at least once or is given up.
Must not send anything, and must not know HTTP.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, cast

from cryptography.fernet import InvalidToken, MultiFernet
from sqlalchemy import CursorResult, func, literal_column, select, update
from sqlalchemy.orm import Session

from kvalign.config import Webhook
from worker.database import Database
from worker.schema import DeliveryRow, JobRow, WebhookSecretRow

LEASE_S = 120.0
PENDING, DELIVERED, FAILED = "pending", "delivered", "failed"
DeliveryState = Literal["pending", "delivered", "failed"]


@dataclass(frozen=True)
class Taken:
    """One attempt at a delivery.

    at       the database's time, which the signature names
    webhook  as the job has it now; None once it was removed
    secret   None when it cannot be read
    """

    job_id: str
    sequence: int
    tenant: str
    attempt: int
    at: datetime
    payload: str
    webhook: Webhook | None
    secret: str | None = field(repr=False)

    @property
    def id(self) -> str:
        return message_id(self.job_id, self.sequence)


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt.

    status  the receiver's, where it gave one
    error   why it does not count as delivered; empty when it does
    final   whether another attempt would be in vain
    """

    status: int | None = None
    error: str = ""
    final: bool = False


@dataclass(frozen=True)
class Delivery:
    """One message to a job's webhook, as its owner sees it.

    next_at  when it is sent (again); None once it was delivered or given up
    log      one entry for each attempt that came to an end: attempt, at, status, error
    """

    job_id: str
    sequence: int
    type: str
    state: DeliveryState
    created_at: datetime
    next_at: datetime | None
    log: list[dict[str, Any]]

    @property
    def id(self) -> str:
        return message_id(self.job_id, self.sequence)


def message_id(job_id: str, sequence: int) -> str:
    """What a receiver sees as webhook-id: the same in every attempt, and no other message's."""
    return f"msg_{job_id.removeprefix('job_')}_{sequence}"


def tell(session: Session, row: JobRow, at: datetime) -> None:
    """Write the message about the state that a job has just entered, if its webhook wants it."""
    webhook = row.config.get("webhook")
    kind = f"job.{row.state}"
    if webhook is None or kind not in webhook["events"]:
        return
    session.add(
        DeliveryRow(
            job_id=row.id,
            sequence=row.last_event,
            tenant=row.tenant,
            type=kind,
            payload=json.dumps({"type": kind, "timestamp": at.isoformat(), "data": _about(row)}),
            state=PENDING,
            attempts=0,
            created_at=at,
            next_at=at,
            log=[],
        )
    )


def keep_secret(session: Session, cipher: MultiFernet, job_id: str, secret: str) -> None:
    session.merge(WebhookSecretRow(job_id=job_id, ciphertext=cipher.encrypt(secret.encode()).decode()))


def read_secret(session: Session, cipher: MultiFernet, job_id: str) -> str | None:
    """None when there is none, or it was encrypted with another key."""
    row = session.get(WebhookSecretRow, job_id)
    try:
        return cipher.decrypt(row.ciphertext).decode() if row else None
    except InvalidToken:
        return None


def deliveries_of(session: Session, job_id: str, *, after: int | None, limit: int) -> list[Delivery]:
    """Of one job, the newest first; `after` is the sequence of the last one of the page before."""
    query = select(DeliveryRow).where(DeliveryRow.job_id == job_id)
    if after is not None:
        query = query.where(DeliveryRow.sequence < after)
    rows = session.scalars(query.order_by(DeliveryRow.sequence.desc()).limit(limit))
    return [
        Delivery(
            job_id=row.job_id,
            sequence=row.sequence,
            type=row.type,
            state=cast(DeliveryState, row.state),
            created_at=row.created_at,
            next_at=row.next_at if row.state == PENDING else None,
            log=row.log,
        )
        for row in rows
    ]


class Outbox:
    """The deliveries that wait, for those who send them."""

    def __init__(self, database: Database, cipher: MultiFernet) -> None:
        self._database = database
        self._cipher = cipher

    def take(self, limit: int, *, per_tenant: int, busy: Collection[str] = ()) -> list[Taken]:
        """Up to `limit` deliveries whose time has come, `per_tenant` at most of one tenant and none of busy ones."""
        due = self._due(limit, per_tenant, busy)
        if not due:
            return []
        with self._database.write() as session:
            at = self._database.now(session)
            mine = [
                (job_id, sequence) for job_id, sequence, seen in due if _count_up(session, job_id, sequence, seen, at)
            ]
            return [self._taken(session, job_id, sequence, at) for job_id, sequence in mine]

    def settle(self, taken: Taken, outcome: Outcome, pauses_s: Sequence[float]) -> None:
        """Note what came of an attempt. pauses_s has one pause for each further attempt."""
        with self._database.write() as session:
            row = session.get(DeliveryRow, (taken.job_id, taken.sequence), with_for_update=True)
            if row is None or row.attempts != taken.attempt or row.state != PENDING:
                return  # its job is gone, or a later attempt has it
            at = self._database.now(session)
            entry = {"attempt": taken.attempt, "at": at.isoformat(), "status": outcome.status, "error": outcome.error}
            row.log = [*row.log, entry]
            if not outcome.error:
                row.state = DELIVERED
            elif outcome.final or taken.attempt > len(pauses_s):
                row.state = FAILED
            else:
                row.next_at = at + timedelta(seconds=pauses_s[taken.attempt - 1])

    def _due(self, limit: int, per_tenant: int, busy: Collection[str]) -> list[tuple[str, int, int]]:
        """Job, sequence and attempts so far, the longest due first. One look-up in the index of pending ones."""
        turn = func.row_number().over(partition_by=DeliveryRow.tenant, order_by=DeliveryRow.next_at)
        with self._database.read() as session:
            waiting = (
                select(
                    DeliveryRow.job_id,
                    DeliveryRow.sequence,
                    DeliveryRow.attempts,
                    DeliveryRow.next_at,
                    turn.label("turn"),
                )
                .where(_is_pending, DeliveryRow.next_at <= self._database.now(session))
                .where(DeliveryRow.tenant.not_in(busy))
                .subquery()
            )
            columns = (waiting.c.job_id, waiting.c.sequence, waiting.c.attempts)
            query = select(*columns).where(waiting.c.turn <= per_tenant).order_by(waiting.c.next_at).limit(limit)
            return [(job_id, sequence, attempts) for job_id, sequence, attempts in session.execute(query)]

    def _taken(self, session: Session, job_id: str, sequence: int, at: datetime) -> Taken:
        row = session.get_one(DeliveryRow, (job_id, sequence))
        webhook = session.get_one(JobRow, job_id).config.get("webhook")
        return Taken(
            job_id=job_id,
            sequence=sequence,
            tenant=row.tenant,
            attempt=row.attempts,
            at=at,
            payload=row.payload,
            webhook=Webhook.model_validate(webhook) if webhook else None,
            secret=read_secret(session, self._cipher, job_id),
        )


# Spelt out, since an index of some rows is used only where the query says the same words.
_is_pending = DeliveryRow.state == literal_column(f"'{PENDING}'")


def _count_up(session: Session, job_id: str, sequence: int, seen: int, at: datetime) -> bool:
    """Whether this sender has the attempt: no other took it since it was seen."""
    mine = (DeliveryRow.job_id == job_id, DeliveryRow.sequence == sequence, DeliveryRow.attempts == seen, _is_pending)
    later = at + timedelta(seconds=LEASE_S)
    done = session.execute(update(DeliveryRow).where(*mine).values(attempts=seen + 1, next_at=later))
    return cast(CursorResult[Any], done).rowcount == 1


def _about(row: JobRow) -> dict[str, Any]:
    """What a receiver needs to act: the job as it is at that moment, without its settings."""
    return {
        "id": row.id,
        "state": row.state,
        "sequence": row.last_event,
        "source": {"repo": row.config["source"]["repo"], "commit": row.source_commit},
        "target": {"repo": row.config["target"]["repo"]},
        "labels": row.config["labels"],
        "attempts": row.attempts,
        "error": row.error,
        "result": row.result,
    }
