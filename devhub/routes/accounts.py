"""Who am I, may I, and is this card well formed; changes nothing."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub import views
from devhub.card import check_card
from devhub.door import account, json_body, readable_repo, writable_repo
from devhub.errors import BadRequest, LoginNeeded
from devhub.routing import route


def whoami(request: Request) -> Response:
    who = account(request)
    if who is None:
        raise LoginNeeded("Invalid username or password.")
    return JSONResponse(views.whoami(who))


def auth_check(request: Request) -> Response:
    readable_repo(request)
    return JSONResponse({})


def auth_check_write(request: Request) -> Response:
    writable_repo(request)
    return JSONResponse({})


async def validate_yaml(request: Request) -> Response:
    content = (await json_body(request)).get("content")
    if not isinstance(content, str):
        raise BadRequest("`content` must be the text of a README.")
    check = check_card(content)
    body = {
        "errors": [{"message": message} for message in check.errors],
        "warnings": [{"message": message} for message in check.warnings],
    }
    return JSONResponse(body, status_code=400 if check.errors else 200)


routes = [
    route("/api/whoami-v2", whoami),
    route("/api/validate-yaml", validate_yaml, "POST"),
    route("/api/{kind}/{repo}/auth-check", auth_check),
    route("/api/{kind}/{repo}/auth-check/write", auth_check_write),
]
