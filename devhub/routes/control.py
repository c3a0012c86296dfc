"""Faults and the request log, for tests; served only when devhub was started with --faults."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub.door import json_body
from devhub.routing import route


async def add_fault(request: Request) -> Response:
    request.app.state.faults.add(**await json_body(request))
    return JSONResponse({}, status_code=201)


def waiting_faults(request: Request) -> Response:
    return JSONResponse([fault.model_dump(mode="json") for fault in request.app.state.faults.waiting()])


def clear_faults(request: Request) -> Response:
    request.app.state.faults.clear()
    return JSONResponse({})


def log(request: Request) -> Response:
    return JSONResponse(request.app.state.log.entries())


routes = [
    route("/devhub/faults", add_fault, "POST"),
    route("/devhub/faults", waiting_faults),
    route("/devhub/faults", clear_faults, "DELETE"),
    route("/devhub/log", log),
]
