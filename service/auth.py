"""Tells who is asking: the Hub account behind a bearer token. Must not keep, log or show a token.

What is remembered is the account under an HMAC of the token with a key that only this process has.
"""

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.audit import refusals_noted
from service.errors import RequestRefused
from service.rate_limits import RateLimits, address_key
from worker.hub import TokenInvalid
from worker.jobs import Origin
from worker.tracing import current_traceparent

READS, SUBMISSIONS, FAILED_LOGINS = "reads", "submissions", "failed_logins"

_TOKEN = re.compile(r"^[\x21-\x7e]{1,512}$")

_REMEDY = "Send the header 'Authorization: Bearer TOKEN' with a token of your Hub account."


class LoginRefused(RequestRefused):
    """A token that nobody's account stands behind."""


@dataclass(frozen=True)
class Caller:
    """An authenticated request: whose it is, and the token to act with on the Hub."""

    tenant: str
    token: str = field(repr=False)
    origin: Origin


class Accounts:
    """Account names by token, asked of the Hub at most once in ttl_s for each token.

    whoami  token -> account name; raises when the Hub refuses the token or does not answer. A failure is not
            remembered, so a token that was just made valid works at once.
    """

    def __init__(self, whoami: Callable[[str], str], *, ttl_s: float, capacity: int = 4096) -> None:
        self._whoami = whoami
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._lock = threading.Lock()

    def remembered(self, token: str) -> str | None:
        """The account of a token that was asked about lately."""
        with self._lock:
            name, until = self._known.get(self._mark(token), ("", 0.0))
        return name if until > time.monotonic() else None

    def name(self, token: str) -> str:
        """Raises what whoami raises."""
        known = self.remembered(token)
        if known is not None:
            return known
        name = self._whoami(token)
        mark = self._mark(token)
        with self._lock:
            self._known[mark] = (name, time.monotonic() + self._ttl_s)
            self._known.move_to_end(mark)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return name

    def _mark(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(errors="surrogatepass"), hashlib.sha256)


_bearer = HTTPBearer(auto_error=False, description="a token of the caller's Hub account")


def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """Whose request this is. Blocks while the Hub is asked: FastAPI runs it in a thread."""
    if credentials is None:
        raise RequestRefused(401, "token_missing", "The request carries no bearer token.", _REMEDY)
    address = request.client.host if request.client else ""
    origin = Origin(request.state.request_id, address, current_traceparent())
    parts = request.app.state.parts
    token = credentials.credentials.strip()
    tenant = parts.accounts.remembered(token)
    if tenant is None:
        parts.rate_limits.check(FAILED_LOGINS, address_key(origin.address))
        with refusals_noted(parts.store, origin, "login", tenant=None, of=LoginRefused):
            tenant = _account(parts, origin, token)
    request.state.tenant = tenant
    return Caller(tenant, token, origin)


def _account(parts: Any, origin: Origin, token: str) -> str:
    """The account as the Hub names it; a refusal is counted for the address it came from."""
    reason = "The bearer token is not a Hub token."
    if _TOKEN.match(token):
        try:
            name: str = parts.accounts.name(token)
        except TokenInvalid as error:
            reason = error.message
        else:
            return name
    parts.rate_limits.spend(FAILED_LOGINS, address_key(origin.address))
    raise LoginRefused(401, "token_invalid", reason, _REMEDY)


def spend(request: Request, caller: Caller, budget: str) -> Caller:
    """Counts the request; the answer tells what is left (service.middleware). Raises RequestRefused (429)."""
    limits: RateLimits = request.app.state.parts.rate_limits
    request.state.standing = limits.spend(budget, caller.tenant)
    return caller


def _spending(budget: str) -> Callable[..., Caller]:
    def caller(request: Request, caller: Annotated[Caller, Depends(authenticated)]) -> Caller:
        return spend(request, caller, budget)

    return caller


CurrentCaller = Annotated[Caller, Depends(_spending(READS))]
Submitter = Annotated[Caller, Depends(_spending(SUBMISSIONS))]
