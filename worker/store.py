"""The job store as those see it who ask for jobs: submit, read, cancel, retry. Every query names its tenant.

What a running job writes is in worker.leases. Must not import torch, the Hub's client or Celery.
"""

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, cast

from cryptography.fernet import MultiFernet
from sqlalchemy import ColumnElement, Table, bindparam, delete, func, insert, select
from sqlalchemy.orm import Session

from kvalign.config import ConversionConfig, Webhook
from kvalign.errors import ConfigInvalid, KvalignError
from worker.audit import AuditEntry, entries_of, note
from worker.database import Database
from worker.fairness import places_in_queue
from worker.jobs import (
    NO_ORIGIN,
    Job,
    JobError,
    JobEvent,
    JobResult,
    JobState,
    Origin,
    Progress,
    Stage,
)
from worker.outbox import Delivery, deliveries_of, keep_secret
from worker.schema import (
    ALIVE,
    EventRow,
    IdempotencyRow,
    JobRow,
    LabelRow,
    ReportFileRow,
    TokenRow,
    WebhookSecretRow,
    WorkerRow,
    is_alive,
)
from worker.secret_key import cipher_of
from worker.transitions import enter, locked

_BASE32 = "0123456789abcdefghjkmnpqrstvwxyz"  # in order of character code, so that ids sort by time


# Asked often, so made once: making a statement takes longer than asking it.
_COUNT_ALIVE = select(func.count()).where(JobRow.tenant == bindparam("tenant"), JobRow.state.in_(ALIVE))
_ALIVE_TWIN = select(JobRow).where(JobRow.identity == bindparam("identity"), is_alive)
_EVENTS = (
    select(EventRow)
    .where(EventRow.job_id == bindparam("job_id"), EventRow.sequence > bindparam("after"))
    .order_by(EventRow.sequence)
    .limit(bindparam("limit"))
)
_LAST_EVENTS = select(JobRow.id, JobRow.last_event).where(
    JobRow.id.in_(bindparam("ids", expanding=True)), JobRow.state.in_(ALIVE)
)
_IDS_A_QUERY = 1000  # drivers bound the parameters of a statement


class JobNotFound(KvalignError):
    """No such job of this tenant."""

    code = "job_not_found"


class JobNotRetryable(KvalignError):
    code = "job_not_retryable"


class IdempotencyConflict(KvalignError):
    """The key was used before, with another body."""

    code = "idempotency_conflict"


class QuotaExceeded(KvalignError):
    code = "quota_exceeded"


@dataclass(frozen=True)
class Submission:
    """`created` is False when an earlier request already led to this job.

    webhook_secret  one that was made for this job; it is not shown again
    """

    job: Job
    created: bool
    webhook_secret: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Page:
    jobs: list[Job]
    has_more: bool


class JobStore:
    """Jobs in SQL, and the tokens they act with.

    alive_limit  jobs one tenant may have queued and running together
    """

    def __init__(self, database: Database, cipher: MultiFernet, alive_limit: int) -> None:
        self.database = database
        self.cipher = cipher
        self._alive_limit = alive_limit

    @classmethod
    def open(cls, database_url: str, secret_key: str, *, alive_limit: int = 100) -> "JobStore":
        """Connect, and bring the tables up to date. Raises ConfigInvalid for a bad URL or key."""
        cipher = _cipher(secret_key)  # before a connection is made, which nobody would close
        return cls(Database.open(database_url), cipher, alive_limit)

    def close(self) -> None:
        """Close idle connections. The store stays usable and opens new ones when asked again."""
        self.database.close()

    def submit(
        self,
        tenant: str,
        config: ConversionConfig,
        *,
        source_commit: str,
        token: str,
        idempotency_key: str | None = None,
        origin: Origin = NO_ORIGIN,
    ) -> Submission:
        """Store a request as a queued job, or find the job that it already led to.

        A repeat of `idempotency_key` returns its job whatever became of it; so does the same conversion
        (source commit, target and settings; labels and webhook aside) while a job for it is alive. Bodies are compared
        without the webhook's secret.
        Raises IdempotencyConflict and QuotaExceeded.
        """
        body = config.model_dump(mode="json")
        identity = _identity(tenant, body, source_commit)
        with self.database.write(lock=f"tenant:{tenant}") as session:
            earlier = _earlier_answer(session, tenant, idempotency_key, body)
            row = earlier or _alive_twin(session, identity)
            created = row is None
            made = None
            at = self.database.now(session)
            if row is None:
                self._check_quota(session, tenant)
                row = _new_row(tenant, body, identity, source_commit, at)
                row.request_id, row.traceparent = origin.request_id, origin.traceparent
                enter(session, row, JobState.QUEUED, at)
                _insert_job(session, row)
                session.add_all(LabelRow(job_id=row.id, key=k, value=v) for k, v in config.labels.items())
                session.add(self._token_row(row.id, token))
                made = self._keep_webhook_secret(session, row.id, config.webhook)
                note(session, at, origin, "submit", "queued", tenant=tenant, job_id=row.id)
            if idempotency_key is not None and earlier is None:
                session.add(
                    IdempotencyRow(
                        tenant=tenant,
                        key=idempotency_key,
                        body_hash=_digest(body),
                        job_id=row.id,
                        created_at=at,
                    )
                )
            return Submission(job_of(row, config if created else None), created, made)

    def get(self, job_id: str, *, tenant: str) -> Job:
        """Raises JobNotFound, for another tenant's job too."""
        with self.database.read() as session:
            return job_of(_own_row(session, job_id, tenant))

    def find(
        self,
        *,
        tenant: str,
        state: JobState | None = None,
        label: str | None = None,
        limit: int = 20,
        after: str | None = None,
    ) -> Page:
        """A tenant's jobs, newest first.

        label  "key" for any value, or "key=value"
        after  the id of the last job of the page before
        """
        wanted = [JobRow.tenant == tenant]
        if state is not None:
            wanted.append(JobRow.state == state)
        if label is not None:
            wanted.append(_has_label(label))
        if after is not None:
            wanted.append(JobRow.id < after)
        query = select(JobRow).where(*wanted).order_by(JobRow.id.desc()).limit(limit + 1)
        with self.database.read() as session:
            rows = session.scalars(query).all()
        return Page([job_of(row) for row in rows[:limit]], has_more=len(rows) > limit)

    def events(self, job_id: str, *, tenant: str, after: int = 0, limit: int = 500) -> list[JobEvent]:
        """What happened after event number `after`, oldest first. Raises JobNotFound."""
        return self.follow(job_id, tenant=tenant, after=after, limit=limit)[0]

    def follow(self, job_id: str, *, tenant: str, after: int, limit: int) -> tuple[list[JobEvent], bool]:
        """As events(), and whether the job may get more of them than these and those stored behind them."""
        wanted = {"job_id": job_id, "after": after, "limit": limit}
        with self.database.read() as session:
            # The state first: when it is final already, the events read after it are the last ones.
            alive = JobState(_own_row(session, job_id, tenant).state).alive
            return [_event_of(row) for row in session.scalars(_EVENTS, wanted)], alive

    def newest_event(self, job_id: str, kind: str, *, tenant: str) -> JobEvent | None:
        """The last event of a kind. Raises JobNotFound."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.kind == kind)
        with self.database.read() as session:
            _own_row(session, job_id, tenant)
            row = session.scalar(query.order_by(EventRow.sequence.desc()).limit(1))
            return _event_of(row) if row is not None else None

    def last_events(self, job_ids: Collection[str]) -> dict[str, int]:
        """The number of the newest event of each job that has not ended, of any tenant: for those who were let in."""
        ids = list(job_ids)
        found: dict[str, int] = {}
        with self.database.read() as session:
            for start in range(0, len(ids), _IDS_A_QUERY):
                some = {"ids": ids[start : start + _IDS_A_QUERY]}
                found |= dict(session.execute(_LAST_EVENTS, some).all())
        return found

    def request_cancel(self, job_id: str, *, tenant: str, origin: Origin = NO_ORIGIN) -> Job:
        """A queued job is canceled at once, a running one asked to stop; an ended one stays as it is."""
        with self.database.write() as session:
            row = _own_row(session, job_id, tenant, lock=True)
            at = self.database.now(session)
            if row.state == JobState.QUEUED:
                enter(session, row, JobState.CANCELED, at)
            elif row.state == JobState.RUNNING:
                enter(session, row, JobState.CANCELLING, at)
            note(session, at, origin, "cancel", row.state, tenant=tenant, job_id=job_id)
            return job_of(row)

    def retry(self, job_id: str, *, tenant: str, token: str, origin: Origin = NO_ORIGIN) -> Job:
        """Queue a failed or canceled job again. Raises JobNotRetryable, QuotaExceeded."""
        with self.database.write(lock=f"tenant:{tenant}") as session:
            row = _own_row(session, job_id, tenant, lock=True)
            _check_retryable(session, row)
            self._check_quota(session, tenant)
            at = self.database.now(session)
            row.queued_at = at
            row.request_id, row.traceparent = origin.request_id, origin.traceparent
            row.losses = 0
            row.error = None
            row.stage, row.done, row.total, row.unit = None, 0, 0, ""
            session.merge(self._token_row(row.id, token))
            enter(session, row, JobState.QUEUED, at, retried=True)
            note(session, at, origin, "retry", "queued", tenant=tenant, job_id=job_id)
            return job_of(row)

    def set_webhook(
        self, job_id: str, webhook: Webhook | None, *, tenant: str, origin: Origin = NO_ORIGIN
    ) -> tuple[Job, str | None]:
        """Tell another address of what happens from now on, or none; messages that wait follow.

        Returns the job, and the secret if one was made. Raises JobNotFound.
        """
        with self.database.write() as session:
            row = _own_row(session, job_id, tenant, lock=True)
            row.config = {**row.config, "webhook": webhook.model_dump(mode="json") if webhook else None}
            if webhook is None:
                session.execute(delete(WebhookSecretRow).where(WebhookSecretRow.job_id == job_id))
            outcome = "set" if webhook else "removed"
            note(session, self.database.now(session), origin, "webhook", outcome, tenant=tenant, job_id=job_id)
            return job_of(row), self._keep_webhook_secret(session, job_id, webhook)

    def deliveries(self, job_id: str, *, tenant: str, after: int | None = None, limit: int = 20) -> list[Delivery]:
        """Messages to the job's webhook, newest first; `after` is a sequence. Raises JobNotFound."""
        with self.database.read() as session:
            _own_row(session, job_id, tenant)
            return deliveries_of(session, job_id, after=after, limit=limit)

    def note(self, origin: Origin, action: str, outcome: str, *, tenant: str | None, job_id: str | None = None) -> None:
        """Add to the audit log what changed nothing else, such as a refusal."""
        with self.database.write() as session:
            note(session, self.database.now(session), origin, action, outcome, tenant=tenant, job_id=job_id)

    def audit(self, *, tenant: str, after: int | None = None, limit: int = 20) -> list[AuditEntry]:
        """What was done in a tenant's name, newest first; `after` is an entry's id."""
        with self.database.read() as session:
            return entries_of(session, tenant, after=after, limit=limit)

    def places_in_queue(self, job_ids: Collection[str]) -> dict[str, int]:
        """1 = next; jobs that do not wait are left out. See worker.fairness."""
        if not job_ids:
            return {}
        with self.database.read() as session:
            return places_in_queue(session, job_ids)

    def place_in_queue(self, job_id: str) -> int | None:
        return self.places_in_queue([job_id]).get(job_id)

    def report_file(self, job_id: str, name: str, *, tenant: str) -> bytes:
        """Raises JobNotFound when the job, or that file of it, is not there."""
        with self.database.read() as session:
            _own_row(session, job_id, tenant)
            row = session.get(ReportFileRow, (job_id, name))
            if row is None:
                raise JobNotFound(
                    f"Job {job_id} has no report file '{name[:200]}'.", "See which files it has at /report."
                )
            return row.content

    def report_files(self, job_id: str, *, tenant: str) -> list[str]:
        query = select(ReportFileRow.name).where(ReportFileRow.job_id == job_id).order_by(ReportFileRow.name)
        with self.database.read() as session:
            _own_row(session, job_id, tenant)
            return list(session.scalars(query))

    def count_by_state(self) -> dict[JobState, int]:
        """Jobs of all tenants, for the operator's metrics; states without jobs count 0."""
        with self.database.read() as session:
            counted = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        return dict.fromkeys(JobState, 0) | {JobState(state): count for state, count in counted}

    def live_workers(self, within_s: float) -> int:
        """Workers that were seen in the last `within_s` seconds."""
        with self.database.read() as session:
            oldest = self.database.now(session) - timedelta(seconds=within_s)
            return session.scalar(select(func.count()).where(WorkerRow.seen_at >= oldest)) or 0

    def now(self) -> datetime:
        """The time that every moment in the store is told by, whatever this machine's clock says."""
        with self.database.read() as session:
            return self.database.now(session)

    def ping(self) -> None:
        """Raises what the database driver raises when it does not answer."""
        with self.database.read() as session:
            session.execute(select(1))

    def earlier(
        self, tenant: str, config: ConversionConfig, *, source_commit: str | None, idempotency_key: str | None
    ) -> Job | None:
        """The job that submit would find instead of storing a new one; None when it would store one.

        source_commit  None while it is not known: only the key is looked at
        Raises IdempotencyConflict.
        """
        body = config.model_dump(mode="json")
        with self.database.read() as session:
            row = _earlier_answer(session, tenant, idempotency_key, body)
            if row is None and source_commit is not None:
                row = _alive_twin(session, _identity(tenant, body, source_commit))
            return job_of(row) if row is not None else None

    def _check_quota(self, session: Session, tenant: str) -> None:
        alive = session.scalar(_COUNT_ALIVE, {"tenant": tenant})
        if (alive or 0) >= self._alive_limit:
            raise QuotaExceeded(
                f"You have {alive} jobs queued or running; the limit is {self._alive_limit}.",
                "Wait for one to end, or cancel one.",
            )

    def _token_row(self, job_id: str, token: str) -> TokenRow:
        return TokenRow(job_id=job_id, ciphertext=self.cipher.encrypt(token.encode()).decode())

    def _keep_webhook_secret(self, session: Session, job_id: str, webhook: Webhook | None) -> str | None:
        """The secret if it had to be made."""
        if webhook is None:
            return None
        if webhook.secret is not None:
            keep_secret(session, self.cipher, job_id, webhook.secret.get_secret_value())
            return None
        made = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
        keep_secret(session, self.cipher, job_id, made)
        return made


def job_of(row: JobRow, config: ConversionConfig | None = None) -> Job:
    """The record of a row, as everyone outside SQL knows it. `config` is the row's, where it is at hand already."""
    return Job(
        id=row.id,
        tenant=row.tenant,
        state=JobState(row.state),
        config=config or ConversionConfig.model_validate(row.config),
        source_commit=row.source_commit,
        created_at=row.created_at,
        updated_at=row.updated_at,
        progress=Progress(Stage(row.stage), row.done, row.total, row.unit) if row.stage else None,
        attempts=row.attempts,
        stage_seconds=dict(row.stage_seconds),
        timestamps={state: datetime.fromisoformat(at) for state, at in row.timestamps.items()},
        error=JobError(**row.error) if row.error else None,
        result=JobResult(**row.result) if row.result else None,
        origin=Origin(row.request_id, traceparent=row.traceparent),
    )


def _event_of(row: EventRow) -> JobEvent:
    return JobEvent(row.job_id, row.sequence, row.kind, row.at, row.data)


def _cipher(secret_key: str) -> MultiFernet:
    try:
        return cipher_of(secret_key)
    except ValueError:
        raise ConfigInvalid(
            "The secret key is not 32 bytes in URL-safe base64.",
            "Make one with cryptography.fernet.Fernet.generate_key().",
        ) from None


def _identity(tenant: str, body: dict[str, Any], source_commit: str) -> str:
    """What makes two requests the same conversion; a branch counts by the commit it points to."""
    same = {key: value for key, value in body.items() if key not in {"labels", "webhook"}}
    if source_commit:
        same["source"] = {"repo": body["source"]["repo"], "commit": source_commit}
    return _digest([tenant, same])


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _earlier_answer(session: Session, tenant: str, key: str | None, body: dict[str, Any]) -> JobRow | None:
    if key is None:
        return None
    used = session.get(IdempotencyRow, (tenant, key))
    if used is None:
        return None
    if used.body_hash != _digest(body):
        raise IdempotencyConflict(
            f"This Idempotency-Key was used for job {used.job_id}, with another body.",
            "Send a new key with a new request.",
        )
    return session.get_one(JobRow, used.job_id)


def _alive_twin(session: Session, identity: str) -> JobRow | None:
    return session.scalar(_ALIVE_TWIN, {"identity": identity})


def _new_row(tenant: str, body: dict[str, Any], identity: str, source_commit: str, at: datetime) -> JobRow:
    return JobRow(
        id=new_job_id(time.time_ns()),
        tenant=tenant,
        state=JobState.QUEUED,
        config=body,
        identity=identity,
        source_commit=source_commit,
        created_at=at,
        updated_at=at,
        queued_at=at,
        done=0,
        total=0,
        unit="",
        stage_seconds={},
        timestamps={},
        attempts=0,
        losses=0,
        fencing=0,
        last_event=0,
        log_events=0,
        target_begun=False,
    )


def _insert_job(session: Session, row: JobRow) -> None:
    """One statement for the job as it stands, before the flush that writes what refers to it."""
    table = cast(Table, JobRow.__table__)
    session.connection().execute(insert(table), {name: getattr(row, name) for name in table.c.keys()})  # noqa: SIM118 - no mapping


def new_job_id(time_ns: int) -> str:
    """48 bits of milliseconds, then 80 random ones: sorts by time, cannot be guessed."""
    number = (time_ns // 1_000_000 << 80) | secrets.randbits(80)
    return "job_" + "".join(_BASE32[number >> shift & 31] for shift in range(125, -1, -5))


def _own_row(session: Session, job_id: str, tenant: str, *, lock: bool = False) -> JobRow:
    row = locked(session, job_id) if lock else session.get(JobRow, job_id)
    if row is None or row.tenant != tenant:
        raise JobNotFound(f"There is no job '{job_id[:60]}' of yours.", "Check the id.")
    return row


def _has_label(label: str) -> ColumnElement[bool]:
    key, equals, value = label.partition("=")
    wanted = [LabelRow.job_id == JobRow.id, LabelRow.key == key]
    if equals:
        wanted.append(LabelRow.value == value)
    return select(LabelRow.job_id).where(*wanted).exists()


def _check_retryable(session: Session, row: JobRow) -> None:
    if row.state not in {JobState.FAILED, JobState.CANCELED}:
        raise JobNotRetryable(f"Job {row.id} is {row.state}.", "Only a failed or canceled job can be retried.")
    twin = _alive_twin(session, row.identity)
    if twin is not None:
        raise JobNotRetryable(f"Job {twin.id} is already doing the same conversion.", "Follow that one.")
