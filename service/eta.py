"""How long the running stage will still take, at its pace so far; must not guess about later stages."""

from datetime import datetime

from worker.jobs import Job, JobEvent, JobState
from worker.store import JobStore

_PAGE = 500
_LEAST_S = 1.0  # of work seen, before a pace means anything


def stage_eta_s(store: JobStore, job: Job) -> float | None:
    """Seconds until the stage of a running job ends; None when that cannot be told. Reads the job's events."""
    progress = job.progress
    if job.state is not JobState.RUNNING or not progress or not progress.total or not progress.done:
        return None
    began = _stage_began(store, job)
    if began is None:
        return None
    worked_s = (job.updated_at - began).total_seconds()
    if worked_s < _LEAST_S:
        return None
    left_s = worked_s * (progress.total - progress.done) / progress.done
    return round(max(0.0, left_s - (store.now() - job.updated_at).total_seconds()), 1)


def _stage_began(store: JobStore, job: Job) -> datetime | None:
    """When the stage was started last: an attempt may have started it before."""
    began, after = None, 0
    while True:
        events = store.events(job.id, tenant=job.tenant, after=after, limit=_PAGE)
        for event in events:
            if _starts_a_stage(event):
                began = event.at
        if len(events) < _PAGE:
            return began
        after = events[-1].sequence


def _starts_a_stage(event: JobEvent) -> bool:
    return event.kind == "stage" and event.data.get("status") == "started"
