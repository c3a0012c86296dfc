"""Committing: which files are large, and the commit itself, one JSON object a line; keeps no lock itself."""

import base64
import binascii
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub.door import flag, json_body, origin, storage, writable_repo
from devhub.errors import BadRequest, NotSupported, TooLarge
from devhub.names import SHA256, check_path
from devhub.repository import Repository
from devhub.routing import route
from devhub.sendable import sendable_text
from devhub.storage import HubStorage
from devhub.tree import Change, DeleteFile, DeleteFolder, Put, large_entry
from devhub.upload_mode import MAX_REGULAR_BYTES, UploadMode, upload_mode

MAX_LINE_BYTES = MAX_REGULAR_BYTES * 4 // 3 + (1 << 16)  # the largest small file as base64, and its path
MAX_OPERATIONS = 25_000
MAX_PREUPLOAD_FILES = 1000


@dataclass
class _Draft:
    """A commit as far as its lines have come."""

    title: str | None = None
    message: str = ""
    parent: str | None = None
    changes: list[Change] = field(default_factory=list)


async def preupload(request: Request) -> Response:
    body = await json_body(request)
    return await run_in_threadpool(_preupload, request, body)


def _preupload(request: Request, body: dict[str, Any]) -> Response:
    _refuse_pull_requests(request)
    repo, _ = writable_repo(request)
    files = repo.at(request.path_params["revision"]).files
    asked = body.get("files")
    if not isinstance(asked, list) or len(asked) > MAX_PREUPLOAD_FILES:
        raise BadRequest(f"`files` must be a list of at most {MAX_PREUPLOAD_FILES}.")
    attributes = storage(request).text(files, ".gitattributes")
    answers = []
    for item in asked:
        path, mode = _mode(item, attributes)
        oid = files[path].etag if path in files else None
        answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return JSONResponse({"files": answers})


def _mode(item: Any, attributes: str) -> tuple[str, UploadMode]:
    match item:
        case {"path": str(path), "size": int(size), "sample": str(sample)}:
            return check_path(path), upload_mode(path, size, _base64(sample), attributes)
    raise BadRequest("A file has a `path`, a `size` and a `sample`.")


async def commit(request: Request) -> Response:
    _refuse_pull_requests(request)
    repo, who = await run_in_threadpool(writable_repo, request)
    draft = _Draft()
    async for line in _lines(request):
        await run_in_threadpool(_take_line, storage(request), repo, draft, line)
    if draft.title is None:
        raise BadRequest("The commit has no header line.")
    title = draft.title
    made = await run_in_threadpool(
        lambda: repo.commit(
            draft.changes,
            branch=request.path_params["revision"],
            title=title,
            message=draft.message,
            author=who.name,
            parent=draft.parent,
        )
    )
    url = f"{origin(request)}{repo.id.url_path}/commit/{made.oid}"
    return JSONResponse({"success": True, "commitOid": made.oid, "commitUrl": url, "hookOutput": ""})


async def _lines(request: Request) -> AsyncIterator[bytes]:
    """The body line by line; no more than one line and one network read is in memory."""
    rest = bytearray()
    async for piece in request.stream():
        first, *others = piece.split(b"\n")
        rest += first
        for other in others:
            yield bytes(rest)
            rest = bytearray(other)
        if len(rest) > MAX_LINE_BYTES:
            raise TooLarge(f"A file of a commit is larger than {MAX_REGULAR_BYTES} bytes: upload it with LFS.")
    yield bytes(rest)


def _take_line(storage: HubStorage, repo: Repository, draft: _Draft, line: bytes) -> None:
    """Add one line to the draft; a small file's content is kept at once, and memory is free again."""
    if not line.strip():
        return
    try:
        operation = json.loads(line)
    except (ValueError, RecursionError):
        raise BadRequest("A line of the commit is no JSON.") from None
    match operation:
        case {"key": "header", "value": {"summary": str(title), **header}}:
            draft.title = sendable_text(title)
            draft.message = sendable_text(str(header.get("description") or ""))
            draft.parent = str(header["parentCommit"]) if header.get("parentCommit") else None
        case {"key": str(), "value": {"path": str()}} if draft.title is not None:
            draft.changes.append(_change(storage, repo, operation["key"], operation["value"]))
        case _:
            raise BadRequest("A commit is a header line, then lines with a `key` and a `value` that has a `path`.")
    if len(draft.changes) > MAX_OPERATIONS:
        raise TooLarge(f"A commit has at most {MAX_OPERATIONS} operations.")


def _change(storage: HubStorage, repo: Repository, key: str, value: dict[str, Any]) -> Change:
    path = value["path"]
    match key, value:
        case "file", {"content": str(content), **rest}:
            raw = _base64(content) if rest.get("encoding") == "base64" else content.encode()
            return Put(check_path(path), storage.blobs.put_small(raw))
        case "lfsFile", {"oid": str(oid), **rest}:
            size = storage.blobs.large_size(oid) if SHA256.fullmatch(oid) and repo.was_given(oid) else None
            if size is None or rest.get("size", size) != size:
                raise BadRequest(f"LFS pointer of {path} points to a file that was not uploaded: {oid[:64]}.")
            return Put(check_path(path), large_entry(oid, size))
        case "deletedFile", _:
            return DeleteFile(path)
        case "deletedFolder", _:
            return DeleteFolder(path)
    raise BadRequest(f"Unknown or incomplete operation {key[:40]!r}.")


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest("Invalid base64.") from None


def _refuse_pull_requests(request: Request) -> None:
    if flag(request, "create_pr"):
        raise NotSupported("devhub has no pull requests: commit to a branch (revision=...) instead of create_pr=True.")


def no_xet(_: Request) -> Response:
    raise NotSupported("devhub has no Xet storage: set HF_HUB_DISABLE_XET=1 for the client.")


_REPO = "/api/{kind}/{repo}"
routes = [
    route(f"{_REPO}/preupload/{{revision}}", preupload, "POST"),
    route(f"{_REPO}/commit/{{revision}}", commit, "POST"),
    route(f"{_REPO}/xet-write-token/{{revision}}", no_xet),
    route(f"{_REPO}/xet-read-token/{{revision}}", no_xet),
]
