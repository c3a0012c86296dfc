"""Talks to a kvalign API over HTTP, as the commands and scripts need it; must not print, and never shows a token."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from httpx_sse import EventSource

FINAL_STATES = frozenset({"succeeded", "failed", "canceled"})

_TIMEOUT = httpx.Timeout(60, connect=10)
_STREAM_SILENCE_S = 60.0  # the service sends a keep-alive comment every 15 s
_TRIES = 3
_LONGEST_WAIT_S = 30.0


class ApiError(Exception):
    """The API refused or did not answer. `code` is that of the problem, or 'unreachable'."""

    def __init__(self, code: str, message: str, remedy: str = "", *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Event:
    id: int
    kind: str
    data: dict[str, Any]


class ApiClient:
    """One API as one account. Requests that may be repeated safely are, while the API is away for a moment."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=url.rstrip("/"),
            headers={"Authorization": f"Bearer {token}", "User-Agent": "kvalign"},
            timeout=_TIMEOUT,
            trust_env=not is_loopback(url),  # a proxy for the world is none for this machine
        )

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def submit(self, config: dict[str, Any]) -> dict[str, Any]:
        """The job of a conversion; the same one when the request had to be sent again."""
        return self._json("POST", "/v1/jobs", json=config, headers={"Idempotency-Key": uuid.uuid4().hex})

    def job(self, job_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/jobs/{_segment(job_id)}")

    def jobs(self, **filters: Any) -> dict[str, Any]:
        """One page, newest first; filters as in the API, None for those not wanted."""
        wanted = {name: value for name, value in filters.items() if value is not None}
        return self._json("GET", "/v1/jobs", params=wanted)

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/jobs/{_segment(job_id)}/cancel")

    def retry(self, job_id: str) -> dict[str, Any]:
        return self._json("POST", f"/v1/jobs/{_segment(job_id)}/retry", repeat=False)

    def follow(self, job_id: str, *, patience_s: float = 120.0) -> Iterator[Event]:
        """Every event of a job until its end, each once, over as many connections as it takes.

        patience_s  how long the API may be away before ApiError is raised
        """
        last, ended, away = 0, False, _Outage(patience_s)
        while True:
            try:
                for event in self._stream(job_id, last, away.over):
                    last = event.id
                    yield event
                if ended:
                    return
                # A server that stops closes streams in good order too, so the end is read off the job. What
                # happened before it may have been missed: one more look, which a server at leisure answers at once.
                ended = self.job(job_id)["state"] in FINAL_STATES
            except ApiError as error:
                away.endure(error)

    def _stream(self, job_id: str, last: int, on_open: Callable[[], None]) -> Iterator[Event]:
        """One connection: the events after `last`, until the server ends it."""
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(last)} if last else {})}
        path = f"/v1/jobs/{_segment(job_id)}/events"
        timeout = httpx.Timeout(_STREAM_SILENCE_S, connect=10)
        with _as_api_errors(), self._http.stream("GET", path, headers=headers, timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            on_open()
            if response.status_code == 204:
                return
            for message in EventSource(response).iter_sse():
                if message.data:
                    yield Event(int(message.id), message.event, message.json())

    def _json(self, method: str, path: str, *, repeat: bool = True, **request: Any) -> dict[str, Any]:
        tries = _TRIES if repeat else 1
        for remaining in reversed(range(tries)):
            try:
                with _as_api_errors():
                    response = self._http.request(method, path, **request)
                    if response.is_error:
                        raise _refusal(response)
                    answer: dict[str, Any] = response.json()
                    return answer
            except ApiError as error:
                if error.code not in _PASSING or not remaining:
                    raise
                time.sleep(min(error.retry_after_s or 2.0 ** (tries - 1 - remaining), _LONGEST_WAIT_S))
        raise AssertionError("the last try returns or raises")


def is_loopback(url: str) -> bool:
    return urlsplit(url).hostname in {"127.0.0.1", "::1", "localhost"}


class _Outage:
    """How long the API has been away; bears it for patience_s."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: float | None = None

    def over(self) -> None:
        self._since = None

    def endure(self, error: ApiError) -> None:
        """Wait a little; raises the error when it will not pass, or has lasted too long."""
        now = time.monotonic()
        self._since = self._since if self._since is not None else now
        if error.code not in _PASSING or now - self._since > self._patience_s:
            raise error
        time.sleep(min(error.retry_after_s or 1.0, _LONGEST_WAIT_S))


_PASSING = frozenset({"unreachable", "hub_unavailable", "not_ready", "internal", "too_many_streams"})


@contextlib.contextmanager
def _as_api_errors() -> Iterator[None]:
    """What the HTTP client raises, as ApiError: its own messages may carry a URL, never a header."""
    try:
        yield
    except httpx.TransportError as error:
        raise ApiError(
            "unreachable",
            f"The API does not answer ({type(error).__name__}).",
            "Start it with 'kvalign serve', or name it with --api or KVALIGN_API.",
        ) from None
    except (httpx.InvalidURL, httpx.DecodingError, ValueError) as error:
        raise ApiError(
            "not_an_api",
            f"What answers is not a kvalign API ({type(error).__name__}).",
            "Check --api or KVALIGN_API.",
        ) from None


def _refusal(response: httpx.Response) -> ApiError:
    try:
        problem = response.json()
        code, detail, remedy = problem["code"], problem["detail"], problem.get("remedy", "")
    except (ValueError, KeyError, TypeError):
        passing = response.status_code in {502, 503, 504}
        return ApiError(
            "unreachable" if passing else "not_an_api",
            f"The API answered with status {response.status_code} and no reason.",
            "Check --api or KVALIGN_API.",
        )
    after = response.headers.get("retry-after", "")
    return ApiError(str(code), str(detail), str(remedy), retry_after_s=float(after) if after.isdecimal() else None)


def _segment(job_id: str) -> str:
    """An id as one segment of a path, whatever was typed."""
    return quote(job_id, safe="")
