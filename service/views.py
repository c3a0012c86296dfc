"""What the API answers, as types: the shapes of a job, an event, a page. Must not know SQL or HTTP routing."""

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, Field

from kvalign.config import ConversionConfig
from worker.jobs import ErrorCode, Job, JobEvent, JobState, Stage


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
        ),
    )


def event_view(event: JobEvent) -> EventView:
    return EventView(id=event.sequence, kind=event.kind, at=event.at.astimezone(UTC), data=event.data)
