"""What whoami tells about where a token may write."""

from typing import Any

import pytest

from worker.hub_types import Account


def answer(
    role: str | None, *scopes: tuple[str, str, list[str]], orgs: list[dict[str, str]] | None = None
) -> dict[str, Any]:
    token: dict[str, Any] = {"displayName": "a token", "role": role}
    if scopes:
        token["fineGrained"] = {
            "scoped": [{"entity": {"type": kind, "name": name}, "permissions": can} for kind, name, can in scopes]
        }
    return {
        "type": "user",
        "name": "me",
        "orgs": orgs or [{"name": "acme", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}],
        "auth": {"type": "access_token", "accessToken": token},
    }


WRITE = ["repo.content.read", "repo.write"]


@pytest.mark.parametrize(
    ("whoami", "may", "may_not"),
    [
        (answer("write"), ["me/x", "x", "acme/x"], ["club/x"]),
        (answer("read"), [], ["me/x", "x", "acme/x"]),
        (answer("fineGrained", ("user", "me", WRITE)), ["me/x", "x"], ["acme/x"]),
        (answer("fineGrained", ("org", "acme", WRITE)), ["acme/x"], ["me/x"]),
        (answer("fineGrained", ("model", "me/only", WRITE)), ["me/only"], ["me/x"]),
        (answer("fineGrained", ("user", "me", ["repo.content.read"])), [], ["me/x"]),
        (answer("fineGrained"), [], ["me/x"]),
        (answer(None), ["me/x", "acme/x"], ["club/x"]),
        ({"name": "me", "auth": {"type": "oauth"}}, ["me/x"], []),
        ({"name": "me"}, ["me/x"], []),
    ],
)
def test_where_a_token_may_write(whoami: dict[str, Any], may: list[str], may_not: list[str]) -> None:
    account = Account.of(whoami)
    assert [repo for repo in [*may, *may_not] if account.may_write(repo)] == may
    assert account.can_write == bool(may)


def test_names_get_an_owner_and_owners_are_known() -> None:
    account = Account.of(answer("write"))
    assert (account.full_name("x"), account.full_name("acme/x")) == ("me/x", "acme/x")
    assert [repo for repo in ("x", "me/x", "acme/x", "club/x", "you/x") if account.owns(repo)] == [
        "x",
        "me/x",
        "acme/x",
        "club/x",
    ]


@pytest.mark.parametrize("broken", [{}, {"name": "me", "orgs": [{}]}, {"name": "me", "orgs": 7}])
def test_an_answer_that_is_none(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        Account.of(broken)
