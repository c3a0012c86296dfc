"""Tells who is asking: the Hub account behind a bearer token. Must not keep, log or show a token."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from anyio import to_thread
from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from service.errors import RequestRefused
from service.memory import ShortMemory
from worker.hub import Account, TokenInvalid

_TOKEN = re.compile(r"^[\x21-\x7e]{1,512}$")

_REMEDY = "Send the header 'Authorization: Bearer TOKEN' with a token of your Hub account."


@dataclass(frozen=True)
class Caller:
    """An authenticated request: whose it is, and the token to act with on the Hub."""

    tenant: str
    token: str = field(repr=False)


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


async def current_caller(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """The caller of this request. A thread is used where the Hub has to be asked."""
    if credentials is None:
        raise RequestRefused(401, "token_missing", "The request carries no bearer token.", _REMEDY)
    token = credentials.credentials.strip()
    if not _TOKEN.match(token):
        raise RequestRefused(401, "token_invalid", "The bearer token is not a Hub token.", _REMEDY)
    accounts: Accounts = request.app.state.parts.accounts
    try:
        account = accounts.remembered(token)
        if account is None:
            account = await to_thread.run_sync(accounts.account, token)
        caller = Caller(tenant=account.name, token=token)
    except TokenInvalid as error:
        raise RequestRefused(401, "token_invalid", error.message, _REMEDY) from None
    request.state.tenant = caller.tenant
    return caller


CurrentCaller = Annotated[Caller, Depends(current_caller)]
