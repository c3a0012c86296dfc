"""How many requests a caller may send, counted in Redis so that several API processes share the count.

Counts are for fixed windows of a minute, kept by Redis's clock: within any minute at most twice the budget passes. When
Redis does not answer, everything passes, and no request waits for it longer than a moment. Must not know HTTP routes.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network

import redis
from limits import RateLimitItemPerMinute
from limits.storage import RedisStorage
from limits.strategies import FixedWindowRateLimiter
from redis.backoff import NoBackoff
from redis.retry import Retry

from service.errors import RequestRefused

WINDOW_S = 60
ANSWER_S = 0.25
AWAY_S = 5.0  # during which Redis is not asked again

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Standing:
    """What is left of a budget; draft-ietf-httpapi-ratelimit-headers says how it is written."""

    budget: str
    limit: int
    left: int
    reset_s: int

    def headers(self) -> dict[str, str]:
        """
        >>> Standing("reads", 100, 7, 30).headers()
        {'RateLimit-Policy': '"reads";q=100;w=60', 'RateLimit': '"reads";r=7;t=30'}
        """
        return {
            "RateLimit-Policy": f'"{self.budget}";q={self.limit};w={WINDOW_S}',
            "RateLimit": f'"{self.budget}";r={self.left};t={self.reset_s}',
        }


class RateLimited(RequestRefused):
    def __init__(self, standing: Standing) -> None:
        super().__init__(
            429,
            "rate_limited",
            f"The budget '{standing.budget}' is {standing.limit} a minute, and is used up.",
            f"Wait {standing.reset_s} seconds.",
        )
        self.standing = standing
        self.retry_after_s = standing.reset_s


class RateLimits:
    """Budgets by name, a number a minute for each key; one of 0 is no limit."""

    def __init__(self, redis_url: str, budgets: Mapping[str, int]) -> None:
        pool = redis.ConnectionPool.from_url(
            redis_url,
            socket_connect_timeout=ANSWER_S,
            socket_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),
        )
        self._pool = pool
        self._limiter = FixedWindowRateLimiter(RedisStorage(redis_url, pool, key_prefix="kvalign:limits"))
        self._items = {name: RateLimitItemPerMinute(most) for name, most in budgets.items() if most}
        self._lock = threading.Lock()
        self._away_until = -math.inf

    def holds(self, budget: str) -> bool:
        """Whether there is a limit that Redis would have to be asked about."""
        return budget in self._items and time.monotonic() >= self._away_until

    def spend(self, budget: str, key: str) -> Standing | None:
        """Count a request. None when there is no limit, or none can be told now. Raises RateLimited."""
        return self._ask(budget, key, cost=1)

    def check(self, budget: str, key: str) -> Standing | None:
        """As spend, without counting."""
        return self._ask(budget, key, cost=0)

    def close(self) -> None:
        self._pool.disconnect()

    def _ask(self, budget: str, key: str, *, cost: int) -> Standing | None:
        item = self._items.get(budget)
        if item is None or time.monotonic() < self._away_until:
            return None
        try:
            passes = self._limiter.hit(item, budget, key) if cost else self._limiter.test(item, budget, key)
            stats = self._limiter.get_window_stats(item, budget, key)
        except redis.RedisError as error:
            self._note_away(error)
            return None
        reset_s = min(WINDOW_S, max(1, math.ceil(stats.reset_time - time.time())))
        standing = Standing(budget, item.amount, stats.remaining, reset_s)
        if not passes:
            raise RateLimited(standing)
        return standing

    def _note_away(self, error: redis.RedisError) -> None:
        with self._lock:
            told = time.monotonic() < self._away_until
            self._away_until = time.monotonic() + AWAY_S
        if not told:
            log.warning("rate limits are not held for %s s: Redis does not answer (%s)", AWAY_S, type(error).__name__)


def address_key(address: str) -> str:
    """What stands for one sender: an IPv4 address, or the network that one IPv6 user has.

    >>> address_key("192.0.2.1"), address_key("2001:db8::1:2"), address_key("unix")
    ('192.0.2.1', '2001:db8::/64', 'unix')
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    return str(ip_network(f"{parsed}/64", strict=False)) if isinstance(parsed, IPv6Address) else str(parsed)
