"""Tells who is asking: the Hub account behind a bearer token. Must not keep, log or show a token."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

from anyio import to_thread
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.audit import refusals_noted
from service.errors import RequestRefused
from service.memory import ShortMemory
from service.rate_limits import RateLimits, address_key
from worker.hub import Account, TokenInvalid
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
    """Accounts by token, asked of the Hub at most once in ttl_s for each token.

    whoami  token -> account; raises when the Hub refuses the token or does not answer. A failure is not
            remembered, so a token that was just made valid works at once.
    """

    def __init__(self, whoami: Callable[[str], Account], *, ttl_s: float, capacity: int = 4096) -> None:
        self._whoami = whoami
        self._known = ShortMemory[Account](ttl_s=ttl_s, capacity=capacity)

    def account(self, token: str) -> Account:
        return self._known.recall(token, "", lambda: self._whoami(token))

    def remembered(self, token: str) -> Account | None:
        """Without asking anybody."""
        return self._known.remembered(token, "")

    def name(self, token: str) -> str:
        return self.account(token).name


_bearer = HTTPBearer(auto_error=False, description="a token of the caller's Hub account")


async def authenticated(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """Whose request this is. A thread is used where the Hub has to be asked."""
    if credentials is None:
        raise RequestRefused(401, "token_missing", "The request carries no bearer token.", _REMEDY)
    address = request.client.host if request.client else ""
    origin = Origin(request.state.request_id, address, current_traceparent())
    parts = request.app.state.parts
    token = credentials.credentials.strip()
    account = parts.accounts.remembered(token)
    tenant = account.name if account else await _signing_in(parts, origin, token)
    request.state.tenant = tenant
    return Caller(tenant, token, origin)


async def _signing_in(parts: Any, origin: Origin, token: str) -> str:
    return await to_thread.run_sync(_signed_in, parts, origin, token, limiter=parts.hub_threads)


def _signed_in(parts: Any, origin: Origin, token: str) -> str:
    """The account behind a token that nobody has asked about lately; a refusal is noted."""
    parts.rate_limits.check(FAILED_LOGINS, address_key(origin.address))
    with refusals_noted(parts.store, origin, "login", tenant=None, of=LoginRefused):
        return _account(parts, origin, token)


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


async def spend(request: Request, caller: Caller, budget: str) -> Caller:
    """Counts the request; the answer tells what is left (service.middleware). Raises RequestRefused (429)."""
    limits: RateLimits = request.app.state.parts.rate_limits
    if limits.holds(budget):
        request.state.standing = await to_thread.run_sync(limits.spend, budget, caller.tenant)
    return caller


def _spending(budget: str) -> Callable[..., Awaitable[Caller]]:
    async def caller(request: Request, caller: Annotated[Caller, Depends(authenticated)]) -> Caller:
        return await spend(request, caller, budget)

    return caller


CurrentCaller = Annotated[Caller, Depends(_spending(READS))]
Submitter = Annotated[Caller, Depends(_spending(SUBMISSIONS))]
