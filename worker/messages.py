"""What a worker and its converting child say to each other: one JSON object in, JSON lines out. Pure data.

The child reads hostile files, so the worker believes nothing of its output that does not fit these types.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from worker.jobs import ErrorCode, Stage

ConvertStage = Literal[Stage.CALIBRATE, Stage.ALIGN, Stage.FIT, Stage.VALIDATE, Stage.REPORT]
UNIT_CHARACTERS = 60

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class ChildSpec(_Message):
    """What to convert; paths are absolute. None as a text path means the builtin text.

    parent_pid  whose death the child must not outlive
    """

    parent_pid: int
    source_dir: str
    out_dir: str
    work_dir: str
    config: dict[str, Any]
    source_commit: str
    calibration_path: str | None
    validation_path: str | None


class ProgressMessage(_Message):
    kind: Literal["progress"] = "progress"
    stage: ConvertStage
    done: Count
    total: Count
    unit: str = Field(max_length=UNIT_CHARACTERS)


class StageDoneMessage(_Message):
    kind: Literal["stage_done"] = "stage_done"
    stage: ConvertStage
    seconds: float = Field(ge=0)


class Summary(_Message):
    """The numbers of report.json that a job's result shows."""

    ratio: float
    kl_mean: float
    top1: float


class ResultMessage(_Message):
    kind: Literal["result"] = "result"
    summary: Summary


class ErrorMessage(_Message):
    kind: Literal["error"] = "error"
    code: ErrorCode
    message: str
    remedy: str = ""


Message = ProgressMessage | StageDoneMessage | ResultMessage | ErrorMessage

_any_message: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse_message(line: bytes) -> Message | None:
    """The message in a line of a child's output; None for anything else."""
    try:
        return _any_message.validate_json(line)
    except ValidationError:
        return None
