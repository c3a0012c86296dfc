"""What the job page shows of a report: its numbers where report.json has the form we know, and every figure.

Measures nothing and loads no tensors. A report of another version is offered as files, with its pictures.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

from pydantic import ValidationError

from kvalign.report.schema import Report
from worker.store import JobStore

_REPORT = "report.json"
_FIGURES = "figures/"
_READ_BYTES = 4_000_000


@dataclass(frozen=True)
class Figure:
    """image, data  names of report files; data is empty when there is none"""

    image: str
    data: str
    caption: str


@dataclass(frozen=True)
class Card:
    """files  all that the report has; report is None when it is of a form that we do not know"""

    report: Report | None
    figures: list[Figure]
    files: list[str]


def report_card(store: JobStore, job_id: str, tenant: str) -> Card | None:
    """The card of one's own job; None before the stage 'report'. Raises JobNotFound."""
    names = store.report_files(job_id, tenant=tenant)
    if _REPORT not in names:
        return None
    report = _read(store.report_file(job_id, _REPORT, tenant=tenant))
    return Card(report, _figures(report, names), names)


def _read(content: bytes) -> Report | None:
    if len(content) > _READ_BYTES:
        return None
    try:
        return Report.model_validate_json(content)
    except ValidationError:
        return None


def _figures(report: Report | None, names: list[str]) -> list[Figure]:
    """In the report's order; only what is really there, wherever a report says that it would be."""
    if report is None:
        images = [name for name in names if name.startswith(_FIGURES) and name.endswith(".png")]
        return [Figure(name, "", PurePosixPath(name).stem.replace("_", " ")) for name in images]
    return [
        Figure(_FIGURES + one.image, _FIGURES + one.data if _FIGURES + one.data in names else "", one.caption)
        for one in report.figures
        if _FIGURES + one.image in names
    ]
