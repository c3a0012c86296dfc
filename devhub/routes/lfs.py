"""The Git LFS side of uploading: batch, the uploads themselves, verify; commits nothing."""

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from devhub.door import json_body, origin, storage, writable_repo
from devhub.errors import BadRequest, NotFound
from devhub.names import SHA256
from devhub.repository import Repository
from devhub.routing import route
from devhub.uploads import Upload

MAX_OBJECTS = 1000


async def batch(request: Request) -> Response:
    """Say for each announced file: it is here, or how to upload it (git-lfs docs/api/batch.md)."""
    body = await json_body(request)
    return await run_in_threadpool(_batch, request, body)


def _batch(request: Request, body: dict[str, Any]) -> Response:
    repo, _ = writable_repo(request)
    objects = body.get("objects")
    if body.get("operation") != "upload" or not isinstance(objects, list) or len(objects) > MAX_OBJECTS:
        raise BadRequest(f"A batch uploads a list of at most {MAX_OBJECTS} objects; downloads go through resolve.")
    threshold: int | None = request.app.state.multipart_bytes
    if "multipart" not in (body.get("transfers") or []):
        threshold = None
    answers = [_answer(request, repo, announced, threshold) for announced in objects]
    in_parts = any("chunk_size" in a.get("actions", {}).get("upload", {}).get("header", {}) for a in answers)
    return JSONResponse(
        {"transfer": "multipart" if in_parts else "basic", "objects": answers},
        media_type="application/vnd.git-lfs+json",
    )


def _answer(request: Request, repo: Repository, announced: Any, threshold: int | None) -> dict[str, Any]:
    oid, size = _announced(announced)
    answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
    if repo.was_given(oid) and storage(request).blobs.large_size(oid) == size:
        return answer
    part_bytes = threshold if threshold is not None and size > threshold else None
    upload = storage(request).uploads.begin(repo.id, oid, size, part_bytes=part_bytes)
    verify = f"{origin(request)}{repo.id.url_path}.git/info/lfs/objects/verify"
    answer["actions"] = {"upload": _upload_action(request, upload), "verify": {"href": verify, "header": {}}}
    return answer


def _upload_action(request: Request, upload: Upload) -> dict[str, Any]:
    """One URL to PUT to; or, under `chunk_size`, a URL for each part and one to POST to at the end."""
    url = f"{origin(request)}/devhub/uploads/{upload.id}"
    if upload.part_bytes is None:
        return {"href": url, "header": {}}
    parts = {str(number): f"{url}/{number}" for number in range(1, upload.parts + 1)}
    return {"href": url, "header": {"chunk_size": str(upload.part_bytes), **parts}}


async def put_whole(request: Request) -> Response:
    upload = storage(request).uploads.get(request.path_params["upload"])
    if upload.part_bytes is not None:
        raise BadRequest("This upload comes in parts.")
    sha256 = await storage(request).uploads.receive(upload, 1, request.stream())
    await run_in_threadpool(_finish, request, upload, sha256)
    return Response(headers={"ETag": f'"{sha256}"'})


async def put_part(request: Request) -> Response:
    upload = storage(request).uploads.get(request.path_params["upload"])
    sha256 = await storage(request).uploads.receive(upload, request.path_params["number"], request.stream())
    return Response(headers={"ETag": f'"{sha256}"'})


async def complete(request: Request) -> Response:
    body = await json_body(request)
    upload = storage(request).uploads.get(request.path_params["upload"])
    parts = body.get("parts")
    if body.get("oid") != upload.sha256 or not isinstance(parts, list) or len(parts) != upload.parts:
        raise BadRequest(f"The completion must name the upload's oid and its {upload.parts} parts.")
    await run_in_threadpool(_finish, request, upload, None)
    return JSONResponse({})


def _finish(request: Request, upload: Upload, sha256: str | None) -> None:
    """Only who sent the content itself, and not merely its hash, gives it to the repo."""
    repo = storage(request).find(storage(request).moved_to(upload.repo) or upload.repo)
    storage(request).uploads.finish(upload, sha256=sha256)
    repo.admit(upload.sha256)


async def verify(request: Request) -> Response:
    oid, size = _announced(await json_body(request))
    repo, _ = await run_in_threadpool(writable_repo, request)
    if not repo.was_given(oid) or storage(request).blobs.large_size(oid) != size:
        raise NotFound(f"Object {oid} of {size} bytes was not uploaded.")
    return JSONResponse({})


def _announced(value: Any) -> tuple[str, int]:
    match value:
        case {"oid": str(oid), "size": int(size)} if SHA256.fullmatch(oid) and size > 0:
            return oid, size
    raise BadRequest("An LFS object has an `oid`, 64 hexadecimal digits, and a positive `size`.")


_LFS = "/{repo}.git/info/lfs/objects"
routes = [
    route("/devhub/uploads/{upload}", put_whole, "PUT"),
    route("/devhub/uploads/{upload}", complete, "POST"),
    route("/devhub/uploads/{upload}/{number:int}", put_part, "PUT"),
    route(f"/{{kind}}{_LFS}/batch", batch, "POST"),
    route(f"{_LFS}/batch", batch, "POST"),
    route(f"/{{kind}}{_LFS}/verify", verify, "POST"),
    route(f"{_LFS}/verify", verify, "POST"),
]
