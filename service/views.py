"""What the API answers, as types: the shapes of a job, an event, a page. Must not know SQL or HTTP routing."""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvalign.config import ConversionConfig, WebhookEvent
from worker.jobs import ErrorCode, Job, JobEvent, JobState, Stage
from worker.outbox import Delivery


class JobErrorView(BaseModel):
    code: ErrorCode
    message: str
    remedy: str


class JobResultView(BaseModel):
    """What a succeeded job published."""

    repo: str
    commit: str
    url: str
    ratio: float = Field(description="bytes of the uncompressed cache / bytes at rest, all side information in")
    kl_mean: float = Field(description="nats per token against the uncompressed model, on held-out text")
    top1: float = Field(description="share of positions whose most likely next token is the same")


class Links(BaseModel):
    self: str
    events: str
    report: str
    cancel: str
    retry: str
    deliveries: str


class JobView(BaseModel):
    """One conversion request and its life."""

    id: str
    state: JobState
    stage: Stage | None = Field(description="the step that runs, or ran last")
    percent: float | None = Field(description="of the stage; null when its length cannot be known")
    done: int | None = Field(description="of the stage, in `unit`")
    total: int | None = Field(description="of the stage, in `unit`; null when it cannot be known")
    unit: str | None = Field(description="what done and total count, such as bytes or tokens")
    bytes_done: int | None = Field(description="set while a stage moves bytes")
    bytes_total: int | None = Field(description="set while a stage moves bytes")
    eta_s: float | None = Field(description="seconds until the stage ends, at its pace so far")
    place_in_queue: int | None = Field(description="1 is next; null unless queued")
    attempts: int = Field(description="how often a worker began it")
    created_at: datetime
    updated_at: datetime
    timestamps: dict[str, datetime] = Field(description="when each state was first entered")
    stage_seconds: dict[str, float] = Field(description="of finished stages, summed over attempts")
    labels: dict[str, str]
    source_commit: str
    config: ConversionConfig
    error: JobErrorView | None
    result: JobResultView | None
    links: Links


class SubmittedView(JobView):
    """A job, and what is told of it this once."""

    webhook_secret: str | None = Field(
        default=None, description="made for this job's webhook, which named none; shown this once"
    )


class WebhookView(BaseModel):
    """Whom a job's webhook tells."""

    url: str
    events: list[WebhookEvent]
    secret: str | None = Field(description="only if it was made now; shown this once")


class AttemptView(BaseModel):
    """An attempt at a delivery that came to an end."""

    attempt: int
    at: datetime
    status: int | None = Field(description="of the receiver's answer; null when it gave none")
    error: str = Field(description="why it does not count as delivered; empty when it does")


class DeliveryView(BaseModel):
    """One message to a job's webhook."""

    id: str = Field(description="the webhook-id that the receiver sees")
    sequence: int = Field(description="of the event it tells of; the last one of a page is the next one's `after`")
    type: str = Field(description="job. and the state that was entered")
    state: Literal["pending", "delivered", "failed"]
    created_at: datetime
    next_at: datetime | None = Field(description="when it is sent again; null once delivered or given up")
    attempts: list[AttemptView]


class DeliveryPage(BaseModel):
    data: list[DeliveryView]
    has_more: bool


class JobPage(BaseModel):
    data: list[JobView]
    has_more: bool


class EventView(BaseModel):
    id: int = Field(description="grows within a job; send it back as Last-Event-ID")
    kind: str = Field(description="state, stage, progress or log")
    at: datetime
    data: dict[str, Any]


class EventPage(BaseModel):
    data: list[EventView]
    has_more: bool


def job_view(job: Job, *, place_in_queue: int | None = None, eta_s: float | None = None) -> JobView:
    progress = job.progress
    moves_bytes = progress is not None and progress.unit == "bytes"
    total = (progress.total or None) if progress else None
    path = f"/v1/jobs/{job.id}"
    return JobView(
        id=job.id,
        state=job.state,
        stage=progress.stage if progress else None,
        percent=progress.percent if progress else None,
        done=progress.done if progress else None,
        total=total,
        unit=(progress.unit or None) if progress else None,
        bytes_done=progress.done if progress and moves_bytes else None,
        bytes_total=total if moves_bytes else None,
        eta_s=eta_s,
        place_in_queue=place_in_queue,
        attempts=job.attempts,
        created_at=job.created_at,
        updated_at=job.updated_at,
        timestamps=job.timestamps,
        stage_seconds=job.stage_seconds,
        labels=job.config.labels,
        source_commit=job.source_commit,
        config=job.config,
        error=JobErrorView(**vars(job.error)) if job.error else None,
        result=JobResultView(**vars(job.result)) if job.result else None,
        links=Links(
            self=path,
            events=f"{path}/events",
            report=f"{path}/report",
            cancel=f"{path}/cancel",
            retry=f"{path}/retry",
            deliveries=f"{path}/deliveries",
        ),
    )


def delivery_view(delivery: Delivery) -> DeliveryView:
    return DeliveryView(
        id=delivery.id,
        sequence=delivery.sequence,
        type=delivery.type,
        state=delivery.state,
        created_at=delivery.created_at,
        next_at=delivery.next_at,
        attempts=[AttemptView(**entry) for entry in delivery.log],
    )


def event_view(event: JobEvent) -> EventView:
    return EventView(id=event.sequence, kind=event.kind, at=event.at.astimezone(UTC), data=event.data)
