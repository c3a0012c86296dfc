"""What a running job tells about itself, kept to a bounded amount. Decides how often, not what.

Progress reaches the row up to four times a second; it becomes an event at most once a second, and only when the
percentage moved by one (or, with no total known, every ten seconds). Log lines are cut, freed of credentials
and gathered into one event a second, up to a number of events for each job.
"""

import re
import time
from collections.abc import Callable

from worker.jobs import Progress, Stage
from worker.leases import Lease

ROW_EVERY_S = 0.25
EVENT_EVERY_S = 1.0
UNMEASURED_EVENT_EVERY_S = 10.0
LOG_EVENTS = 500
LINES_PER_EVENT = 100
LINE_CHARACTERS = 500

_SECRET = re.compile(r"hf_[A-Za-z0-9_\-]{4,}|(?i:bearer)\s+\S+")


class Journal:
    """One attempt's way to the store; not for use by several threads at once."""

    def __init__(self, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease = lease
        self._clock = clock
        self._stage: Stage | None = None
        self._row_at = self._event_at = self._log_at = float("-inf")
        self._told_percent: float | None = None
        self._lines: list[str] = []
        self._log_events = 0

    def progress(self, progress: Progress) -> None:
        now = self._clock()
        if progress.stage != self._stage:
            self._stage, self._told_percent = progress.stage, None
        tell = self._worth_telling(progress, now)
        complete = progress.total > 0 and progress.done >= progress.total
        if not tell and not complete and now - self._row_at < ROW_EVERY_S:
            return
        self._lease.progress(progress, tell=tell)
        self._row_at = now
        if tell:
            self._event_at, self._told_percent = now, progress.percent

    def log(self, line: str) -> None:
        if len(self._lines) < LINES_PER_EVENT and self._log_events < LOG_EVENTS:
            self._lines.append(clean(line))
        if self._clock() - self._log_at >= EVENT_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write the log lines that are waiting."""
        if self._lines:
            self._lease.log(self._lines, limit=LOG_EVENTS)
            self._log_events += 1
        self._lines = []
        self._log_at = self._clock()

    def _worth_telling(self, progress: Progress, now: float) -> bool:
        if progress.percent is None:
            return now - self._event_at >= UNMEASURED_EVENT_EVERY_S
        if self._told_percent is None:
            return now - self._event_at >= EVENT_EVERY_S
        moved = abs(progress.percent - self._told_percent) >= 1
        return moved and now - self._event_at >= EVENT_EVERY_S


def clean(line: str) -> str:
    """A line fit to be stored and shown: cut, printable, without credentials and without folders of this machine.

    >>> clean("cannot open /data/jobs/job_1/source/model.safetensors with hf_abcdefgh")
    'cannot open model.safetensors with [secret]'
    """
    line = _SECRET.sub("[secret]", line[: 4 * LINE_CHARACTERS])
    line = re.sub(r"(?<![\w:/])(?:/[\w.\-+@]+)+/(?=[\w.\-+@])", "", line)
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)[:LINE_CHARACTERS]
