"""The HTTP application: routes, refusals and the layers around them; the only file that joins them."""

import json
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from devhub.door import Moved
from devhub.errors import Conflict, EntryNotFound, HubError
from devhub.faults import Faults, InjectFaults
from devhub.request_log import KeepLog, RequestLog
from devhub.routes import accounts, browse, commits, control, files, lfs, pages, repos
from devhub.routing import MatchRawPath
from devhub.sendable import sendable_text
from devhub.storage import HubStorage

DEFAULT_MULTIPART_BYTES = 64 << 20


def create_app(
    storage: HubStorage, *, faults: bool = False, multipart_bytes: int = DEFAULT_MULTIPART_BYTES
) -> Starlette:
    """The ASGI application that serves `storage`.

    faults           serve /devhub/faults and /devhub/log to anyone: for tests only
    multipart_bytes  larger files are uploaded in parts of this size
    """
    middleware = [Middleware(MatchRawPath)]
    routes: list[BaseRoute] = _hub_routes()
    state: dict[str, Any] = {"storage": storage, "multipart_bytes": multipart_bytes}
    if faults:
        state |= {"faults": Faults(), "log": RequestLog()}
        middleware += [
            Middleware(KeepLog, log=state["log"]),
            Middleware(InjectFaults, faults=state["faults"]),
        ]
        routes = [*control.routes, *routes]
    # Typed by Starlette for any Exception; it calls each with the class it stands under.
    handlers: dict[Any, Any] = {
        HubError: _refuse,
        Moved: _redirect,
        HTTPException: _refuse_plainly,
        ClientDisconnect: _nobody_listens,
    }
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=handlers,
    )
    for name, value in state.items():
        setattr(app.state, name, value)
    return app


def _hub_routes() -> list[BaseRoute]:
    groups: Sequence[Sequence[BaseRoute]] = (
        accounts.routes,
        repos.routes,
        commits.routes,
        lfs.routes,
        files.routes,
        browse.routes,
        pages.routes,
    )
    return [route for group in groups for route in group]


def _refuse(request: Request, error: HubError) -> Response:
    """The answer to a HubError. Header and body carry the message; HEAD requests only have the header."""
    headers = {"X-Error-Message": _header_text(error.message)}
    if error.code is not None:
        headers["X-Error-Code"] = error.code
    body = {"error": sendable_text(error.message)}
    if isinstance(error, EntryNotFound) and error.commit is not None:
        headers["X-Repo-Commit"] = error.commit
    if isinstance(error, Conflict) and error.url_path is not None:
        body["url"] = f"{request.url.scheme}://{request.url.netloc}{error.url_path}"
    return JSONResponse(body, status_code=error.status, headers=headers)


def _redirect(_: Request, error: Moved) -> Response:
    return Response(status_code=307, headers={"Location": error.location})


def _refuse_plainly(_: Request, error: HTTPException) -> Response:
    """No such route, or not with this method."""
    return JSONResponse(
        {"error": f"devhub does not serve this: {error.detail}."},
        status_code=error.status_code,
        headers=error.headers,
    )


def _nobody_listens(_: Request, error: ClientDisconnect) -> Response:
    """The client went away in the middle of its upload: nothing was kept, and nobody reads this."""
    return Response(status_code=400)


def _header_text(message: str) -> str:
    """Headers are one line of latin-1; what does not fit is written as JSON would escape it."""
    return json.dumps(message)[1:-1].replace('\\"', '"')
