"""What a running job tells about itself, kept to a bounded amount. Decides how often, not what.

Progress reaches the row up to four times a second; it becomes an event at most once a second, and only when
the percentage moved by one (or, with no total known, every ten seconds). Log lines are cut, freed of
credentials and gathered into one event a second, up to a number of events for each job.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.database import AWAY, insist
from worker.jobs import Progress, Stage
from worker.leases import Lease
from worker.logs import redact

ROW_EVERY_S = 0.25
EVENT_EVERY_S = 1.0
UNMEASURED_EVENT_EVERY_S = 10.0
LOG_EVENTS = 500
LINES_PER_EVENT = 100
LINE_CHARACTERS = 500

_log = logging.getLogger(__name__)
_child_log = logging.getLogger("worker.child")
_FOLDERS = re.compile(r"(?<![\w:/])(?:/[\w.\-+@]+)+/(?=[\w.\-+@])")


class Journal:
    """One attempt's way to the store; not for use by several threads at once.

    A database that does not answer loses progress and log lines, and holds up stages until the lease is over.
    """

    def __init__(self, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease
        self._clock = clock
        self._row_at = self._event_at = self._log_at = float("-inf")
        self._told_percent: float | None = None
        self._stage: Stage | None = None
        self._seen_bytes = self._moved_bytes = 0
        self._lines: list[str] = []
        self._log_events = 0

    def stage_started(self, stage: Stage) -> None:
        self._stage, self._told_percent, self._seen_bytes = stage, None, 0
        insist(lambda: self._lease.stage_started(stage), self._lease.lease_s)

    def stage_finished(self, stage: Stage, seconds: float) -> None:
        self.flush()
        self._stage = None
        insist(lambda: self._lease.stage_finished(stage, seconds), self._lease.lease_s)
        _log.info("stage finished", extra={"stage": stage.value, "duration_ms": round(1000 * seconds)})

    def stage_kept(self, stage: Stage) -> None:
        """An earlier attempt has finished the stage."""
        insist(lambda: self._lease.stage_kept(stage), self._lease.lease_s)

    def progress(self, progress: Progress) -> None:
        now = self._clock()
        self._measure(progress)
        tell = self._worth_telling(progress, now)
        complete = progress.total > 0 and progress.done >= progress.total
        if not tell and not complete and now - self._row_at < ROW_EVERY_S:
            return
        self._row_at = now
        if tell:
            self._event_at, self._told_percent = now, progress.percent
        with _unless_away():
            self._lease.progress(progress, tell=tell, moved_bytes=self._moved_bytes)
            self._moved_bytes = 0

    def log(self, line: str) -> None:
        """A line of the converting child, for the job's events and for this process's own log."""
        if len(self._lines) < LINES_PER_EVENT and self._log_events < LOG_EVENTS:
            self._lines.append(clean(line))
            _child_log.info("%s", self._lines[-1], extra={"stage": self._stage})
        if self._clock() - self._log_at >= EVENT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write the log lines that are waiting."""
        lines, self._lines = self._lines, []
        self._log_at = self._clock()
        if lines:
            self._log_events += 1
            with _unless_away():
                self._lease.log(lines, limit=LOG_EVENTS)

    def _measure(self, progress: Progress) -> None:
        """Add up what transfers moved; one that begins anew counts from nothing again."""
        if progress.unit == "bytes":
            self._moved_bytes += progress.done - (self._seen_bytes if progress.done >= self._seen_bytes else 0)
            self._seen_bytes = progress.done

    def _worth_telling(self, progress: Progress, now: float) -> bool:
        if progress.percent is None:
            return now - self._event_at >= UNMEASURED_EVENT_EVERY_S
        if self._told_percent is None:
            return now - self._event_at >= EVENT_EVERY_S
        moved = abs(progress.percent - self._told_percent) >= 1
        return moved and now - self._event_at >= EVENT_EVERY_S


@contextmanager
def _unless_away() -> Iterator[None]:
    try:
        yield
    except AWAY as error:
        _log.warning("the database does not answer (%s); a note about a job is lost", type(error.orig).__name__)


def clean(text: str, characters: int = LINE_CHARACTERS) -> str:
    """Text fit to be stored and shown: cut, printable, without credentials or folders of this machine.

    >>> clean("cannot open /data/jobs/job_1/source/model.safetensors with hf_abcdefgh")
    'cannot open model.safetensors with ***'
    """
    text = redact(text[: 4 * characters])
    text = _FOLDERS.sub("", text)
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)[:characters]
