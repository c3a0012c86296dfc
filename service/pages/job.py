"""The page of one job: what it does, what it said, its report card; and the buttons that cancel and retry it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, BackgroundTasks, Header, Query, Request, Response
from fastapi.responses import RedirectResponse

from service.pages.card import report_card
from service.pages.rendering import page
from service.pages.session import PageCaller, PostedForm
from service.routes import events as events_route
from service.routes import jobs
from service.routes import report as report_route
from service.views import JobView
from service.wiring import JobId, ServiceParts, Wiring
from service.words import in_words, printable
from worker.jobs import JobEvent, JobState, Stage

router = APIRouter(prefix="/jobs/{job_id}", include_in_schema=False)

_LINES_SHOWN = 300

EventNumber = Annotated[int, Query(ge=0, le=2**31 - 1)]


@dataclass(frozen=True)
class StageRow:
    """One step of the pipeline. `state` is done, waiting, not begun, or the job's own where that is."""

    name: str
    state: str
    seconds: float | None
    share: float


@dataclass(frozen=True)
class LogLine:
    number: int
    at: datetime
    kind: str
    text: str


@router.get("")
def job_page(job_id: JobId, caller: PageCaller, wiring: Wiring) -> Response:
    job = jobs.get(job_id, caller, wiring)
    happened = _events(wiring, job_id, caller.tenant)
    lines = [line for line in map(_line, happened) if line.text]
    return page(
        "job.html",
        tenant=caller.tenant,
        job=job,
        stages=stage_rows(job),
        lines=lines[-_LINES_SHOWN:],
        left_out=max(0, len(lines) - _LINES_SHOWN),
        last_event=happened[-1].sequence if happened else 0,
        card=report_card(wiring.store, job_id, caller.tenant),
    )


@router.post("/cancel")
def cancel(form: PostedForm, job_id: JobId, caller: PageCaller, wiring: Wiring) -> Response:
    return _back_to(jobs.cancel(job_id, caller, wiring))


@router.post("/retry")
def retry(form: PostedForm, job_id: JobId, caller: PageCaller, wiring: Wiring, afterwards: BackgroundTasks) -> Response:
    return _back_to(jobs.retry(job_id, caller, wiring, afterwards))


@router.get("/events")
def events(
    request: Request,
    job_id: JobId,
    caller: PageCaller,
    wiring: Wiring,
    last_event_id: Annotated[int, Header(ge=0, le=2**31 - 1)] = 0,
    after: EventNumber = 0,
) -> Response:
    """The API's stream, for who has the cookie. `after` is what the page shows already."""
    return events_route.events(request, job_id, caller, wiring, "text/event-stream", last_event_id, after)


@router.get("/report/{file:path}")
def report_file(job_id: JobId, file: str, caller: PageCaller, wiring: Wiring) -> Response:
    return report_route.report_file(job_id, file, caller, wiring)


def stage_rows(job: JobView) -> list[StageRow]:
    """Every stage in order, with the share of the time that it took of all that was spent so far."""
    spent = sum(job.stage_seconds.values())
    return [
        StageRow(
            name=stage,
            state=_state_of(stage, job),
            seconds=job.stage_seconds.get(stage),
            share=job.stage_seconds.get(stage, 0.0) / spent if spent else 0.0,
        )
        for stage in Stage
    ]


def _state_of(stage: Stage, job: JobView) -> str:
    if stage is job.stage and job.state not in {JobState.SUCCEEDED, JobState.QUEUED}:
        return job.state
    if stage in job.stage_seconds:
        return "done"
    return "waiting" if job.state.alive else "not begun"


def _events(wiring: ServiceParts, job_id: str, tenant: str) -> list[JobEvent]:
    """All of them: a job has some hundreds, and the store keeps only so many of its log lines."""
    found: list[JobEvent] = []
    while news := wiring.store.events(job_id, tenant=tenant, after=found[-1].sequence if found else 0):
        found += news
    return found


def _line(event: JobEvent) -> LogLine:
    """Progress is left out: the stages show it."""
    if event.kind == "log":
        text = "\n".join(printable(str(line)) for line in event.data.get("lines", []))
    else:
        text = "" if event.kind == "progress" else in_words(event.kind, event.data)
    return LogLine(event.sequence, event.at, event.kind, text)


def _back_to(job: JobView) -> Response:
    return RedirectResponse(f"/jobs/{job.id}", status_code=303)
