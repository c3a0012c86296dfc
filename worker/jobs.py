"""The words of a job: states, stages, error codes, records. Pure data; must not know SQL, Celery or the Hub."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from kvalign.config import ConversionConfig
from kvalign.errors import KvalignError


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"  # stored, waiting for a worker
    RUNNING = "running"  # a worker holds its lease
    CANCELLING = "cancelling"  # running, and asked to stop
    SUCCEEDED = "succeeded"  # published, and read back
    FAILED = "failed"  # ended with an error code; may be retried
    CANCELED = "canceled"  # ended because its owner asked; may be retried

    @property
    def alive(self) -> bool:
        return self in {JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING}


class Stage(StrEnum):
    """A step of the pipeline, in order. The converting child does calibrate to report; its parent the rest."""

    PREFLIGHT = "preflight"
    PULL = "pull"
    CALIBRATE = "calibrate"
    ALIGN = "align"
    FIT = "fit"
    VALIDATE = "validate"
    REPORT = "report"
    PUBLISH = "publish"


class ErrorCode(StrEnum):
    """Why a job failed, or a request was refused. The enum is the contract: values are never renamed."""

    SOURCE_NOT_FOUND = "source_not_found"
    SOURCE_FORBIDDEN = "source_forbidden"
    SOURCE_GATED = "source_gated"
    SOURCE_UNSUPPORTED = "source_unsupported"
    SOURCE_INVALID = "source_invalid"
    WEIGHTS_UNSAFE = "weights_unsafe"
    DATASET_INVALID = "dataset_invalid"
    CONFIG_INVALID = "config_invalid"
    DISK_FULL = "disk_full"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    QUALITY_GATE = "quality_gate"
    TARGET_EXISTS = "target_exists"
    TARGET_FORBIDDEN = "target_forbidden"
    HUB_UNAVAILABLE = "hub_unavailable"
    WORKER_LOST = "worker_lost"
    CANCELED = "canceled"
    INTERNAL = "internal"


@dataclass(frozen=True)
class JobError:
    code: ErrorCode
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: KvalignError) -> "JobError":
        return cls(ErrorCode(error.code), error.message, error.remedy)


@dataclass(frozen=True)
class JobResult:
    """What a succeeded job published."""

    repo: str
    commit: str
    url: str
    ratio: float
    kl_mean: float
    top1: float


@dataclass(frozen=True)
class Progress:
    """How far the running stage is; total 0 when it cannot be known."""

    stage: Stage
    done: int = 0
    total: int = 0
    unit: str = ""

    @property
    def percent(self) -> float | None:
        return round(100 * self.done / self.total, 1) if self.total else None


@dataclass(frozen=True)
class Origin:
    """The request that a job was asked for by, so that its log and its trace go on from there.

    request_id   of the answer to it
    address      that it came from; known while it is answered, and to the audit log
    traceparent  where that request stands in its trace (W3C Trace Context); empty when nothing traces
    """

    request_id: str = ""
    address: str = ""
    traceparent: str = ""


NO_ORIGIN = Origin()


@dataclass(frozen=True)
class Job:
    """One conversion request and its life, as read from the store.

    stage_seconds  finished stages only, summed over attempts
    timestamps     first time each state was entered; keys are JobState values
    attempts       how often a worker began it
    """

    id: str
    tenant: str
    state: JobState
    config: ConversionConfig
    source_commit: str
    created_at: datetime
    updated_at: datetime
    progress: Progress | None = None
    attempts: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    timestamps: dict[str, datetime] = field(default_factory=dict)
    error: JobError | None = None
    result: JobResult | None = None
    origin: Origin = NO_ORIGIN


@dataclass(frozen=True)
class JobEvent:
    """One thing that happened to a job. `sequence` grows by one within a job: the SSE id.

    kind  state | stage | progress | log
    data  JSON-ready; never a token
    """

    job_id: str
    sequence: int
    kind: str
    at: datetime
    data: dict[str, Any]
