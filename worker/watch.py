"""Whether an attempt may go on: not when canceled, out of time, robbed of its lease, or its worker is stopping.

Must not stop anything itself: it raises, and whoever waits for a process or a transfer ends it.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from kvalign.errors import Canceled, KvalignError, TimeLimit
from worker.database import AWAY, insist
from worker.jobs import JobState
from worker.leases import Lease, LeaseLost

LOOK_EVERY_S = 1.0
GRACE_S = 2.0
_POLL_S = 0.1

_log = logging.getLogger(__name__)
T = TypeVar("T")


class WorkerStopping(KvalignError):
    """This worker is going down; the job is to be handed back."""


class Watch:
    """Renews the lease and looks for reasons to stop.

    heartbeat_s   seconds between two renewals
    time_limit_s  the longest the attempt may take, from now
    stopping      whether this worker has been asked to end
    """

    def __init__(
        self,
        lease: Lease,
        *,
        heartbeat_s: float,
        time_limit_s: float,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease = lease
        self._heartbeat_s = heartbeat_s
        self._time_limit_s = time_limit_s
        self._stopping = stopping
        self._clock = clock
        self._began_at = self._renewed_at = self._looked_at = clock()
        self._reason: KvalignError | None = None

    def check(self) -> None:
        """To be called several times a second. Raises Canceled, TimeLimit, LeaseLost or WorkerStopping."""
        self.recall()
        try:
            self._check()
        except KvalignError as reason:
            self._reason = reason
            raise

    def recall(self) -> None:
        """Raise again what check() raised, if it did: for other threads, and it asks nobody."""
        if self._reason is not None:
            raise self._reason

    def confirm(self) -> None:
        """Look now, and renew now: before something that cannot be undone."""
        self.recall()
        insist(self._lease.renew, self._lease.lease_s)
        if insist(self._lease.state, self._lease.lease_s) == JobState.CANCELLING:
            raise Canceled("The job was canceled.")

    def during(self, call: Callable[[], T]) -> T:
        """Run something that blocks, on a thread, and go on checking; returns what it returns.

        When check() raises, the call has GRACE_S to end by its next recall() and to clean up. One that comes to
        its end instead has happened, and counts: the next check() raises. One that hangs is left behind, and ends
        with this process, which takes no further job.
        """
        outcome = _started(call)
        try:
            while not wait([outcome], timeout=_POLL_S).done:
                self.check()
        except KvalignError:
            ended = wait([outcome], timeout=GRACE_S).done
            if not ended or outcome.exception() is not None:
                raise
        return outcome.result()

    def after_all(self, call: Callable[[], T]) -> T | None:
        """Run something that blocks although check() has raised, for GRACE_S at most; None when it fails or hangs."""
        outcome = _started(call)
        if not wait([outcome], timeout=GRACE_S).done:
            _log.warning("the Hub did not answer in time; what was begun there may be left")
            return None
        error = outcome.exception()
        if error is not None:
            _log.warning("what was begun on the Hub may be left there: %s", error)
        return None if error is not None else outcome.result()

    def _check(self) -> None:
        now = self._clock()
        if self._stopping():
            raise WorkerStopping("The worker is stopping.")
        if now - self._began_at > self._time_limit_s:
            raise TimeLimit(
                f"The job took longer than {self._time_limit_s:,.0f} s, the limit for one attempt.",
                "Retry it: finished stages are kept. Or choose fewer calibration tokens or a smaller model.",
            )
        if now - self._looked_at >= LOOK_EVERY_S:
            self._look(now)

    def _look(self, now: float) -> None:
        """A database that does not answer is waited for, as long as the lease holds."""
        self._looked_at = now
        try:
            if now - self._renewed_at >= self._heartbeat_s:
                self._lease.renew()
                self._renewed_at = now
            state = self._lease.state()
        except AWAY as error:
            if now - self._renewed_at > self._lease.lease_s:
                raise LeaseLost("The database did not answer until the lease ran out.") from None
            _log.warning("the database does not answer (%s); trying again", type(error).__name__)
            return
        if state == JobState.CANCELLING:
            raise Canceled("The job was canceled.")


def _started(call: Callable[[], T]) -> Future[T]:
    """A call on a thread of its own, which does not keep the process from ending."""
    outcome: Future[T] = Future()
    known = contextvars.copy_context()  # so that its log lines say which job they are about
    threading.Thread(target=known.run, args=(_settle, outcome, call), name="transfer", daemon=True).start()
    return outcome


def _settle(outcome: Future[T], call: Callable[[], T]) -> None:
    try:
        outcome.set_result(call())
    except BaseException as error:  # the edge of the thread: raised again where the outcome is read
        outcome.set_exception(error)
