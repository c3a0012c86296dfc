"""The people of a soak: they submit jobs through any API that is up, cancel some, and retry some that failed."""

import contextlib
import random
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

from topology import FINAL, Topology

from worker.jobs import JobState

CANCEL_SHARE = 0.06
RETRIES = 3
REAL_CONVERSION: dict[str, Any] = {
    "codec": {"ratio": 4.0},
    "calibration": {"tokens": 2048, "sequence_length": 128},
    "validation": {"windows": 1, "gate": {"max_kl": 10, "min_top1": 0}},
}
TENANTS = ("ada", "ben")


class Clients(threading.Thread):
    """Submits `count` jobs, evenly over `over_s` seconds, while it is entered."""

    def __init__(self, topology: Topology, rng: random.Random, count: int, over_s: float, child: str) -> None:
        super().__init__(name="clients", daemon=True)
        self.jobs: list[dict[str, Any]] = []
        self.trouble: list[str] = []
        self._topology = topology
        self._rng = rng
        self._count = count
        self._every_s = over_s / count
        self._sections = REAL_CONVERSION if child == "real" else {}
        self._retried: Counter[str] = Counter()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.join(120)

    def run(self) -> None:
        began = time.monotonic()
        while not self._over.is_set() or len(self.jobs) < self._count:
            try:
                if len(self.jobs) < self._count and time.monotonic() - began >= len(self.jobs) * self._every_s:
                    self._submit()
                self._meddle()
            except Exception as error:  # the edge of the thread: what an API answered wrongly is a finding
                self.trouble.append(f"{type(error).__name__}: {str(error)[:300]}")
            time.sleep(0.2)

    def states(self) -> Counter[str]:
        """As the store has them, whether an API is up or not."""
        return Counter(self._state(job).value for job in list(self.jobs))

    def alive(self) -> bool:
        return any(self._state(job).value not in FINAL for job in self.jobs)

    def _state(self, job: dict[str, Any]) -> JobState:
        for _ in range(60):
            with contextlib.suppress(Exception):  # the database may be away: that is what a soak is for
                return self._topology.store.get(job["id"], tenant=job["tenant"]).state
            time.sleep(0.5)
        raise TimeoutError("the database does not answer")

    def _submit(self) -> None:
        number = len(self.jobs) + 1
        tenant = TENANTS[number % len(TENANTS)]
        job = self._topology.caller(tenant).submit(f"{tenant}/soak-{number}", **self._sections)
        self.jobs.append({**job, "tenant": tenant})

    def _meddle(self) -> None:
        """Look at one job through the API; cancel it, or try it again, now and then."""
        if not self.jobs:
            return
        job = self._rng.choice(self.jobs)
        caller = self._topology.caller(job["tenant"])
        state = caller.job(job)["state"]
        if state == "running" and self._rng.random() < CANCEL_SHARE / 20:
            caller.cancel(job)
        elif state == "failed" and not self._over.is_set() and self._retried[job["id"]] < RETRIES:
            self._retried[job["id"]] += 1
            caller.retry(job)
