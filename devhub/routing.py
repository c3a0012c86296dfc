"""URL patterns that know repos, revisions and paths; knows no handler.

Revisions and paths arrive percent-encoded, slashes and all (`refs%2Fpr%2F1`), so routes are matched on the
path as it was sent, and each piece is decoded on its own.
"""

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from devhub.names import KINDS, RESERVED_NAMES, RESERVED_OWNERS


class MatchRawPath:
    """ASGI middleware: routes below see the path before percent-decoding."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
        await self._app(scope, receive, send)


class _Decoded(Convertor[str]):
    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        raise NotImplementedError("devhub writes its URLs itself")


class _Kind(_Decoded):
    regex = "|".join(KINDS)


def _none_of(words: Iterable[str]) -> str:
    return rf"(?!(?:{'|'.join(sorted(words))})(?:/|$))"


class _Repo(_Decoded):
    """`owner/name` or `name`. Words of the URLs themselves are taken for neither half."""

    regex = rf"{_none_of(RESERVED_OWNERS)}[^/]+(?:/{_none_of(RESERVED_NAMES)}[^/]+)?"


class _Revision(_Decoded):
    regex = "[^/]+"


class _Path(_Decoded):
    regex = ".+"


_PIECES: dict[str, Convertor[str]] = {"kind": _Kind(), "repo": _Repo(), "revision": _Revision(), "path": _Path()}
for _name, _convertor in _PIECES.items():
    register_url_convertor(f"devhub_{_name}", _convertor)


def route(pattern: str, endpoint: Callable[[Request], Any], method: str = "GET") -> Route:
    """A route whose pattern may use {kind}, {repo}, {revision} and {path}; GET answers HEAD too."""
    for name in _PIECES:
        pattern = pattern.replace(f"{{{name}}}", f"{{{name}:devhub_{name}}}")
    return Route(pattern, endpoint, methods=[method])
