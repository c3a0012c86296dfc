"""The broker as those see it who only ask how it does; jobs reach it by way of worker.app."""

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry


def open_broker(url: str, *, answer_s: float) -> "redis.Redis":
    """A client that asks once and waits for each answer at most so long. Raises ValueError for a URL of no Redis."""
    return redis.Redis.from_url(
        url, socket_timeout=answer_s, socket_connect_timeout=answer_s, retry=Retry(NoBackoff(), 0)
    )
