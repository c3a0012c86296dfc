"""How many event streams are open, and the threads they read with; must not know what they carry."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from anyio import CapacityLimiter

from service.errors import RequestRefused


class Streams:
    """Counts open streams by tenant. One event loop opens and closes them; check may come from any thread."""

    def __init__(self, per_tenant: int, threads: int) -> None:
        self.threads = CapacityLimiter(threads)
        self._per_tenant = per_tenant
        self._open: Counter[str] = Counter()

    def check(self, tenant: str) -> None:
        """Raises RequestRefused (429) when a tenant has its share open."""
        if self._open[tenant] >= self._per_tenant:
            raise RequestRefused(
                429,
                "too_many_streams",
                f"You have {self._per_tenant} event streams open, which is the limit.",
                "Close one, or read the events as JSON.",
            )

    @contextmanager
    def open(self, tenant: str) -> Iterator[None]:
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]
