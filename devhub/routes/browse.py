"""Looking at a repo: info, listings, refs and history; reads only."""

from collections.abc import Sequence
from itertools import islice
from typing import TypeVar
from urllib.parse import parse_qs, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub import views
from devhub.door import flag, origin, raw_body, storage, visible_repo
from devhub.errors import BadRequest, EntryNotFound
from devhub.names import check_path
from devhub.repository import DEFAULT_BRANCH, Commit, Repository
from devhub.routing import route
from devhub.tree import Entry, changed_paths, is_folder, list_folder

PAGE_ITEMS = 1000
PAGE_ITEMS_EXPANDED = 50
MAX_PATHS = 1000

T = TypeVar("T")


def info(request: Request) -> Response:
    repo, settings = visible_repo(request)
    commit = repo.at(request.path_params.get("revision", DEFAULT_BRANCH))
    found = views.repo_info(storage(request), repo.id, settings, commit, with_blobs=flag(request, "blobs"))
    if wanted := [*request.query_params.getlist("expand"), *request.query_params.getlist("expand[]")]:
        found = views.expanded(found, wanted)
    return JSONResponse(found)


def tree(request: Request) -> Response:
    repo, _ = visible_repo(request)
    commit = repo.at(request.path_params["revision"])
    folder = request.path_params.get("path", "").strip("/")
    try:
        listed = list_folder(commit.files, folder, recursive=flag(request, "recursive"))
    except EntryNotFound as error:
        raise EntryNotFound(f'{folder} does not exist on "{commit.oid}"', commit.oid) from error
    expand = flag(request, "expand")
    page, headers = _page(request, listed, PAGE_ITEMS_EXPANDED if expand else PAGE_ITEMS)
    return JSONResponse(_items(repo, commit, page, expand=expand), headers=headers)


async def paths_info(request: Request) -> Response:
    fields = parse_qs((await raw_body(request)).decode("utf-8", "replace"))
    paths = fields.get("paths", [])
    if len(paths) > MAX_PATHS:
        raise BadRequest(f"At most {MAX_PATHS} paths at a time.")
    expand = fields.get("expand", ["false"])[0].lower() == "true"
    return await run_in_threadpool(_paths_info, request, paths, expand)


def _paths_info(request: Request, paths: Sequence[str], expand: bool) -> Response:
    repo, _ = visible_repo(request)
    commit = repo.at(request.path_params["revision"])
    found: list[tuple[str, Entry | None]] = []
    for path in dict.fromkeys(map(check_path, (path.rstrip("/") for path in paths))):
        if path in commit.files:
            found.append((path, commit.files[path]))
        elif is_folder(commit.files, path):
            found.append((path, None))
    return JSONResponse(_items(repo, commit, found, expand=expand))


def refs(request: Request) -> Response:
    return JSONResponse(views.refs(visible_repo(request)[0].refs()))


def commits(request: Request) -> Response:
    repo, _ = visible_repo(request)
    history = list(repo.history(request.path_params["revision"]))
    page, headers = _page(request, history, PAGE_ITEMS)
    formatted = "formatted" in request.query_params.getlist("expand[]")
    return JSONResponse([views.commit_item(commit, formatted=formatted) for commit in page], headers=headers)


def _items(
    repo: Repository, commit: Commit, found: Sequence[tuple[str, Entry | None]], *, expand: bool
) -> list[dict[str, object]]:
    last = _last_changes(repo, commit, [path for path, _ in found]) if expand else {}
    return [views.tree_item(commit.files, path, entry, last.get(path)) for path, entry in found]


def _last_changes(repo: Repository, head: Commit, paths: Sequence[str]) -> dict[str, Commit]:
    """For each path the newest commit that changed it, or something below it."""
    missing, found = set(paths), dict[str, Commit]()
    newer = head
    for older in islice(repo.history(head.oid), 1, None):
        for path in missing & changed_paths(older.files, newer.files):
            found[path] = newer
        missing -= found.keys()
        newer = older
        if not missing:
            break
    return {**dict.fromkeys(missing, newer), **found}


def _page(request: Request, items: Sequence[T], default_items: int) -> tuple[Sequence[T], dict[str, str]]:
    """The page a request asks for, and the Link header to the next one when there is more."""
    try:
        start = int(request.query_params.get("cursor", "0"))
        count = int(request.query_params.get("limit", default_items))
    except ValueError:
        raise BadRequest("`cursor` and `limit` are numbers.") from None
    if start < 0 or count < 1:
        raise BadRequest("`cursor` is at least 0, `limit` at least 1.")
    end = start + min(count, default_items)
    if end >= len(items):
        return items[start:], {}
    kept = [(key, value) for key, value in request.query_params.multi_items() if key != "cursor"]
    url = f"{origin(request)}{request.url.path}?{urlencode([*kept, ('cursor', end)])}"
    return items[start:end], {"Link": f'<{url}>; rel="next"'}


_REPO = "/api/{kind}/{repo}"
routes = [
    route(f"{_REPO}/revision/{{revision}}", info),
    route(f"{_REPO}/tree/{{revision}}", tree),
    route(f"{_REPO}/tree/{{revision}}/{{path}}", tree),
    route(f"{_REPO}/paths-info/{{revision}}", paths_info, "POST"),
    route(f"{_REPO}/refs", refs),
    route(f"{_REPO}/commits/{{revision}}", commits),
    route(_REPO, info),
]
