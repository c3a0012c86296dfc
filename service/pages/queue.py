"""GET /: one's own jobs, newest first, as GET /v1/jobs finds them."""

from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response

from service.pages.rendering import page
from service.pages.session import PageCaller
from service.routes import jobs
from service.wiring import Wiring
from worker.jobs import JobState

router = APIRouter(include_in_schema=False)

_ROWS = 25


@router.get("/")
def queue(
    caller: PageCaller,
    wiring: Wiring,
    state: JobState | Literal[""] = "",
    label: Annotated[str, Query(max_length=265)] = "",
    after: Annotated[str, Query(pattern="^[a-z0-9_]{0,64}$")] = "",
) -> Response:
    found = jobs.find(
        caller, wiring, state=state or None, label=label.strip() or None, limit=_ROWS, after=after or None
    )
    chosen = {name: value for name, value in (("state", state), ("label", label.strip())) if value}
    older = urlencode({**chosen, "after": found.data[-1].id}) if found.has_more else ""
    return page(
        "queue.html",
        tenant=caller.tenant,
        jobs=found.data,
        states=list(JobState),
        chosen=chosen,
        newest=urlencode(chosen),
        older=older,
        is_later_page=bool(after),
    )
