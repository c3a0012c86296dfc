"""Tells event streams that a job has news: one look at the database for all streams of this process together.

Must not know tenants or what happened: whoever waits was let in before, and reads for itself.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from anyio import to_thread

from worker.database import AWAY

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Wait:
    job_id: str
    after: int
    heard: asyncio.Future[None]


class News:
    """Waiting for events of jobs; for one event loop. Nothing is asked while nobody waits.

    last_events  ids of jobs -> the number of the newest event of each that has not ended; blocks on SQL
    every_s      seconds between two looks
    """

    def __init__(self, last_events: Callable[[Collection[str]], Mapping[str, int]], *, every_s: float) -> None:
        self._last_events = last_events
        self._every_s = every_s
        self._waiting: set[_Wait] = set()
        self._looking: asyncio.Task[None] | None = None

    async def after(self, job_id: str, sequence: int) -> None:
        """Return once the job has an event after number `sequence`, has ended, or is gone.

        A database that is away is waited for.
        """
        wait = _Wait(job_id, sequence, asyncio.get_running_loop().create_future())
        self._waiting.add(wait)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_while_someone_waits())
        try:
            await wait.heard
        finally:
            self._waiting.discard(wait)

    async def _look_while_someone_waits(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._every_s)
            asked = list(self._waiting)
            try:
                if asked:  # the last one may have left meanwhile
                    await self._look(asked)
            except AWAY as error:
                log.warning("the database does not answer (%s); event streams wait", type(error.orig).__name__)
            except Exception as error:  # the edge of this task: whoever waits on it must not wait for ever
                for wait in asked:
                    if not wait.heard.done():
                        wait.heard.set_exception(error)

    async def _look(self, asked: list[_Wait]) -> None:
        last = await to_thread.run_sync(self._last_events, {wait.job_id for wait in asked})
        for wait in asked:
            if last.get(wait.job_id, wait.after + 1) > wait.after and not wait.heard.done():
                wait.heard.set_result(None)
