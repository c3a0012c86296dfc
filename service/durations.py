"""How long this API process takes to begin its answers, for Prometheus. Plain ASGI; must not know the routes.

These counts are of one process and begin anew with it, unlike those of service.metrics: every process is asked.
"""

import time

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second gauge for each series, which nothing reads
_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Durations:
    """The histogram of one application, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._histogram = Histogram(
            "kvalign_http_request_duration_seconds",
            "Time from a request to the first byte of its answer, in this API process.",
            ["method", "route", "status"],
            buckets=_BUCKETS_S,
            registry=self.registry,
        )

    def note(self, scope: Scope, status: int, duration_s: float) -> None:
        """A route stands as it was written, ids not filled in, and what met none is one: callers cannot make labels."""
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._histogram.labels(method, route, str(status)).observe(duration_s)


class TimedAnswers:
    """Tells durations of every request. A stream counts until it begins, not until it ends."""

    def __init__(self, app: ASGIApp, durations: Durations) -> None:
        self.app = app
        self.durations = durations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.monotonic()

        async def timed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.durations.note(scope, message["status"], time.monotonic() - began)
            await send(message)

        await self.app(scope, receive, timed)
