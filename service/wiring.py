"""The parts that the routes work with, made once for each process; must hold no rule of its own."""

import re
from dataclasses import dataclass
from typing import Annotated

from anyio import CapacityLimiter
from celery import Celery
from fastapi import Depends, Path, Request

from service.auth import FAILED_LOGINS, READS, SUBMISSIONS, Accounts
from service.known_sources import KnownSources
from service.news import News
from service.rate_limits import RateLimits
from service.settings import ServiceSettings
from service.streams import Streams
from service.webhooks.post import Poster
from service.webhooks.sender import Sender
from worker.app import create_celery
from worker.hub import Hub
from worker.outbox import Outbox
from worker.store import JobNotFound, JobStore

STREAM_THREADS = 16
HUB_THREADS = 12
HUB_PAUSES_S = (0.3, 1.0)

_ID = re.compile(r"^[a-z0-9_]{1,64}$", re.ASCII)


@dataclass(frozen=True)
class ServiceParts:
    """accounts, sources and streams live in memory; everything that must last is in the store.

    hub_threads  for requests that ask the Hub, which may be slow: those that ask the store alone go on meanwhile.
                 Few, as threads of one process that compute at once hinder each other
    """

    settings: ServiceSettings
    store: JobStore
    celery: Celery
    accounts: Accounts
    streams: Streams
    sender: Sender
    rate_limits: RateLimits
    sources: KnownSources
    news: News
    hub_threads: CapacityLimiter

    def hub(self, token: str) -> Hub:
        """The Hub as one caller sees it, asked with little patience: a person waits for the answer."""
        account = self.accounts.account(token)
        return Hub(self.settings.hub_endpoint, token, pauses_s=HUB_PAUSES_S, account=account)

    def close(self) -> None:
        self.sender.stop()
        self.rate_limits.close()
        self.store.close()
        self.celery.close()


def wire(settings: ServiceSettings) -> ServiceParts:
    """Open the database (bringing its tables up to date) and prepare the rest; connects to nothing else."""
    store = JobStore.open(
        settings.database, settings.secret_key.get_secret_value(), alive_limit=settings.alive_per_tenant
    )
    return ServiceParts(
        settings=settings,
        store=store,
        celery=create_celery(settings),
        accounts=Accounts(lambda token: Hub(settings.hub_endpoint, token).whoami(), ttl_s=settings.whoami_cache_s),
        streams=Streams(settings.streams_per_tenant, STREAM_THREADS),
        sender=Sender(
            Outbox(store.database, store.cipher),
            Poster(),
            allow_private=settings.webhook_allow_private,
            poll_s=settings.webhook_poll_s,
        ),
        rate_limits=RateLimits(
            settings.rate_limit_redis_url or settings.redis_url,
            {
                SUBMISSIONS: settings.submissions_per_minute,
                READS: settings.reads_per_minute,
                FAILED_LOGINS: settings.failed_logins_per_minute,
            },
        ),
        sources=KnownSources(source_ttl_s=settings.source_cache_s),
        news=News(store.last_events, every_s=settings.sse_poll_s),
        hub_threads=CapacityLimiter(HUB_THREADS),
    )


async def _parts(request: Request) -> ServiceParts:
    parts: ServiceParts = request.app.state.parts
    return parts


# Coroutines, these dependencies: FastAPI would send plain functions through a thread each.
Wiring = Annotated[ServiceParts, Depends(_parts)]


async def _job_id(job_id: Annotated[str, Path(description="as POST /v1/jobs returned it")]) -> str:
    """An id that cannot be one is unknown like any other, and never reaches SQL."""
    if not _ID.match(job_id):
        raise JobNotFound("There is no such job of yours.", "Check the id.")
    return job_id


JobId = Annotated[str, Depends(_job_id)]
