"""Turns every error into RFC 9457 problem+json with a code and a remedy; must not know what the routes do."""

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path

from kvalign.errors import KvalignError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 30

_STATUS = {
    "config_invalid": 422,
    "dataset_invalid": 422,
    # The body names the source; 404 would say that the route or the job does not exist.
    "source_not_found": 422,
    "source_unsupported": 422,
    "source_invalid": 422,
    "weights_unsafe": 422,
    "source_forbidden": 403,
    "source_gated": 403,
    "target_forbidden": 403,
    "target_exists": 409,
    "disk_full": 507,
    "hub_unavailable": 503,
    "token_invalid": 401,
    "job_not_found": 404,
    "report_not_found": 404,
    "job_not_retryable": 409,
    "idempotency_conflict": 422,
    "quota_exceeded": 429,
}

_PLAIN = {
    400: ("request_invalid", "Send a request that follows /openapi.json."),
    404: ("not_found", "The paths are listed in /openapi.json."),
    405: ("method_not_allowed", "Use one of the methods in the Allow header."),
    413: ("body_too_large", "Send a smaller body."),
    415: ("content_type_unsupported", "Send JSON with the header Content-Type: application/json."),
}


class RequestRefused(KvalignError):
    """A request that cannot be answered as asked, for a reason of HTTP rather than of the conversion."""

    code = "request_invalid"

    def __init__(self, status: int, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message, remedy)
        self.status = status
        self.problem_code = code


class Problem(BaseModel):
    """The body of every answer with an error status (RFC 9457, with `code`, `remedy` and `request_id`)."""

    type: str = Field(description="urn:kvalign:problem: and the code")
    title: str = Field(description="the phrase of the HTTP status")
    status: int
    detail: str = Field(description="the fact and the limit, for a person")
    code: str = Field(description="for a program; never renamed")
    remedy: str = Field(description="what to do about it")
    request_id: str = Field(description="quote it when asking the operator")


_PROBLEM_CONTENT = {"application/problem+json": {"schema": Problem.model_json_schema()}}


def _header(description: str, kind: str = "string", *, required: bool = True) -> dict[str, Any]:
    return {"description": description, "required": required, "schema": {"type": kind}}


_REQUEST_ID = {"X-Request-Id": _header("of this request: the one it was sent with, or a new one")}
RATE_HEADERS = {
    "RateLimit-Policy": _header("the budget of a minute, where there is one", required=False),
    "RateLimit": _header("what is left of it", required=False),
}

PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request was refused.", "content": _PROBLEM_CONTENT, "headers": _REQUEST_ID},
    "5XX": {"description": "It could not be answered now.", "content": _PROBLEM_CONTENT, "headers": _REQUEST_ID},
}

# Of routes that ask whose request it is.
ACCOUNT_RESPONSES: dict[int | str, dict[str, Any]] = {
    **PROBLEM_RESPONSES,
    401: {
        "description": "The request carries no token, or one that the Hub does not accept.",
        "content": _PROBLEM_CONTENT,
        "headers": {**_REQUEST_ID, "WWW-Authenticate": _header("always Bearer")},
    },
    429: {
        "description": "Too many requests, jobs or streams of this account, or failed logins of this address.",
        "content": _PROBLEM_CONTENT,
        "headers": {**_REQUEST_ID, **RATE_HEADERS, "Retry-After": _header("seconds", "integer")},
    },
}


class ProblemResponse(Response):
    media_type = "application/problem+json"

    def render(self, content: Any) -> bytes:
        # ASCII: a message may quote what the caller sent, lone surrogates included.
        return json.dumps(content).encode("ascii")


def problem(
    request_id: str,
    status: int,
    code: str,
    detail: str,
    remedy: str = "",
    *,
    headers: Mapping[str, str] | None = None,
    **more: Any,
) -> ProblemResponse:
    """The answer for one error; `more` becomes extension members."""
    body = Problem(
        type=f"urn:kvalign:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
        remedy=remedy,
        request_id=request_id,
    )
    return ProblemResponse({**body.model_dump(), **more}, status_code=status, headers=dict(headers or {}))


def install_error_handlers(app: FastAPI) -> None:
    """Map the errors of the routes; what no handler knows is caught by service.middleware."""
    app.exception_handler(KvalignError)(_kvalign_error)
    app.exception_handler(RequestValidationError)(_validation_error)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(UnicodeEncodeError)(_surrogate)
    app.exception_handler(OperationalError)(_database_away)


def status_of(error: KvalignError) -> int:
    """Of the answer that an error leads to; 500 for one that is nobody's fault but ours."""
    return error.status if isinstance(error, RequestRefused) else _STATUS.get(error.code, 500)


async def _kvalign_error(request: Request, error: KvalignError) -> Response:
    status = status_of(error)
    code = error.problem_code if isinstance(error, RequestRefused) else error.code
    if standing := getattr(error, "standing", None):
        request.state.standing = standing  # service.middleware tells it
    if status == 500:
        log.error("request failed with %s", code, exc_info=error)
    return problem(
        request.state.request_id, status, code, error.message, error.remedy, headers=_headers_of(status, error)
    )


def _headers_of(status: int, error: KvalignError) -> dict[str, str]:
    if status == 401:
        return {"WWW-Authenticate": 'Bearer realm="kvalign"'}
    if status in {429, 503}:
        return {"Retry-After": str(round(getattr(error, "retry_after_s", None) or RETRY_AFTER_S))}
    return {}


async def _validation_error(request: Request, error: RequestValidationError) -> Response:
    """Name each wrong setting; a body that is not JSON at all is a matter of its type or its syntax."""
    items = error.errors()
    body = [item for item in items if item["loc"][:1] == ("body",)]
    if body and body[0]["type"] == "json_invalid":
        at = body[0]["loc"][-1]
        detail = f"The body is not JSON: {body[0]['ctx']['error']} at character {at}."
        return problem(request.state.request_id, 400, "request_invalid", detail, "Send valid JSON.")
    if body and not _says_json(request):
        code, remedy = _PLAIN[415]
        return problem(request.state.request_id, 415, code, "The body is not declared to be JSON.", remedy)
    code = "config_invalid" if len(body) == len(items) else "request_invalid"
    detail = "; ".join(_line(item) for item in items[:10]) + "."
    return problem(request.state.request_id, 422, code, detail, "Correct the setting and send the request again.")


def _says_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _line(item: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in item["loc"][1:])[:200] or str(item["loc"][0])
    return f"{where}: {str(item['msg']).removeprefix('Value error, ')}"


async def _http_error(request: Request, error: HTTPException) -> Response:
    code, remedy = _PLAIN.get(error.status_code, ("request_invalid", ""))
    detail = str(error.detail)
    if detail == HTTPStatus(error.status_code).phrase:
        detail = f"{request.method} {request.url.path[:200]}: {detail}"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_allowed_methods(request)) or headers.get("Allow", "")
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
    return problem(request.state.request_id, error.status_code, code, detail.rstrip(".") + ".", remedy, headers=headers)


def _allowed_methods(request: Request) -> list[str]:
    """Of every route with this path: the router itself names those of the first alone."""
    document = request.app.openapi()["paths"]
    path = request.url.path
    methods = {
        method.upper()
        for template, methods in document.items()
        if compile_path(template.replace("{file}", "{file:path}"))[0].match(path)
        for method in methods
    }
    return sorted(methods | {"OPTIONS"} | ({"HEAD"} if "GET" in methods else set()))


async def _surrogate(request: Request, _error: UnicodeEncodeError) -> Response:
    r"""JSON may spell half a character ("\ud800"), which no text can hold: pydantic raises this on meeting one."""
    code, remedy = _PLAIN[400]
    detail = "The request holds a lone surrogate, which is not Unicode text."
    return problem(request.state.request_id, 400, code, detail, remedy)


async def _database_away(request: Request, error: OperationalError) -> Response:
    log.error("the database does not answer", exc_info=error)
    return problem(
        request.state.request_id,
        503,
        "database_unavailable",
        "The service cannot reach its database.",
        "Try again later; what was accepted is kept.",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
