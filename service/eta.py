"""How long the running stage will still take, at its pace so far; must not guess about later stages."""

from datetime import datetime

from worker.jobs import Job, JobState
from worker.store import JobStore

_LEAST_S = 1.0  # of work seen, before a pace means anything


def stage_eta_s(store: JobStore, job: Job) -> float | None:
    """Seconds until the stage of a running job ends; None when that cannot be told."""
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
    event = store.newest_event(job.id, "stage", tenant=job.tenant)
    return event.at if event and event.data.get("status") == "started" else None
