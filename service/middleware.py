"""What surrounds every request: its id, its size limit, its log line, the security headers.

Plain ASGI, so that streams pass unbuffered; must not know the routes.
"""

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import problem
from worker.logs import bound

log = logging.getLogger("service.access")

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._\-]{1,128}$")

_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RequestContext:
    """Gives each request an id, answers what no handler caught with a 500 problem, and logs one line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state: dict[str, Any] = scope.setdefault("state", {})
        state["request_id"] = _accepted(Headers(scope=scope).get("x-request-id"))
        answer = _Answer(send, scope, state)
        # Routes know GET alone: the same answer is made, and its body kept back (RFC 9110, 9.3.2).
        asked = {**scope, "method": "GET"} if answer.is_head else scope
        with bound(request_id=state["request_id"]):
            try:
                await self.app(asked, receive, answer.send)
            except Exception:
                log.exception("unhandled error", extra={"path": scope["path"]})
                if answer.status:
                    raise  # too late for another answer: the server closes the connection
                await _internal_error(state["request_id"])(scope, receive, answer.send)
            finally:
                answer.log_line()  # of one whose reader went away


class _Answer:
    """Adds the headers that every answer has, and logs one line when its last byte is sent."""

    def __init__(self, send: Send, scope: Scope, state: dict[str, Any]) -> None:
        self._send = send
        self._scope = scope
        self._state = state
        self._began = time.monotonic()
        self._logged = False
        self.is_head = state["is_head"] = scope["method"] == "HEAD"
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            headers["X-Request-Id"] = self._state["request_id"]
            if standing := self._state.get("standing"):
                headers.update(standing.headers())
        elif not message.get("more_body", False):
            self.log_line()
        if self.is_head and message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await self._send(message)

    def log_line(self) -> None:
        if self._logged:
            return
        self._logged = True
        method, path = self._scope["method"], self._scope["path"]  # a path without its query string
        fields = {
            "method": method,
            "path": path,
            "status": self.status,
            "duration_ms": round(1000 * (time.monotonic() - self._began), 1),
        }
        if tenant := self._state.get("tenant"):
            fields["tenant"] = tenant
        log.info("%s %s %d", method, path, self.status, extra=fields)


def _accepted(offered: str | None) -> str:
    return offered if offered and _REQUEST_ID.match(offered) else uuid.uuid4().hex


def _internal_error(identifier: str) -> ASGIApp:
    return problem(
        identifier,
        500,
        "internal",
        "The service failed to answer; the reason is in its log.",
        "Try again; if it persists, give the operator the request_id.",
    )


class BodyLimit:
    """Refuses bodies over limit_bytes, by their Content-Length or, when chunked, by what has arrived."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self.app = app
        self.limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.limit_bytes:
            await self._refusal(scope["state"]["request_id"])(scope, receive, send)
            return
        arrived = 0

        async def counted() -> Message:
            nonlocal arrived
            message = await receive()
            arrived += len(message.get("body", b""))
            if arrived > self.limit_bytes:
                # Raised where the route reads the body, so that the usual handler answers.
                raise HTTPException(413, self._fact(), headers={"Connection": "close"})
            return message

        await self.app(scope, counted, send)

    def _refusal(self, identifier: str) -> ASGIApp:
        return problem(
            identifier,
            413,
            "body_too_large",
            self._fact() + ".",
            "Send a smaller body.",
            headers={"Connection": "close"},
        )

    def _fact(self) -> str:
        return f"The body is larger than the limit of {self.limit_bytes} bytes"
