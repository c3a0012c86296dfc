"""What the worker's integration tests share. Knows no test."""

import time
from collections.abc import Callable
from typing import Any

from kvalign.config import ConversionConfig
from worker.jobs import Job
from worker.leases import Lease, Leases
from worker.store import JobStore

TOKEN = "hf_canary_of_the_worker_tests"
COMMIT = "0" * 40


def config(name: str = "out", **sections: Any) -> ConversionConfig:
    target = {"repo": f"alice/{name}"}
    return ConversionConfig.parse({"source": {"repo": "carol/tiny"}, "target": target, **sections})


def submit(store: JobStore, name: str = "out", tenant: str = "alice", **sections: Any) -> Job:
    return store.submit(tenant, config(name, **sections), source_commit=COMMIT, token=TOKEN).job


def claim(store: JobStore, owner: str = "worker", *, lease_s: float = 60, running_limit: int = 100) -> Lease:
    """Take the next job, which must be there."""
    lease = Leases(store, lease_s=lease_s, running_limit=running_limit).claim(owner)
    assert lease is not None
    return lease


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true answer of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return answer
