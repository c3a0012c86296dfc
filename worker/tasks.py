"""The Celery side of a worker: the task that takes jobs, and the thread that sweeps. Must hold no rule of its own."""

import logging
import os
import socket
from contextlib import closing

from celery import Celery, signals
from kombu.exceptions import OperationalError

from worker.app import TASK, count_messages, create_celery, enqueue
from worker.leases import Lease, Leases
from worker.logs import bound, configure_logging
from worker.pipeline import Tools, run_attempt
from worker.request import ForgivingRequest
from worker.retention import forget
from worker.sandbox import hide_memory
from worker.settings import WorkerSettings
from worker.stopping import StopFlag
from worker.store import JobStore
from worker.sweeper import Sweeper, gone, remove_useless_workspaces, seen, sweep
from worker.tracing import attempt_span, configure_tracing
from worker.watch import Watch

MESSAGES_PER_SWEEP = 100

_log = logging.getLogger(__name__)


def serve(settings: WorkerSettings, tools: Tools, *, concurrency: int, log_level: str) -> int:
    """Work until told to stop; returns the exit code of Celery. Raises ConfigInvalid, and what the database raises."""
    _close_stdout()
    hide_memory()  # from converting children, which run as the same user and must not find a key in it
    configure_logging(log_level)
    configure_tracing("worker")
    signals.setup_logging.connect(lambda **_: None, weak=False)  # which keeps Celery from doing it its own way
    store = JobStore.open(settings.database, settings.secret_key.get_secret_value())
    store.close()
    celery = create_celery(settings)
    Worker(celery, settings, store, tools).attach()
    process = celery.Worker(
        pool_cls="prefork",
        concurrency=concurrency,
        loglevel=log_level,
        quiet=True,  # its banner is no log line
        hostname=f"kvalign-{os.getpid()}@{socket.gethostname()}",
        without_mingle=True,
        without_gossip=True,
    )
    process.start()
    return process.exitcode or 0


def _close_stdout() -> None:
    """Celery tells its shutdown there, in words; ours is on stderr, in lines of JSON."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


class Worker:
    """A worker's main process and its pool; to be made before the pool forks.

    store  open, and without open connections: each process makes its own
    """

    def __init__(self, celery: Celery, settings: WorkerSettings, store: JobStore, tools: Tools) -> None:
        self._celery = celery
        self._settings = settings
        self._store = store
        self._tools = tools
        self._leases = Leases(store, lease_s=settings.lease_s, running_limit=settings.running_per_tenant)
        self._stop = StopFlag()
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._sweeper = Sweeper(self._sweep, every_s=settings.sweep_s)

    def attach(self) -> None:
        """Register the task, and follow the worker's life by Celery's signals."""
        self._celery.task(self._run_next, name=TASK, Request=ForgivingRequest)
        signals.worker_ready.connect(lambda **_: self._sweeper.start(), weak=False)
        signals.worker_shutting_down.connect(lambda **_: self._stop.set(), weak=False)
        signals.worker_shutdown.connect(lambda **_: self._leave(), weak=False)

    def _run_next(self, job_id: str) -> None:
        """Run the job whose turn it is. A message only says that there is one, not which."""
        with closing(self._store), self._stop.on_sigterm():
            if self._stop.is_set():
                return
            lease = self._leases.claim(f"{self._name}/{os.getpid()}")
            if lease is None:
                _log.info("woken for %s, and nothing may run now", job_id)
                return
            job = lease.job
            known = bound(job_id=job.id, attempt=job.attempts, request_id=job.origin.request_id)
            with known, attempt_span(job):
                _log.info("attempt begins")
                run_attempt(lease, self._watch(lease), self._tools)
            self._wake(1)

    def _watch(self, lease: Lease) -> Watch:
        return Watch(
            lease,
            heartbeat_s=self._settings.heartbeat_s,
            time_limit_s=self._settings.job_time_limit_s,
            stopping=self._stop.is_set,
        )

    def _wake(self, most: int) -> None:
        for job_id in self._leases.waiting(most):
            enqueue(self._celery, job_id)

    def _sweep(self) -> None:
        with closing(self._store):
            seen(self._store, self._name)
            swept = sweep(self._store, max_attempts=self._settings.max_attempts)
            if swept:
                _log.warning("jobs of vanished workers: %s", swept)
            if forgotten := forget(self._store, kept_days=self._settings.jobs_kept_days):
                _log.info("forgot %d old jobs and audit entries", forgotten)
            remove_useless_workspaces(self._store, self._tools.workspaces, failed_kept_s=self._settings.failed_kept_s)
            self._repair_messages()

    def _repair_messages(self) -> None:
        """Send what is missing of one message for each job that may run now: lost ones, and those used in vain."""
        waiting = self._leases.waiting(MESSAGES_PER_SWEEP)
        try:
            missing = len(waiting) - count_messages(self._celery) if waiting else 0
        except OperationalError as error:
            _log.warning("%d jobs wait for a message; the broker does not answer (%s)", len(waiting), error)
            return
        for job_id in waiting[: max(0, missing)]:
            if not enqueue(self._celery, job_id):
                break

    def _leave(self) -> None:
        self._sweeper.stop()
        with closing(self._store):
            gone(self._store, self._name)
