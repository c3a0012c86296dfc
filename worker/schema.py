"""The tables of the job store. Must hold no behaviour: rules live in store.py, leases.py and sweeper.py.

jobs              one row a job: the truth about it
job_labels        its labels, for filtering
job_events        what happened to it, in order
job_tokens        the Hub token it acts with, encrypted; the row is gone once the job has ended
report_files      its report card, kept after the workspace is gone
idempotency_keys  which job a client's key led to
workers           when each worker process was last seen
audit             who did what, and what came of it
webhook_secrets   what deliveries of a job are signed with, encrypted
webhook_deliveries  what a job's webhook is to be told, and what came of it
counters          what has happened so far, in numbers, for whoever operates the service
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

ALIVE = ("queued", "running", "cancelling")
LEASED = ("running", "cancelling")

is_alive = text("state IN ('queued', 'running', 'cancelling')")
_is_pending = text("state = 'pending'")
has_ended = text("state IN ('succeeded', 'failed', 'canceled')")
"""Spelt out, since an index of some rows is used only where the query says the same words."""


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, aware and in UTC on both sides; SQLite itself knows no time zones."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a moment without a time zone cannot be stored")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Word(TypeDecorator[str]):
    """A string; a NUL, which PostgreSQL refuses, is stored and asked for as U+FFFD."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value).replace("\0", "\ufffd")


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        list[dict[str, Any]]: JSON,
        str: Word(200),
    }


class JobRow(Base):
    """One job.

    identity    hash of everything that makes two requests the same conversion
    queued_at   when it took its place in the queue; a hand-back keeps the place
    fencing     grows by one with every claim; a write that names an older one is refused
    losses      attempts whose worker vanished, since the job was last submitted or retried
    last_event  sequence of the newest event
    log_events  how many log events are stored
    target_begun  whether this job was about to make its target repo, or has
    request_id, traceparent  of the request that last queued it
    """

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_queue", "state", "tenant", "queued_at", "id"),
        Index("ix_jobs_tenant_id", "tenant", "id"),
        Index("ix_jobs_tenant_state_id", "tenant", "state", "id"),
        Index("ix_jobs_tenant_claimed_at", "tenant", "claimed_at"),
        Index("ix_jobs_ended_updated_at", "updated_at", sqlite_where=has_ended, postgresql_where=has_ended),
        Index("uq_jobs_one_alive", "identity", unique=True, sqlite_where=is_alive, postgresql_where=is_alive),
    )

    id: Mapped[str] = mapped_column(Word(40), primary_key=True)
    tenant: Mapped[str]
    state: Mapped[str] = mapped_column(Word(20))
    config: Mapped[dict[str, Any]]
    identity: Mapped[str] = mapped_column(Word(64))
    source_commit: Mapped[str]
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    queued_at: Mapped[datetime]
    claimed_at: Mapped[datetime | None]

    stage: Mapped[str | None] = mapped_column(Word(20))
    done: Mapped[int] = mapped_column(BigInteger, default=0)
    total: Mapped[int] = mapped_column(BigInteger, default=0)
    unit: Mapped[str] = mapped_column(Word(60), default="")
    stage_seconds: Mapped[dict[str, Any]] = mapped_column(default=dict)
    timestamps: Mapped[dict[str, Any]] = mapped_column(default=dict)
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))

    attempts: Mapped[int] = mapped_column(default=0)
    losses: Mapped[int] = mapped_column(default=0)
    fencing: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    last_event: Mapped[int] = mapped_column(default=0)
    log_events: Mapped[int] = mapped_column(default=0)
    target_begun: Mapped[bool] = mapped_column(default=False)
    request_id: Mapped[str] = mapped_column(Word(128), default="", server_default="")
    traceparent: Mapped[str] = mapped_column(Word(64), default="", server_default="")


class LabelRow(Base):
    __tablename__ = "job_labels"
    __table_args__ = (Index("ix_job_labels_key_value", "key", "value"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(Word(64), primary_key=True)
    value: Mapped[str]


class EventRow(Base):
    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(Word(20))
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]


class TokenRow(Base):
    __tablename__ = "job_tokens"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    ciphertext: Mapped[str] = mapped_column(Text)


class ReportFileRow(Base):
    __tablename__ = "report_files"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    content: Mapped[bytes] = mapped_column(LargeBinary)


class IdempotencyRow(Base):
    __tablename__ = "idempotency_keys"
    __table_args__ = (
        Index("ix_idempotency_keys_created_at", "created_at"),
        Index("ix_idempotency_keys_job_id", "job_id"),  # else each job that is forgotten costs a look at every key
    )

    tenant: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_hash: Mapped[str] = mapped_column(Word(64))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    created_at: Mapped[datetime]


class WorkerRow(Base):
    __tablename__ = "workers"

    name: Mapped[str] = mapped_column(primary_key=True)
    seen_at: Mapped[datetime]


class AuditRow(Base):
    """One act. It outlives its job, so job_id refers to no table; tenant is null when nobody could be told."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_tenant_id", "tenant", "id"), Index("ix_audit_at", "at"))

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer(), "sqlite"), primary_key=True)
    at: Mapped[datetime]
    tenant: Mapped[str | None]
    action: Mapped[str] = mapped_column(Word(20))
    outcome: Mapped[str] = mapped_column(Word(60))
    job_id: Mapped[str | None] = mapped_column(Word(64))
    request_id: Mapped[str] = mapped_column(Word(128))
    address: Mapped[str] = mapped_column(Word(64))


class WebhookSecretRow(Base):
    """Outlives the end of the job, which its last deliveries are about."""

    __tablename__ = "webhook_secrets"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    ciphertext: Mapped[str] = mapped_column(Text)


class DeliveryRow(Base):
    """One message to a job's webhook, about the event with its sequence.

    payload   the very bytes that are signed and sent
    state     pending, delivered or failed
    attempts  how often a sender has taken it
    next_at   when it may be taken again
    log       one entry for each attempt that came to an end
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("ix_webhook_deliveries_due", "next_at", sqlite_where=_is_pending, postgresql_where=_is_pending),
    )

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    sequence: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    type: Mapped[str] = mapped_column(Word(20))
    payload: Mapped[str] = mapped_column(Text)
    state: Mapped[str] = mapped_column(Word(20))
    attempts: Mapped[int]
    created_at: Mapped[datetime]
    next_at: Mapped[datetime]
    log: Mapped[list[dict[str, Any]]]


class CounterRow(Base):
    """A number that only grows; see worker.counters for the names."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(Word(64), primary_key=True)
    label: Mapped[str] = mapped_column(Word(64), primary_key=True)
    value: Mapped[float] = mapped_column(Double)
