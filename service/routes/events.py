"""GET /v1/jobs/{id}/events: what happens to a job, live as Server-Sent Events or as a JSON page."""

import json
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Annotated

import anyio
from anyio import to_thread
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse, ServerSentEvent

from service.auth import CurrentCaller
from service.errors import ACCOUNT_RESPONSES, RequestRefused
from service.negotiation import preferred
from service.views import EventPage, event_view
from service.wiring import JobId, ServiceParts, Wiring
from worker.jobs import JobEvent

PAGE = 500
_LAST_WORDS_S = 3  # less than uvicorn waits for its requests
_EVENT_STREAM, _JSON = "text/event-stream", "application/json"

router = APIRouter(tags=["jobs"], responses=ACCOUNT_RESPONSES)


@router.get(
    "/v1/jobs/{job_id}/events",
    summary="Follow a job",
    response_class=JSONResponse,
    responses={
        200: {
            "description": "id = sequence, event = kind, data = JSON; ends after the state that ends the job",
            "model": EventPage,
            "content": {_EVENT_STREAM: {}},
        },
        204: {"description": "The job has ended, and nothing has happened since Last-Event-ID: do not come again."},
    },
)
def events(
    request: Request,
    job_id: JobId,
    caller: CurrentCaller,
    wiring: Wiring,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[int, Header(ge=0, le=2**31 - 1)] = 0,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="as Last-Event-ID, for pages")] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE, description="of a JSON page")] = PAGE,
) -> Response:
    """Replays what happened after `Last-Event-ID`, then goes on live. A JSON page has `limit` events at most."""
    kind = preferred(accept, [_EVENT_STREAM, _JSON])
    if kind is None:
        raise RequestRefused(
            406, "not_acceptable", f"Events come as {_EVENT_STREAM} or {_JSON}.", "Accept one of them."
        )
    follower = _Follower(wiring, job_id, caller.tenant, after=last_event_id or after)
    if kind == _JSON:
        page = EventPage(data=[event_view(event) for event in follower.read(limit)], has_more=follower.more_stored)
        return JSONResponse(page.model_dump(mode="json"))
    news = follower.read()  # before the stream begins, so that a foreign job is refused with 404
    if follower.ended and not news and follower.after:
        return Response(status_code=204)  # tells an EventSource that reconnects after the end to stop
    wiring.streams.check(caller.tenant)
    if request.state.is_head:  # a stream without a body would only stay open
        return Response(media_type=_EVENT_STREAM)
    stopping = anyio.Event()
    return EventSourceResponse(
        _stream(follower, news, stopping),
        ping=wiring.settings.sse_keepalive_s,
        sep="\n",
        send_timeout=60,
        shutdown_event=stopping,
        shutdown_grace_period=_LAST_WORDS_S,
    )


@dataclass
class _Follower:
    """Reads one job's events in order, each once.

    more_stored  whether the last read left events behind
    ended        whether the job has ended and all its events were read
    """

    wiring: ServiceParts
    job_id: str
    tenant: str
    after: int
    more_stored: bool = False
    ended: bool = False

    def read(self, limit: int = PAGE) -> list[JobEvent]:
        """What happened since the last call. Blocks on SQL; raises JobNotFound."""
        found, alive = self.wiring.store.follow(self.job_id, tenant=self.tenant, after=self.after, limit=limit + 1)
        news = found[:limit]
        self.after = news[-1].sequence if news else self.after
        self.more_stored = len(found) > limit
        self.ended = not alive and not self.more_stored
        return news


async def _stream(follower: _Follower, news: list[JobEvent], stopping: anyio.Event) -> AsyncIterator[ServerSentEvent]:
    """Streams read in threads of their own, so that many of them cannot starve the other routes.

    When the server stops, a stream ends as it should, and whoever reads it goes on elsewhere after its last event.
    """
    wiring = follower.wiring
    with wiring.streams.open(follower.tenant):
        while True:
            for event in news:
                data = json.dumps({"at": event.at.isoformat(), **event.data})
                yield ServerSentEvent(data, event=event.kind, id=str(event.sequence))
            if follower.ended or stopping.is_set():
                return
            if not follower.more_stored:
                await _first_of(wiring.news.after(follower.job_id, follower.after), stopping.wait())
            news = await to_thread.run_sync(follower.read, limiter=wiring.streams.threads)


async def _first_of(*waits: Awaitable[object]) -> None:
    """Return when one of them has; the others are given up."""

    async def one(wait: Awaitable[object]) -> None:
        await wait
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for wait in waits:
            group.start_soon(one, wait)
