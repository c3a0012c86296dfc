"""The routes that make, read, cancel and retry jobs: parse, call, map. What may be submitted is in submission.py."""

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, BackgroundTasks, Header, Query, Response

from kvalign.config import ConversionConfig
from service.auth import Caller, CurrentCaller, Submitter
from service.errors import ACCOUNT_RESPONSES
from service.eta import stage_eta_s
from service.submission import announce, cancel_job, retry_job, submit_job
from service.views import JobPage, JobView, SubmittedView, job_view
from service.wiring import JobId, ServiceParts, Wiring
from worker.jobs import Job, JobState
from worker.store import Submission

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ACCOUNT_RESPONSES)

LOCATION = {"description": "the path of the job", "required": True, "schema": {"type": "string"}}

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r"^[\x21-\x7e]{1,200}$",
        description="a repeat with the same key and body returns the first answer's job",
    ),
]


@router.post(
    "",
    status_code=202,
    summary="Submit a conversion",
    responses={
        200: {
            "model": SubmittedView,
            "description": "An earlier request already led to this job.",
            "headers": {"Location": LOCATION},
        },
        202: {"headers": {"Location": LOCATION}},
    },
)
async def submit(
    config: ConversionConfig,
    caller: Submitter,
    wiring: Wiring,
    response: Response,
    afterwards: BackgroundTasks,
    idempotency_key: IdempotencyKey = None,
) -> SubmittedView:
    submission, view = await to_thread.run_sync(
        _submit, wiring, caller, config, idempotency_key, limiter=wiring.hub_threads
    )
    if submission.created:
        # After the answer: the job is stored, and a broker that is away must not keep the caller waiting.
        afterwards.add_task(announce, wiring, submission.job)
    else:
        response.status_code = 200
    response.headers["Location"] = f"/v1/jobs/{submission.job.id}"
    return SubmittedView(**dict(view), webhook_secret=submission.webhook_secret)


def _submit(
    wiring: ServiceParts, caller: Caller, config: ConversionConfig, idempotency_key: str | None
) -> tuple[Submission, JobView]:
    submission = submit_job(wiring, caller, config, idempotency_key)
    return submission, _view(wiring, submission.job)


@router.get("", summary="Your jobs, newest first")
def find(
    caller: CurrentCaller,
    wiring: Wiring,
    state: JobState | None = None,
    label: Annotated[str | None, Query(pattern=r"^[^\x00]{1,265}$", description="KEY, or KEY=VALUE")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(pattern="^[a-z0-9_]{1,64}$", description="last id of the page before")] = None,
) -> JobPage:
    page = wiring.store.find(tenant=caller.tenant, state=state, label=label, limit=limit, after=after)
    places = wiring.store.places_in_queue([job.id for job in page.jobs if job.state is JobState.QUEUED])
    return JobPage(data=[job_view(job, place_in_queue=places.get(job.id)) for job in page.jobs], has_more=page.has_more)


@router.get("/{job_id}", summary="One job")
def get(job_id: JobId, caller: CurrentCaller, wiring: Wiring) -> JobView:
    job = wiring.store.get(job_id, tenant=caller.tenant)
    return _view(wiring, job, eta_s=stage_eta_s(wiring.store, job))


@router.post("/{job_id}/cancel", summary="Stop a job, in whichever stage it is")
def cancel(job_id: JobId, caller: CurrentCaller, wiring: Wiring) -> JobView:
    return _view(wiring, cancel_job(wiring, caller, job_id))


@router.post("/{job_id}/retry", status_code=202, summary="Go on with a failed or canceled job")
def retry(job_id: JobId, caller: Submitter, wiring: Wiring, afterwards: BackgroundTasks) -> JobView:
    """Resumes after the last finished stage, with the token of this request."""
    job = retry_job(wiring, caller, job_id)
    afterwards.add_task(announce, wiring, job)
    return _view(wiring, job)


def _view(wiring: ServiceParts, job: Job, *, eta_s: float | None = None) -> JobView:
    place = wiring.store.place_in_queue(job.id) if job.state is JobState.QUEUED else None
    return job_view(job, place_in_queue=place, eta_s=eta_s)
