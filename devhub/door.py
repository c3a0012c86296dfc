"""From a request to the account, the repo and the body it means; every route passes here. Decides nothing."""

import base64
import json
from typing import Any, NoReturn

from starlette.requests import Request

from devhub.access import check_namespace_writable, check_readable, check_visible, not_found
from devhub.accounts import Account
from devhub.errors import BadRequest, InvalidName, RepoNotFound, TooLarge
from devhub.names import RepoId, repo_id
from devhub.repository import Repository, Settings
from devhub.storage import HubStorage

MAX_JSON_BYTES = 16 << 20


class Moved(Exception):
    """The repo has another name now. `location` is the same request under that name."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


def storage(request: Request) -> HubStorage:
    found: HubStorage = request.app.state.storage
    return found


def account(request: Request) -> Account | None:
    """Whose token came along; None without one. Raises InvalidToken."""
    token = _token(request)
    if not token:
        return None
    found = storage(request).accounts.find(token)
    request.state.account = found.name
    return found


def _token(request: Request) -> str:
    """The bearer token; or a browser's password, but for reading alone: other sites can make a browser send it."""
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic" and request.method in ("GET", "HEAD"):
        try:
            return base64.b64decode(credentials).decode().partition(":")[2]
        except ValueError:
            return ""
    return ""


def visible_repo(request: Request) -> tuple[Repository, Settings]:
    """The repo of the path, for its name, listing and history. Raises RepoNotFound, Moved."""
    who, kind, name = account(request), _kind(request), request.path_params["repo"]
    try:
        repo = storage(request).find(repo_id(kind, name))
        settings = repo.settings()
    except InvalidName:
        raise not_found(who, name) from None
    except RepoNotFound:
        _follow_rename(request, who, repo_id(kind, name))
    check_visible(who, repo.id, settings)
    return repo, settings


def readable_repo(request: Request) -> Repository:
    """The repo of the path, for its files. Raises RepoNotFound, GatedRepo, Moved."""
    repo, settings = visible_repo(request)
    check_readable(account(request), repo.id, settings)
    return repo


def writable_repo(request: Request) -> tuple[Repository, Account]:
    """The repo of the path, for changes. Raises RepoNotFound, LoginNeeded, Forbidden, Moved."""
    repo, _ = visible_repo(request)
    return repo, check_namespace_writable(account(request), repo.id.owner)


async def json_body(request: Request) -> dict[str, Any]:
    """Raises BadRequest, TooLarge."""
    try:
        body = json.loads(await raw_body(request))
    except (ValueError, RecursionError):
        raise BadRequest("The body is no JSON.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


async def raw_body(request: Request, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Raises TooLarge."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise TooLarge(f"The body is longer than {max_bytes} bytes.")
    return bytes(body)


def origin(request: Request) -> str:
    """`http://host:port` as the client wrote it, for the absolute URLs it wants back."""
    return f"{request.url.scheme}://{request.url.netloc}"


def flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("1", "true", "yes")


def _kind(request: Request) -> str:
    kind: str = request.path_params.get("kind", "models")
    return kind


def _follow_rename(request: Request, who: Account | None, old: RepoId) -> NoReturn:
    new = storage(request).moved_to(old)
    if new is None:
        raise not_found(who, old.name)
    check_visible(who, new, storage(request).find(new).settings())
    stem = f"/api/{old.kind}/{{}}" if request.url.path.startswith("/api/") else RepoId(old.kind, "{}").url_path
    location = request.url.path.replace(stem.format(old.name), stem.format(new.name), 1)
    raise Moved(f"{location}?{request.url.query}" if request.url.query else location)
