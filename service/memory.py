"""Remembers for a short while what was learnt with a token. Must not keep, log or show a token.

What is kept stands under an HMAC of the token, with a key that only this process has: nothing learnt with one token
is ever told to the bearer of another.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ShortMemory(Generic[T]):
    """Answers by token and subject, each asked for again after ttl_s. Any thread may use it.

    capacity  answers kept; the oldest is forgotten first
    """

    def __init__(self, *, ttl_s: float, capacity: int) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._key = secrets.token_bytes(32)
        self._known: OrderedDict[tuple[bytes, str], tuple[T, float]] = OrderedDict()
        self._lock = threading.Lock()

    def recall(
        self, token: str, subject: str, ask: Callable[[], T], *, worth_keeping: Callable[[T], bool] = lambda _: True
    ) -> T:
        """What is remembered, else what `ask` answers. What it raises is raised, and not remembered."""
        known = self.remembered(token, subject)
        if known is not None:
            return known
        answer = ask()
        if worth_keeping(answer):
            self._keep(self._mark(token, subject), answer)
        return answer

    def remembered(self, token: str, subject: str) -> T | None:
        """Without asking anybody."""
        with self._lock:
            answer, until = self._known.get(self._mark(token, subject), (None, 0.0))
        return answer if until > time.monotonic() else None

    def _mark(self, token: str, subject: str) -> tuple[bytes, str]:
        return hmac.digest(self._key, token.encode(), hashlib.sha256), subject

    def _keep(self, key: tuple[bytes, str], answer: T) -> None:
        with self._lock:
            self._known[key] = (answer, time.monotonic() + self._ttl_s)
            self._known.move_to_end(key)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
