"""Faults on demand, so that tests can see what a client does about them; knows no repos.

A fault matches a method and a path as it was sent, and does one thing a number of times: answers with a
status, waits, cuts the answer off, or lets the work happen and then drops the connection without the answer.
"""

import asyncio
import re
import threading
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from devhub.errors import BadRequest

# What a test steers devhub by: never made to fail, and not counted among the requests served.
CONTROL_PATHS = ("/devhub/faults", "/devhub/log")


class Fault(BaseModel):
    """One thing to go wrong, `times` times.

    method             "GET", or "*" for any
    path_regex         searched for in the raw path
    status             answer this instead of working
    delay_s            wait before working, or before answering `status`
    cut_after_bytes    drop the connection after so many bytes of the answer's body
    apply_then_cut     do the work, then drop the connection: the client cannot know
    headers            added to the answer
    """

    model_config = ConfigDict(extra="forbid")

    method: str = "*"
    path_regex: re.Pattern[str] = re.compile("")
    times: int = Field(default=1, ge=1)
    status: int | None = Field(default=None, ge=400, le=599)
    delay_s: float = Field(default=0.0, ge=0, le=3600)
    cut_after_bytes: int | None = Field(default=None, ge=0)
    apply_then_cut: bool = False
    headers: dict[str, str] = {}

    def matches(self, method: str, path: str) -> bool:
        return self.method in ("*", method) and self.path_regex.search(path) is not None


class Faults:
    """The faults in waiting. The first that matches a request is used up by one."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()

    def add(self, **fields: Any) -> Fault:
        """Raises BadRequest."""
        try:
            fault = Fault(**fields)
        except ValidationError as error:
            raise BadRequest(f"No such fault: {error}") from None
        with self._lock:
            self._waiting.append(fault)
        return fault

    def waiting(self) -> list[Fault]:
        """Those that have not happened as often as they were asked for."""
        with self._lock:
            return list(self._waiting)

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self._waiting:
                if fault.matches(method, path):
                    fault.times -= 1
                    if fault.times == 0:
                        self._waiting.remove(fault)
                    return fault
        return None


class InjectFaults:
    """ASGI middleware that makes waiting faults happen. The control routes themselves never fail."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = None
        if scope["type"] == "http" and scope["path"] not in CONTROL_PATHS:
            fault = self._faults.take(scope["method"], scope["path"])
        if fault is None:
            await self._app(scope, receive, send)
            return
        await asyncio.sleep(fault.delay_s)
        app: ASGIApp = self._app
        if fault.status is not None:
            app = JSONResponse({"error": "Injected fault."}, status_code=fault.status)
        await app(scope, receive, _Tampered(fault, send))


class _Tampered:
    """A `send` that adds the fault's headers and falls silent where the answer is to be cut."""

    def __init__(self, fault: Fault, send: Send) -> None:
        self._fault = fault
        self._send = send
        self._left = 0 if fault.apply_then_cut else fault.cut_after_bytes

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            extra = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in self._fault.headers.items()]
            await self._send({**message, "headers": [*message.get("headers", []), *extra]})
        elif self._left is None:
            await self._send(message)
        else:
            body = message.get("body", b"")[: self._left]
            self._left -= len(body)
            if body:
                await self._send({**message, "body": body, "more_body": True})
