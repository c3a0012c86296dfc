"""Signing in with a Hub token, and out again. The token goes into the cookie and nowhere else."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from service.errors import RequestRefused
from service.pages.rendering import page
from service.pages.session import PostedForm, Sessions, SignInNeeded, caller_of, local_path, page_caller
from service.wiring import Wiring

router = APIRouter(include_in_schema=False)


@router.get("/login")
async def login_page(request: Request, wiring: Wiring, next: str = "/") -> Response:  # noqa: A002 - its name in the URL
    """A cross-site link arrives without the cookie, so that who is signed in can go on with one click."""
    try:
        await page_caller(request)
    except SignInNeeded:
        from_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
        return _form(wiring, local_path(next), from_elsewhere=from_elsewhere)
    return RedirectResponse(local_path(next), status_code=303)


@router.post("/login")
async def login(form: PostedForm, request: Request, wiring: Wiring) -> Response:
    token, back = form.get("token", "").strip(), local_path(form.get("next", "/"))
    try:
        await caller_of(request, token)
    except RequestRefused as error:
        if error.status != 401:
            raise
        return _form(wiring, back, error="The Hub does not know this token. Paste one that is valid.", status=401)
    answer = RedirectResponse(back, status_code=303)
    sessions: Sessions = request.app.state.sessions
    sessions.begin(request, answer, token)
    return answer


@router.post("/logout")
def logout(form: PostedForm, request: Request) -> Response:
    answer = RedirectResponse("/login", status_code=303)
    sessions: Sessions = request.app.state.sessions
    sessions.end(request, answer)
    return answer


def _form(wiring: Wiring, back: str, *, error: str = "", from_elsewhere: bool = False, status: int = 200) -> Response:
    return page(
        "login.html",
        status=status,
        tenant=None,
        back=back,
        error=error,
        from_elsewhere=from_elsewhere,
        hub=wiring.settings.hub_endpoint,
        hours=wiring.settings.session_s / 3600,
    )
