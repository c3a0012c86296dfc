"""Downloading: HEAD and GET of one file at one revision, whole or by ranges; reads only."""

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from devhub.disk import CHUNK_BYTES
from devhub.door import readable_repo, storage
from devhub.errors import EntryNotFound
from devhub.routing import route

# A repo's files are a stranger's: a browser must show them as text or save them, never run them.
_INERT = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "default-src 'none'; sandbox"}


class _File(FileResponse):
    chunk_size = CHUNK_BYTES


def resolve(request: Request) -> Response:
    repo = readable_repo(request)
    commit = repo.at(request.path_params["revision"])
    path = request.path_params["path"]
    entry = commit.files.get(path)
    if entry is None:
        raise EntryNotFound("Entry not found", commit.oid)
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.etag}"', **_INERT}
    if entry.sha256:
        headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    return _File(
        storage(request).blobs.path(entry),
        headers=headers,
        media_type="application/octet-stream" if entry.sha256 else "text/plain; charset=utf-8",
        filename=path.split("/")[-1],
        content_disposition_type="inline",
    )


routes = [
    route(f"{prefix}/{{repo}}/{word}/{{revision}}/{{path}}", resolve)
    for prefix in ("/{kind}", "")
    for word in ("resolve", "raw")
]
