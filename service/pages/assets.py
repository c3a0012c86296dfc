"""The page's script, style and icon, out of the package: named with a hash of their content, so kept by browsers."""

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Response

from service.errors import RequestRefused

router = APIRouter(include_in_schema=False)

_KINDS = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
_CONTENT = {name: (files("service.pages") / "static" / name).read_bytes() for name in _KINDS}
_URLS = {name: f"/static/{name}?v={hashlib.sha256(content).hexdigest()[:12]}" for name, content in _CONTENT.items()}


def asset_url(name: str) -> str:
    return _URLS[name]


@router.get("/static/{name}")
def asset(name: str, v: str = "") -> Response:
    """What a page of another version asks for is not kept: during an upgrade it may be answered by this one."""
    if name not in _CONTENT:
        raise RequestRefused(404, "not_found", "There is no such file.", "Go to the page.")
    is_current = _URLS[name].endswith(f"?v={v}")
    return Response(
        _CONTENT[name],
        media_type=_KINDS[name],
        headers={"Cache-Control": "public, max-age=31536000, immutable" if is_current else "no-store"},
    )
