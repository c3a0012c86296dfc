"""Which requests were served, for tests to look at; holds no token and no upload id, and nothing on disk."""

import re
from collections import deque
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from devhub.faults import CONTROL_PATHS

MAX_ENTRIES = 10_000
_UPLOAD_ID = re.compile(r"(/devhub/uploads/)[^/]+")  # whoever knows it may upload


class RequestLog:
    """The last requests, oldest first, each as {method, path, query, status, account}."""

    def __init__(self) -> None:
        self._entries: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)

    def add(self, scope: Scope, status: int) -> None:
        self._entries.append(
            {
                "method": scope["method"],
                "path": _UPLOAD_ID.sub(r"\1...", scope["path"]),
                "query": scope["query_string"].decode("latin-1"),
                "status": status,
                "account": scope.get("state", {}).get("account"),
            }
        )

    def entries(self) -> list[dict[str, Any]]:
        return list(self._entries)


class KeepLog:
    """ASGI middleware that notes every request just before its answer: who has the answer finds it in the log."""

    def __init__(self, app: ASGIApp, log: RequestLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in CONTROL_PATHS:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._log.add(scope, message["status"])
            await send(message)

        await self._app(scope, receive, note)
