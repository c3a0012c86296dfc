"""How a worker takes a job, holds it, writes its progress and gives it up. Must not decide what is done for it.

A claim counts the job's fencing token up. Every later write names that token and is refused with LeaseLost
once the row carries another one, or is no longer leased: a worker that slept through its lease harms nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta

from cryptography.fernet import InvalidToken
from sqlalchemy.orm import Session

from kvalign.errors import KvalignError
from worker.counters import Counter, count
from worker.fairness import next_jobs
from worker.jobs import Job, JobError, JobResult, JobState, Progress, Stage
from worker.schema import LEASED, JobRow, ReportFileRow, TokenRow
from worker.store import JobStore, job_of
from worker.transitions import add_event, enter, fail, locked


class LeaseLost(KvalignError):
    """This worker does not hold the job any more; what it does for it must stop, unrecorded."""


class Leases:
    """Hands out queued jobs, fairly among tenants.

    lease_s        seconds a worker may be silent before its job is given to another
    running_limit  jobs of one tenant that may run at once
    """

    def __init__(self, store: JobStore, *, lease_s: float, running_limit: int) -> None:
        self._store = store
        self._lease_s = lease_s
        self._running_limit = running_limit

    def claim(self, owner: str) -> "Lease | None":
        """Take the job whose turn it is; None when nothing may run now."""
        database = self._store.database
        with database.write(lock="claim") as session:
            head = next_jobs(session, running_limit=self._running_limit, limit=1)
            row = locked(session, head[0]) if head else None
            if row is None or row.state != JobState.QUEUED:  # canceled between the look and the lock
                return None
            at = database.now(session)
            row.fencing += 1
            row.attempts += 1
            row.claimed_at = at
            row.lease_owner = owner
            row.lease_expires_at = at + timedelta(seconds=self._lease_s)
            enter(session, row, JobState.RUNNING, at, attempt=row.attempts)
            count(session, {(Counter.ATTEMPTS, ""): 1})
            return Lease(self._store, job_of(row), row.fencing, self._lease_s)

    def waiting(self, limit: int) -> list[str]:
        """Ids of up to `limit` queued jobs that may run now, in the order of their turns."""
        with self._store.database.read() as session:
            return next_jobs(session, running_limit=self._running_limit, limit=limit)


class Lease:
    """One attempt at a job. Every method raises LeaseLost when another attempt, or none, holds the job.

    job      the job as it was claimed
    fencing  the token that names this attempt
    """

    def __init__(self, store: JobStore, job: Job, fencing: int, lease_s: float) -> None:
        self.job = job
        self.fencing = fencing
        self.lease_s = lease_s
        self._store = store
        self._database = store.database

    def state(self) -> JobState:
        """RUNNING, or CANCELLING once the owner asked for it."""
        with self._database.read() as session:
            row = session.get(JobRow, self.job.id)
            return JobState(self._held(row).state)

    def renew(self) -> None:
        with self._writing() as (_, row, at):
            row.lease_expires_at = at + timedelta(seconds=self.lease_s)

    def token(self) -> str:
        """The owner's Hub token. Read it just before use; never log it, store it or put it on a command line."""
        with self._database.read() as session:
            self._held(session.get(JobRow, self.job.id))
            row = session.get(TokenRow, self.job.id)
        if row is None:
            raise KvalignError("The job's Hub token is gone.", "Retry the job, which stores a new one.")
        try:
            return self._store.cipher.decrypt(row.ciphertext).decode()
        except InvalidToken:
            raise KvalignError(
                "The job's Hub token cannot be decrypted: API and workers have different secret keys.",
                "Give every process the same KVALIGN_SECRET_KEY, then retry the job.",
            ) from None

    def progress(self, progress: Progress, *, tell: bool, moved_bytes: int = 0) -> None:
        """Note how far the stage is; with `tell`, as an event too.

        moved_bytes  that went over the network since the last such note
        """
        with self._writing() as (session, row, at):
            row.stage, row.done, row.total = progress.stage, progress.done, progress.total
            row.unit = progress.unit
            row.updated_at = at
            if tell:
                data = {**asdict(progress), "percent": progress.percent}
                add_event(session, row, "progress", at, data)
            if moved_bytes:
                way = Counter.BYTES_UPLOADED if progress.stage == Stage.PUBLISH else Counter.BYTES_DOWNLOADED
                count(session, {(way, ""): moved_bytes})

    def stage_started(self, stage: Stage) -> None:
        with self._writing() as (session, row, at):
            row.stage, row.done, row.total, row.unit = stage, 0, 0, ""
            row.updated_at = at
            add_event(session, row, "stage", at, {"stage": stage.value, "status": "started"})

    def stage_finished(self, stage: Stage, seconds: float) -> None:
        with self._writing() as (session, row, at):
            spent = row.stage_seconds.get(stage.value, 0.0) + seconds
            row.stage_seconds = {**row.stage_seconds, stage.value: round(spent, 3)}
            row.updated_at = at
            data = {"stage": stage.value, "status": "finished", "seconds": round(seconds, 3)}
            add_event(session, row, "stage", at, data)
            count(session, {(Counter.STAGE_SECONDS, stage): seconds, (Counter.STAGES_FINISHED, stage): 1})

    def stage_kept(self, stage: Stage) -> None:
        """An earlier attempt finished this stage, and its output is still there."""
        with self._writing() as (session, row, at):
            add_event(session, row, "stage", at, {"stage": stage.value, "status": "kept"})

    def log(self, lines: list[str], *, limit: int) -> None:
        """Store lines as one event; nothing once the job has `limit` log events."""
        with self._writing() as (session, row, at):
            if row.log_events < limit:
                row.log_events += 1
                add_event(session, row, "log", at, {"lines": lines})

    def save_report_file(self, name: str, content: bytes) -> None:
        """Keep a file of the report card beyond the workspace; replaces one of an earlier attempt."""
        with self._writing() as (session, row, _):
            session.merge(ReportFileRow(job_id=row.id, name=name, content=content))

    def target_begun(self) -> bool:
        """Whether begin_target() was called, by this attempt or an earlier one."""
        with self._database.read() as session:
            return self._held(session.get(JobRow, self.job.id)).target_begun

    def begin_target(self) -> None:
        """Note that the target repo is about to be made: found empty later, it is this job's own."""
        with self._writing() as (_, row, _at):
            row.target_begun = True

    def succeed(self, result: JobResult) -> None:
        """A job that was asked to stop after it had published has succeeded all the same."""
        with self._writing() as (session, row, at):
            row.result = asdict(result)
            row.error = None
            enter(session, row, JobState.SUCCEEDED, at, result=row.result)

    def fail(self, error: JobError) -> None:
        with self._writing() as (session, row, at):
            fail(session, row, error, at)

    def cancel(self) -> None:
        with self._writing() as (session, row, at):
            enter(session, row, JobState.CANCELED, at)

    def hand_back(self) -> None:
        """Put the job back to its place in the queue: this worker is going, nothing is wrong with the job."""
        with self._writing() as (session, row, at):
            if row.state == JobState.CANCELLING:
                enter(session, row, JobState.CANCELED, at)
            else:
                enter(session, row, JobState.QUEUED, at, reason="handed_back")

    @contextmanager
    def _writing(self) -> Iterator[tuple[Session, JobRow, datetime]]:
        with self._database.write() as session:
            row = self._held(locked(session, self.job.id))
            yield session, row, self._database.now(session)

    def _held(self, row: JobRow | None) -> JobRow:
        if row is None or row.fencing != self.fencing or row.state not in LEASED:
            raise LeaseLost(f"Attempt {self.fencing} does not hold job {self.job.id} any more.")
        return row
