"""Stores many jobs at once, as years of use would leave them. Writes through the schema's classes; measures nothing.

Of every thousand: 900 succeeded, 60 failed, 35 canceled, 5 wait. Besides these, one running job for each stream that is
to follow one. Each has its labels and events; half of them belong to one large account.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, cast

from sqlalchemy import Table, insert

from kvalign.config import ConversionConfig
from worker.jobs import JobState, Stage
from worker.schema import Base, EventRow, JobRow, LabelRow, TokenRow
from worker.store import JobStore, new_job_id

COMMIT = "0" * 40
_BATCH = 5000
_SHARES = (
    (0.900, JobState.SUCCEEDED),
    (0.960, JobState.FAILED),
    (0.995, JobState.CANCELED),
    (1.0, JobState.QUEUED),
)
_TEAMS = ("blue", "red", "green", "night")


@dataclass(frozen=True)
class Filled:
    """What was stored.

    of_tenant  ids of ended jobs by account, the oldest first
    running    (account, id) of jobs that run
    """

    of_tenant: dict[str, list[str]]
    running: list[tuple[str, str]]


def fill(store: JobStore, tenants: list[str], *, jobs: int, running: int) -> Filled:
    """Store `jobs` jobs over the year before now and `running` that run now, spread evenly over the tenants."""
    chance = random.Random(0)  # the same jobs every time
    now = datetime.now(UTC)
    filled = Filled({tenant: [] for tenant in tenants}, [])
    rows = _Rows(store)
    for number in range(jobs):
        at = now - timedelta(days=365) + timedelta(days=364) * number / jobs
        tenant = tenants[0] if chance.random() < 0.5 else chance.choice(tenants)
        state = next(state for share, state in _SHARES if chance.random() < share or share == 1.0)
        filled.of_tenant[tenant].append(rows.add(tenant, state, at, chance))
    for number in range(running):
        tenant = tenants[number % len(tenants)]
        filled.running.append((tenant, rows.add(tenant, JobState.RUNNING, now, chance)))
    rows.flush()
    return filled


class _Rows:
    """Rows that wait to be written, a batch at a time."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._token = store.cipher.encrypt(b"hf_bench").decode()
        self._template = _config().model_dump(mode="json")
        self._rows: dict[type[Base], list[dict[str, Any]]] = {JobRow: [], LabelRow: [], EventRow: [], TokenRow: []}

    def add(self, tenant: str, state: JobState, at: datetime, chance: random.Random) -> str:
        job_id = new_job_id(int(at.timestamp() * 1e9))
        labels = {"team": chance.choice(_TEAMS)}
        if chance.random() < 0.01:
            labels["release"] = f"r{chance.randrange(20)}"
        events = list(_events(state, at))
        self._rows[JobRow].append(_job(job_id, tenant, state, at, events, self._config_of(tenant, job_id, labels)))
        self._rows[LabelRow] += [{"job_id": job_id, "key": key, "value": value} for key, value in labels.items()]
        self._rows[EventRow] += [
            {"job_id": job_id, "sequence": sequence, "kind": kind, "at": moment, "data": data}
            for sequence, (kind, moment, data) in enumerate(events, 1)
        ]
        if state.alive:
            self._rows[TokenRow].append({"job_id": job_id, "ciphertext": self._token})
        if len(self._rows[JobRow]) >= _BATCH:
            self.flush()
        return job_id

    def flush(self) -> None:
        with self._store.database.write() as session:
            for table, rows in self._rows.items():
                if rows:
                    session.connection().execute(insert(cast(Table, table.__table__)), rows)
                    rows.clear()

    def _config_of(self, tenant: str, job_id: str, labels: dict[str, str]) -> dict[str, Any]:
        return {
            **self._template,
            "target": {**self._template["target"], "repo": f"{tenant}/{job_id}"},
            "labels": labels,
        }


def _config() -> ConversionConfig:
    return ConversionConfig.parse({"source": {"repo": "carol/tiny"}, "target": {"repo": "alice/out"}})


def _events(state: JobState, at: datetime) -> Iterator[tuple[str, datetime, dict[str, Any]]]:
    yield "state", at, {"state": "queued"}
    if state is JobState.QUEUED:
        return
    yield "state", at + timedelta(minutes=1), {"state": "running", "attempt": 1}
    yield "stage", at + timedelta(minutes=1), {"stage": "calibrate", "status": "started"}
    if state is not JobState.RUNNING:
        progress = {"stage": "calibrate", "done": 20_000, "total": 32_768, "unit": "tokens", "percent": 61.0}
        yield "progress", at + timedelta(minutes=4), progress
        yield "state", at + timedelta(minutes=9), {"state": state.value}


def _job(
    job_id: str, tenant: str, state: JobState, at: datetime, events: list[Any], config: dict[str, Any]
) -> dict[str, Any]:
    runs = state is JobState.RUNNING
    failed = {"code": "quality_gate", "message": "The mean KL is 0.08; the limit is 0.05.", "remedy": "Ask for less."}
    result = {"repo": config["target"]["repo"], "commit": COMMIT, "url": "http://hub", "ratio": 21.5}
    return {
        "id": job_id,
        "tenant": tenant,
        "state": state.value,
        "config": config,
        "identity": sha256(json.dumps([job_id]).encode()).hexdigest(),
        "source_commit": COMMIT,
        "created_at": at,
        "updated_at": events[-1][1],
        "queued_at": at,
        "claimed_at": None if state is JobState.QUEUED else at + timedelta(minutes=1),
        "stage": None if state is JobState.QUEUED else Stage.CALIBRATE.value,
        "done": 20_000 if runs else 0,
        "total": 32_768 if runs else 0,
        "unit": "tokens" if runs else "",
        "stage_seconds": {} if state is JobState.QUEUED else {"preflight": 1.2, "pull": 30.5},
        "timestamps": {data["state"]: moment.isoformat() for kind, moment, data in events if kind == "state"},
        "error": failed if state is JobState.FAILED else None,
        "result": {**result, "kl_mean": 0.019, "top1": 0.93} if state is JobState.SUCCEEDED else None,
        "attempts": 0 if state is JobState.QUEUED else 1,
        "losses": 0,
        "fencing": 1 if runs else 0,
        "lease_owner": "benchmark" if runs else None,
        "lease_expires_at": at + timedelta(days=1) if runs else None,
        "last_event": len(events),
        "log_events": 0,
        "target_begun": False,
    }
