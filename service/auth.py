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
from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.audit import refusals_noted
from service.errors import RequestRefused
from worker.audit import Origin
from worker.hub import TokenInvalid

_TOKEN = re.compile(r"^[\x21-\x7e]{1,512}$")

_REMEDY = "Send the header 'Authorization: Bearer TOKEN' with a token of your Hub account."


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

    def name(self, token: str) -> str:
        mark = hmac.digest(self._key, token.encode(), hashlib.sha256)
        with self._lock:
            name, until = self._known.get(mark, ("", 0.0))
        if until > time.monotonic():
            return name
        name = self._whoami(token)
        with self._lock:
            self._known[mark] = (name, time.monotonic() + self._ttl_s)
            self._known.move_to_end(mark)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        return name


_bearer = HTTPBearer(auto_error=False, description="a token of the caller's Hub account")


def current_caller(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """The caller of this request. Blocks while the Hub is asked: FastAPI runs it in a thread."""
    if credentials is None:
        raise RequestRefused(401, "token_missing", "The request carries no bearer token.", _REMEDY)
    origin = Origin(request.state.request_id, request.client.host if request.client else "")
    parts = request.app.state.parts
    with refusals_noted(parts.store, origin, "login", tenant=None, of=RequestRefused):
        tenant = _account(parts.accounts, credentials.credentials.strip())
    request.state.tenant = tenant
    return Caller(tenant, credentials.credentials.strip(), origin)


def _account(accounts: Accounts, token: str) -> str:
    if not _TOKEN.match(token):
        raise RequestRefused(401, "token_invalid", "The bearer token is not a Hub token.", _REMEDY)
    try:
        return accounts.name(token)
    except TokenInvalid as error:
        raise RequestRefused(401, "token_invalid", error.message, _REMEDY) from None


CurrentCaller = Annotated[Caller, Depends(current_caller)]
