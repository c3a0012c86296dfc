"""Accounts are remembered for a while, tokens never."""

import threading
import time

import pytest

from service.auth import Accounts, Caller
from worker.hub import Account
from worker.jobs import Origin


def test_the_hub_is_asked_once_in_a_while() -> None:
    asked: list[str] = []

    def whoami(token: str) -> Account:
        asked.append(token)
        return Account(f"owner-of-{token}")

    accounts = Accounts(whoami, ttl_s=0.2)
    assert [accounts.name("one") for _ in range(3)] == ["owner-of-one"] * 3
    assert accounts.name("two") == "owner-of-two"
    assert asked == ["one", "two"]
    time.sleep(0.25)
    accounts.name("one")
    assert asked == ["one", "two", "one"]


def test_a_refusal_is_not_remembered() -> None:
    answers: list[Exception | Account] = [PermissionError("no"), Account("me")]

    def whoami(token: str) -> Account:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    accounts = Accounts(whoami, ttl_s=60)
    with pytest.raises(PermissionError):
        accounts.name("token")
    assert accounts.name("token") == "me"


def test_memory_is_bounded_and_holds_no_token() -> None:
    accounts = Accounts(lambda token: Account("me"), ttl_s=60, capacity=3)
    for number in range(10):
        accounts.name(f"hf_canary{number}")
    assert [accounts.remembered(f"hf_canary{number}") is not None for number in range(10)] == [False] * 7 + [True] * 3
    assert "canary" not in repr(vars(accounts._known))


def test_many_threads_may_ask() -> None:
    accounts = Accounts(lambda token: Account(token.upper()), ttl_s=60)
    seen: list[str] = []
    threads = [threading.Thread(target=lambda n=n: seen.append(accounts.name(f"t{n % 4}"))) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(set(seen)) == ["T0", "T1", "T2", "T3"]


def test_a_caller_does_not_show_the_token() -> None:
    assert "hf_secret" not in repr(Caller("me", "hf_secret", Origin()))
