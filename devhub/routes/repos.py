"""Making, deleting, renaming and setting up repos, branches and tags; knows no files."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub.access import check_namespace_writable, check_visible
from devhub.door import account, json_body, origin, storage, writable_repo
from devhub.errors import BadRequest, LoginNeeded
from devhub.names import RepoId, repo_id
from devhub.repository import DEFAULT_BRANCH
from devhub.routing import route


async def create(request: Request) -> Response:
    body = await json_body(request)
    repo = await run_in_threadpool(_create, request, body)
    return JSONResponse({"url": f"{origin(request)}{repo.url_path}", "name": repo.name})


def _create(request: Request, body: dict[str, Any]) -> RepoId:
    repo = _named(request, body)
    author = check_namespace_writable(account(request), repo.owner).name
    private = _wants_private(body) or False
    return storage(request).create_repo(repo.name, kind=repo.kind, private=private, author=author).id


async def delete(request: Request) -> Response:
    body = await json_body(request)
    await run_in_threadpool(_delete, request, body)
    return Response(status_code=200)


def _delete(request: Request, body: dict[str, Any]) -> None:
    repo = _named(request, body)
    _check_owned(request, repo)
    storage(request).delete_repo(repo)


async def move(request: Request) -> Response:
    body = await json_body(request)
    await run_in_threadpool(_move, request, body)
    return Response(status_code=200)


def _move(request: Request, body: dict[str, Any]) -> None:
    kind = f"{_text(body, 'type')}s"
    source, target = repo_id(kind, _text(body, "fromRepo")), repo_id(kind, _text(body, "toRepo"))
    _check_owned(request, source)
    check_namespace_writable(account(request), target.owner)
    storage(request).move_repo(source, target)


async def settings(request: Request) -> Response:
    body = await json_body(request)
    changes: dict[str, Any] = {}
    if "gated" in body:
        if body["gated"] not in (False, "auto", "manual"):
            raise BadRequest("`gated` is false, auto or manual.")
        changes["gated"] = body["gated"]
    if (private := _wants_private(body)) is not None:
        changes["private"] = private
    repo, _ = await run_in_threadpool(writable_repo, request)
    changed = await run_in_threadpool(lambda: repo.change_settings(**changes))
    return JSONResponse({"private": changed.private, "gated": changed.gated})


async def grant_access(request: Request) -> Response:
    body = await json_body(request)
    repo, _ = await run_in_threadpool(writable_repo, request)
    await run_in_threadpool(repo.accept, _text(body, "user"))
    return JSONResponse({})


async def create_branch(request: Request) -> Response:
    body = await json_body(request)
    repo, _ = await run_in_threadpool(writable_repo, request)
    start = str(body.get("startingPoint") or DEFAULT_BRANCH)
    await run_in_threadpool(lambda: repo.create_branch(request.path_params["revision"], start=start))
    return JSONResponse({}, status_code=201)


def delete_branch(request: Request) -> Response:
    writable_repo(request)[0].delete_branch(request.path_params["revision"])
    return JSONResponse({})


async def create_tag(request: Request) -> Response:
    body = await json_body(request)
    repo, _ = await run_in_threadpool(writable_repo, request)
    name, revision = _text(body, "tag"), request.path_params["revision"]
    await run_in_threadpool(lambda: repo.create_tag(name, revision=revision))
    return JSONResponse({}, status_code=201)


def delete_tag(request: Request) -> Response:
    writable_repo(request)[0].delete_tag(request.path_params["revision"])
    return JSONResponse({})


def _named(request: Request, body: dict[str, Any]) -> RepoId:
    """The repo of a body; without an organisation it is the sender's own."""
    who = account(request)
    if who is None:
        raise LoginNeeded("Invalid username or password.")
    owner = body.get("organization") or who.name
    return repo_id(f"{body.get('type') or 'model'}s", f"{owner}/{_text(body, 'name')}")


def _check_owned(request: Request, repo: RepoId) -> None:
    """A repo the sender cannot see is not found, one that is another's is forbidden."""
    who = account(request)
    check_visible(who, repo, storage(request).find(repo).settings())
    check_namespace_writable(who, repo.owner)


def _wants_private(body: dict[str, Any]) -> bool | None:
    match body.get("visibility"), body.get("private"):
        case "private", _:
            return True
        case "public", _:
            return False
        case None, bool(private):
            return private
        case None, None:
            return None
    raise BadRequest("`visibility` is public or private.")


def _text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"`{key}` must be a string.")
    return value


_REPO = "/api/{kind}/{repo}"
routes = [
    route("/api/repos/create", create, "POST"),
    route("/api/repos/delete", delete, "DELETE"),
    route("/api/repos/move", move, "POST"),
    route(f"{_REPO}/settings", settings, "PUT"),
    route(f"{_REPO}/user-access-request/grant", grant_access, "POST"),
    route(f"{_REPO}/branch/{{revision}}", create_branch, "POST"),
    route(f"{_REPO}/branch/{{revision}}", delete_branch, "DELETE"),
    route(f"{_REPO}/tag/{{revision}}", create_tag, "POST"),
    route(f"{_REPO}/tag/{{revision}}", delete_tag, "DELETE"),
]
