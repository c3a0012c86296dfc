"""Settings of the API, from KVALIGN_* environment variables: the worker's, which it shares, and its own."""

import re

from pydantic import Field, SecretStr, field_validator

from worker.settings import WorkerSettings

_GIB = 2**30
_VISIBLE = re.compile(r"[\x21-\x7e]+")


class ServiceSettings(WorkerSettings):
    """Everything the API can be told.

    body_limit_bytes      of a request
    whoami_cache_s        how long an account is remembered for a token
    source_cache_s        how long submissions believe where a source's revision points, and that they may read it
    worker_seen_within_s  /readyz counts a worker that was seen this lately
    sse_poll_s            seconds between two looks for news of a job
    sse_keepalive_s       seconds of silence after which a stream sends a comment
    streams_per_tenant    event streams one account may have open
    metrics_token         what /metrics asks of those who read it; open to all unless set
    submissions_per_minute  requests that ask the Hub (submit, retry, preflight) of one account; 0 = no limit
    reads_per_minute      other requests of one account; 0 = no limit
    failed_logins_per_minute  of one address; 0 = no limit
    rate_limit_redis_url  where requests are counted; the broker's Redis unless given
    webhook_poll_s        seconds between two looks for webhooks to send
    webhook_allow_private  webhooks may name http and private addresses: for tests, and networks of one's own
    session_s             how long a person stays signed in to the web page
    free_disk_min_bytes   `kvalign doctor` fails a workspace disk with less than this free
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8400, ge=1, le=65535)
    body_limit_bytes: int = Field(default=64 * 1024, ge=1024)
    whoami_cache_s: float = Field(default=60.0, ge=0, le=3600)
    source_cache_s: float = Field(default=5.0, ge=0, le=60)
    worker_seen_within_s: float = Field(default=30.0, gt=0)
    sse_poll_s: float = Field(default=0.5, gt=0)
    sse_keepalive_s: float = Field(default=15.0, gt=0)
    streams_per_tenant: int = Field(default=20, ge=1)
    metrics_token: SecretStr | None = None
    submissions_per_minute: int = Field(default=600, ge=0)
    reads_per_minute: int = Field(default=6000, ge=0)
    failed_logins_per_minute: int = Field(default=60, ge=0)
    rate_limit_redis_url: str = Field(default="", repr=False)
    webhook_poll_s: float = Field(default=1.0, gt=0, le=60)
    webhook_allow_private: bool = False
    session_s: int = Field(default=12 * 3600, ge=60, le=30 * 24 * 3600)
    free_disk_min_bytes: int = Field(default=5 * _GIB, ge=0)

    @field_validator("rate_limit_redis_url")
    @classmethod
    def _redis_or_none(cls, url: str) -> str:
        return cls._redis(url) if url else url

    @field_validator("metrics_token")
    @classmethod
    def _fits_a_header(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not _VISIBLE.fullmatch(token.get_secret_value()):
            raise ValueError("must be visible ASCII characters, at least one, or not be set at all")
        return token
