"""Shows the API's problems to people: where a browser asked for a page, problem+json becomes HTML.

Plain ASGI around everything else, so that refusals of the middleware and errors of no handler are shown too.
Programs, and the paths of the API, get their problem+json untouched.
"""

import json
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import ProblemResponse
from service.negotiation import preferred
from service.pages.rendering import PAGE_HEADERS, rendered

_API = ("/v1/", "/healthz", "/readyz", "/metrics", "/openapi.json")
_HTML = "text/html"


class ProblemPages:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _wants_page(scope):
            await self.app(scope, receive, _Shown(scope, send).send)
        else:
            await self.app(scope, receive, send)


class _Shown:
    """Holds a problem back until it is whole, then sends the page of it; lets everything else pass as it comes."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith(str(ProblemResponse.media_type)):
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_page(self._start, json.loads(self._body))
            return
        await self._send(message)

    async def _send_page(self, start: Message, problem: dict[str, Any]) -> None:
        body = rendered("problem.html", problem=problem, tenant=self._scope["state"].get("tenant")).encode()
        headers = MutableHeaders(raw=list(start["headers"]))
        headers.update({**PAGE_HEADERS, "Content-Type": f"{_HTML}; charset=utf-8", "Content-Length": str(len(body))})
        await self._send({**start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})


def _wants_page(scope: Scope) -> bool:
    accept = Headers(scope=scope).get("accept", "")
    is_page = not scope["path"].startswith(_API)
    return is_page and preferred(accept, [str(ProblemResponse.media_type), _HTML]) == _HTML
