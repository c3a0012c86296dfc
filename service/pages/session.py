"""Who looks at a page: the Hub token in an encrypted cookie. Must not keep a session anywhere else, or show a token.

The cookie is sealed with a key derived from the service's secret for this use alone: every API process can read it,
and nothing else that the service encrypts can stand in for it. Its age is inside, so that an old one cannot be sent on.
"""

import base64
from typing import Annotated
from urllib.parse import parse_qsl, quote

from cryptography.fernet import Fernet, InvalidToken, MultiFernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials
from starlette.responses import RedirectResponse, Response

from kvalign.errors import KvalignError
from service.auth import READS, SUBMISSIONS, Caller, authenticated, spend
from service.errors import RequestRefused

HOME = "/"
_PURPOSE = b"kvalign: cookie of the web page"
_MOST_FIELDS = 100


class SignInNeeded(KvalignError):
    """A page was asked for without a session that holds."""

    code = "sign_in_needed"


class Sessions:
    """Seals tokens into cookies and opens them again.

    lasts_s  how long a cookie is believed after it was sealed
    """

    def __init__(self, secret_key: str, lasts_s: int) -> None:
        self._cipher = MultiFernet([Fernet(_derived(key.strip())) for key in secret_key.split(",")])
        self._lasts_s = lasts_s

    def seal(self, token: str) -> str:
        return self._cipher.encrypt(token.encode()).decode()

    def opened(self, sealed: str) -> str | None:
        """The token; None for what is tampered with, too old, or sealed by another service."""
        try:
            return self._cipher.decrypt(sealed.encode(), ttl=self._lasts_s).decode()
        except (InvalidToken, UnicodeError):
            return None

    def begin(self, request: Request, response: Response, token: str) -> None:
        """Set the cookie, as strict as browsers know."""
        response.set_cookie(
            cookie_name(request),
            self.seal(token),
            max_age=self._lasts_s,
            path="/",
            secure=_is_https(request),
            httponly=True,
            samesite="strict",
        )

    def end(self, request: Request, response: Response) -> None:
        response.delete_cookie(
            cookie_name(request), path="/", secure=_is_https(request), httponly=True, samesite="strict"
        )


def _derived(key: str) -> bytes:
    derived = HKDF(SHA256(), 32, salt=None, info=_PURPOSE).derive(base64.urlsafe_b64decode(key))
    return base64.urlsafe_b64encode(derived)


def cookie_name(request: Request) -> str:
    """Over https a name that browsers accept from this very host alone."""
    return "__Host-kvalign" if _is_https(request) else "kvalign"


async def page_caller(request: Request) -> Caller:
    """The caller of a page, checked and counted as one of the API is. Raises SignInNeeded, RequestRefused (429)."""
    sessions: Sessions = request.app.state.sessions
    token = sessions.opened(request.cookies.get(cookie_name(request), ""))
    if token is None:
        raise SignInNeeded("There is no session.", "Sign in.")
    try:
        caller = await caller_of(request, token)
    except RequestRefused as error:
        if error.status == 401:  # revoked since
            raise SignInNeeded(error.message, "Sign in again.") from None
        raise
    return await spend(request, caller, SUBMISSIONS if request.method == "POST" else READS)


async def caller_of(request: Request, token: str) -> Caller:
    """Whose token it is. Raises RequestRefused (401) when the Hub does not know it, HubUnavailable."""
    return await authenticated(request, HTTPAuthorizationCredentials(scheme="Bearer", credentials=token))


PageCaller = Annotated[Caller, Depends(page_caller)]


async def to_sign_in(request: Request, _error: Exception) -> Response:
    """To the sign-in page, and back to this one from there; a form that was sent is not sent again."""
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    back = f"?next={quote(path, safe='/')}" if request.method == "GET" and path != HOME else ""
    return RedirectResponse(f"/login{back}", status_code=303)


def local_path(wanted: str) -> str:
    """Where to go after signing in: a path of this service, whatever was asked for.

    >>> local_path("/jobs/job_1?x=%2F"), local_path("//evil.example/x"), local_path("/\\\\evil.example")
    ('/jobs/job_1?x=%2F', '/', '/')
    """
    is_plain = wanted.isascii() and wanted.isprintable() and not set(wanted) & set(' \\"<>')
    if not is_plain or not wanted.startswith("/") or wanted.startswith("//") or len(wanted) > 2000:
        return HOME
    return wanted


async def posted_form(request: Request) -> dict[str, str]:
    """The fields of a form that one of our own pages sent. Raises RequestRefused for any other sender."""
    if not _from_own_page(request):
        raise RequestRefused(
            403,
            "cross_site",
            "The form was sent from another site.",
            "Open the page of this service and send it there.",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise RequestRefused(415, "content_type_unsupported", "This is not a form.", "Send it from the page.")
    try:
        text = (await request.body()).decode("ascii")
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict"))
    except ValueError:  # UnicodeError is one
        raise RequestRefused(
            400,
            "request_invalid",
            f"The form is not UTF-8, or has over {_MOST_FIELDS} fields.",
            "Send it from the page.",
        ) from None


PostedForm = Annotated[dict[str, str], Depends(posted_form)]


def _from_own_page(request: Request) -> bool:
    """Beside the cookie's SameSite, which knows sites only: the browser's word for the origin that sends."""
    site = request.headers.get("sec-fetch-site")
    if site not in {None, "same-origin", "none"}:  # none: the person sent it again, as by reloading
        return False
    origin = request.headers.get("origin")
    if origin is not None:
        return origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
    return site == "same-origin"


def _is_https(request: Request) -> bool:
    return request.url.scheme == "https"
