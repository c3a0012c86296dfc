"""Sends what waits in the outbox, from a thread of each API process. Must not know how a message is sent.

The API does this, and not the worker: a worker's main process forks for every job, and could do so only between two
messages; the API never forks, is there whenever jobs can be asked about, and a slow receiver holds up nothing else.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence

from service.webhooks.address import Resolver, WebhookRefused, resolve_endpoint, system_resolver
from service.webhooks.post import Poster
from worker.outbox import Outbox, Outcome, Taken

PAUSES_S = (5.0, 30.0, 300.0, 1800.0, 7200.0, 18_000.0, 36_000.0)
AT_ONCE = 8
PER_TENANT = 2
_SPREAD = 0.2

log = logging.getLogger(__name__)


class Sender(threading.Thread):
    """Looks for due deliveries every poll_s, and sends AT_ONCE at a time, of one tenant PER_TENANT.

    pauses_s  before each further attempt, a fifth more or less
    """

    def __init__(
        self,
        outbox: Outbox,
        poster: Poster,
        *,
        allow_private: bool,
        poll_s: float,
        pauses_s: Sequence[float] = PAUSES_S,
        resolve: Resolver = system_resolver,
    ) -> None:
        super().__init__(name="webhooks", daemon=True)
        self._outbox = outbox
        self._poster = poster
        self._allow_private = allow_private
        self._poll_s = poll_s
        self._pauses_s = pauses_s
        self._resolve = resolve
        self._stopping = threading.Event()
        self._look = threading.Event()
        self._lock = threading.Lock()
        self._busy: Counter[str] = Counter()

    def run(self) -> None:
        while not self._stopping.is_set():
            for taken in self._take():
                # Not a pool's threads, which an ending process would wait for.
                threading.Thread(target=self._deliver, args=[taken], name="webhook", daemon=True).start()
            self._look.wait(self._poll_s)
            self._look.clear()

    def stop(self, wait_s: float = 5.0) -> None:
        """Begin no more. What is being sent has wait_s to end; what is cut off is sent again, by another sender."""
        self._stopping.set()
        self._look.set()
        deadline = time.monotonic() + wait_s
        while self._busy_tenants() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.is_alive():  # an application that never served has not begun
            self.join(max(0.0, deadline - time.monotonic()))

    def _take(self) -> list[Taken]:
        busy = self._busy_tenants()
        free = AT_ONCE - sum(busy.values())
        if free <= 0:
            return []
        try:
            taken = self._outbox.take(free, per_tenant=PER_TENANT, busy=list(busy))
        except Exception:  # the edge of the thread: a database that is away comes back
            log.exception("webhooks could not be looked for; the next look comes in %s s", self._poll_s)
            return []
        with self._lock:
            self._busy.update(one.tenant for one in taken)
        return taken

    def _busy_tenants(self) -> Counter[str]:
        with self._lock:
            return +self._busy

    def _deliver(self, taken: Taken) -> None:
        try:
            outcome = self._sent(taken)
            pauses = [pause * random.uniform(1 - _SPREAD, 1 + _SPREAD) for pause in self._pauses_s]  # noqa: S311
            self._outbox.settle(taken, outcome, pauses)
            fields = {"job_id": taken.job_id, "tenant": taken.tenant, "status": outcome.status}
            log.info("webhook attempt %d: %s", taken.attempt, outcome.error or "delivered", extra=fields)
        except Exception:  # the edge of the thread: the attempt is taken again when its time is over
            log.exception("a webhook's attempt failed", extra={"job_id": taken.job_id})
        finally:
            with self._lock:
                self._busy[taken.tenant] -= 1
                if not self._busy[taken.tenant]:
                    del self._busy[taken.tenant]
            self._look.set()

    def _sent(self, taken: Taken) -> Outcome:
        if taken.webhook is None:
            return Outcome(error="The job has no webhook any more.", final=True)
        if taken.secret is None:
            return Outcome(error="The webhook's secret cannot be read; set the webhook again.", final=True)
        try:
            endpoint = resolve_endpoint(taken.webhook.url, allow_private=self._allow_private, resolve=self._resolve)
        except WebhookRefused as refused:
            return Outcome(error=refused.message)
        return self._poster.post(endpoint, taken.secret, taken.id, taken.at, taken.payload)
