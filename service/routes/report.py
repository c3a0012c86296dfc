"""GET /v1/jobs/{id}/report and its files: the measured report of a job, whether it passed its gate or not."""

from mimetypes import guess_type

from fastapi import APIRouter, Response

from service.auth import CurrentCaller
from service.errors import ACCOUNT_RESPONSES, RequestRefused
from service.wiring import JobId, Wiring

REPORT = "report.json"

router = APIRouter(prefix="/v1/jobs/{job_id}/report", tags=["reports"], responses=ACCOUNT_RESPONSES)


@router.get("", summary="The report as JSON", response_class=Response)
def report(job_id: JobId, caller: CurrentCaller, wiring: Wiring) -> Response:
    return report_file(job_id, REPORT, caller, wiring)


@router.get("/{file:path}", summary="One file of the report: the card, a figure", response_class=Response)
def report_file(job_id: JobId, file: str, caller: CurrentCaller, wiring: Wiring) -> Response:
    names = wiring.store.report_files(job_id, tenant=caller.tenant)
    if file not in names:
        state = wiring.store.get(job_id, tenant=caller.tenant).state
        raise RequestRefused(
            404,
            "report_not_found",
            f"Job {job_id} has no report file '{file[:200]}'; it is {state}.",
            f"It has: {', '.join(names)}." if names else "The report is written after the stage 'validate'.",
        )
    content = wiring.store.report_file(job_id, file, tenant=caller.tenant)
    return Response(content, media_type=_media_type(file), headers={"Content-Security-Policy": "sandbox"})


def _media_type(file: str) -> str:
    """By the name; what a browser could run is handed over as plain bytes."""
    kind = guess_type(file)[0]
    if kind in {"application/json", "image/png"}:
        return kind
    return "text/markdown" if file.endswith(".md") else "application/octet-stream"
