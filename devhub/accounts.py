"""Who may knock: users, their organisations and tokens, in one users.json; knows no repos.

Tokens are kept as sha256, so a copy of the folder gives none away. The file is read at every look-up: users
added by another process count at once.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from devhub.disk import locked, read_json, write_json
from devhub.errors import BadRequest, InvalidToken
from devhub.names import repo_id

Role = Literal["read", "write"]


@dataclass(frozen=True)
class Account:
    """A user as one of their tokens shows them."""

    name: str
    orgs: tuple[str, ...]
    role: Role

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.name, *self.orgs)


class Accounts:
    """The users of one devhub."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: str, token: str, *, role: str = "write", orgs: tuple[str, ...] = ()) -> Account:
        """Give a user, new or known, one more token and perhaps more organisations.

        Raises BadRequest for an empty or taken token, an unknown role or a name no owner can have.
        """
        if role not in get_args(Role):
            raise BadRequest(f"A token's role is one of {', '.join(get_args(Role))}, not {role!r}.")
        if not token.strip() or token != token.strip() or not token.isascii():
            raise BadRequest("A token is ASCII text without spaces around it.")
        for namespace in (name, *orgs):
            repo_id("models", f"{namespace}/any")
        with locked(self._path.with_suffix(".lock")):
            users = self._read()
            holder = self._holder(users, token)
            if holder is not None and holder.name != name:
                raise BadRequest(f"This token belongs to {holder.name} already.")
            user = users.setdefault(name, {"orgs": [], "tokens": {}})
            user["orgs"] = sorted({*user["orgs"], *orgs})
            user["tokens"][_fingerprint(token)] = role
            write_json(self._path, users, mode=0o600)
        return Account(name, tuple(user["orgs"]), user["tokens"][_fingerprint(token)])

    def find(self, token: str) -> Account:
        """Raises InvalidToken."""
        account = self._holder(self._read(), token)
        if account is None:
            raise InvalidToken
        return account

    def _read(self) -> dict[str, Any]:
        try:
            users: dict[str, Any] = read_json(self._path)
        except FileNotFoundError:
            return {}
        return users

    @staticmethod
    def _holder(users: dict[str, Any], token: str) -> Account | None:
        fingerprint = _fingerprint(token)
        for name, user in users.items():
            if fingerprint in user["tokens"]:
                return Account(name, tuple(user["orgs"]), user["tokens"][fingerprint])
        return None


def _fingerprint(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
