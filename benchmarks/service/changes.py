"""Writes what workers write of running jobs, at a steady rate, by the worker's own leases. A process of its own.

    python -m benchmarks.service.changes < plan.json

The plan: {database_url, secret_key, per_s, seconds, jobs: [[tenant, id]]}. Progress events in turn over all jobs, then
the end of each. Prints the last event of every job as JSON.
"""

import json
import sys
import time
from itertools import cycle, islice
from typing import Any

from worker.jobs import Job, JobResult, Progress, Stage
from worker.leases import Lease
from worker.store import JobStore

_FENCING = 1  # of jobs that filling.py stored as running


def main() -> None:
    plan: dict[str, Any] = json.load(sys.stdin)
    store = JobStore.open(plan["database_url"], plan["secret_key"])
    jobs = [store.get(job_id, tenant=tenant) for tenant, job_id in plan["jobs"]]
    leases = [Lease(store, job, _FENCING, 3600.0) for job in jobs]
    total = round(plan["per_s"] * plan["seconds"])
    began = time.monotonic()
    for number, lease in enumerate(islice(cycle(leases), total)):
        _sleep_until(began + number / plan["per_s"])
        lease.progress(Progress(Stage.CALIBRATE, number, total, "tokens"), tell=True)
    took_s = time.monotonic() - began
    for lease in leases:
        lease.succeed(JobResult(lease.job.config.target.repo, "0" * 40, "http://hub", 21.5, 0.019, 0.93))
    json.dump({"changes_per_s": round(total / took_s, 1), "last": _last_events(store, jobs)}, sys.stdout)
    store.close()


def _last_events(store: JobStore, jobs: list[Job]) -> dict[str, int]:
    return {job.id: store.events(job.id, tenant=job.tenant)[-1].sequence for job in jobs}


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    main()
