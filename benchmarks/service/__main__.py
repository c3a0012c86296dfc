"""The service under load: submissions, lists and single jobs among 100,000, event streams, memory at rest.

    python -m benchmarks.service --json OUT [--database sqlite|postgresql] [--quick]

Real processes on one machine: API (one process, as `kvalign api` starts it), Redis, database, devhub, a worker for the
memory at rest, the load generator. All of them share the same cores. The worker is stopped before the load: it would
convert what is submitted.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environment import describe, say, write_json
from benchmarks.service.filling import fill
from benchmarks.service.machine import SOURCE, Machine, running_machine
from worker.store import JobStore

DATABASES = ("sqlite", "postgresql")
PACKAGES = ("kvalign", "fastapi", "starlette", "uvicorn", "sqlalchemy", "psycopg", "celery", "huggingface-hub")
UNITS = {
    "submit.per_s, submit.p99_ms": "accepted submissions a second, and milliseconds from the moment when a request was "
    "due until its answer had arrived, of all clients together, each at its own steady pace; every target is another",
    "submit.saturated": "the same clients, each as soon as its last request was answered; from sending to answer",
    "list, get": "milliseconds from sending to answer; setup.readers clients, each as soon as its last was answered",
    "streams.lost_events, doubled_events": "events in the database that a stream did not bring, or brought again",
    "streams.delay_ms": "from the moment in an event to its arrival at the client",
    "memory": "resident bytes (RSS) / 1e6 of the API's process and of the worker's parent, started and then idle for a "
    "few seconds; uss is what is theirs alone (USS); after_load of the API at the end of everything",
    "load_cpu_s": "seconds of processor time that the load generator took itself",
}


@dataclass(frozen=True)
class Setup:
    """How much of everything.

    clients         that submit; offered_per_s of all of them together
    readers         clients that list and get
    changes_per_s   events written while streams are open
    """

    jobs: int = 100_000
    tenants: int = 25
    clients: int = 50
    offered_per_s: float = 110.0
    submit_s: float = 20.0
    saturated_s: float = 10.0
    readers: int = 4
    read_s: float = 15.0
    streams: int = 500
    stream_s: float = 20.0
    changes_per_s: float = 100.0
    rest_s: float = 5.0


QUICK = Setup(1000, 5, 5, 20.0, 1.0, 1.0, 2, 1.0, 20, 1.0, 40.0, 1.0)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every process started here is ended
    arguments = _arguments()
    setup = QUICK if arguments.quick else Setup()
    databases = {}
    for database in [arguments.database] if arguments.database else DATABASES:
        say(f"{database}: starting")
        with tempfile.TemporaryDirectory(prefix="kvalign-bench-", ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o755)  # PostgreSQL runs as somebody else
            databases[database] = measured(Path(folder), database, setup)
    result = {
        "benchmark": "service",
        **describe(PACKAGES),
        "units": UNITS,
        "setup": asdict(setup),
        "databases": databases,
    }
    write_json(arguments.json, result)


def measured(folder: Path, database: str, setup: Setup) -> dict[str, Any]:
    """Everything with one kind of database."""
    tenants = [f"tenant{number}" for number in range(setup.tenants)]
    settings = {
        "KVALIGN_ALIVE_PER_TENANT": "100000",
        "KVALIGN_STREAMS_PER_TENANT": str(-(-setup.streams // setup.tenants)),
    }
    with running_machine(folder, database, tenants, settings) as machine:
        memory = _memory_at_rest(machine, setup.rest_s)
        say(f"{database}: {memory}")
        with closing(JobStore.open(machine.database_url, machine.secret_key)) as store:
            began = time.monotonic()
            filled = fill(store, tenants, jobs=setup.jobs, running=setup.streams)
        say(f"{database}: {setup.jobs} jobs stored in {time.monotonic() - began:.0f} s")
        plan = {"host": "127.0.0.1", "port": int(machine.url.rpartition(":")[2]), "tenants": tenants, "source": SOURCE}
        reads = _load(
            {**plan, "phase": "reads", "clients": setup.readers, "seconds": setup.read_s, "ids": filled.of_tenant}
        )
        say(f"{database}: {reads}")
        submit = _submissions(plan, setup)
        say(f"{database}: {submit}")
        streams = _streams(machine, plan, setup, filled.running)
        say(f"{database}: {streams}")
        memory["after_load"] = _megabytes(machine.api)
    return {
        "submit": submit,
        "list": {**reads["lists_ms"], "p95_ms": reads["lists_ms"]["p95"], "by_kind_ms": reads["ms"]},
        "get": {"p95_ms": reads["ms"]["get"]["p95"], **reads["ms"]["get"]},
        "streams": streams,
        "memory": memory,
    }


def _memory_at_rest(machine: Machine, rest_s: float) -> dict[str, Any]:
    with machine.worker() as worker:
        time.sleep(rest_s)
        api, parent = _megabytes(machine.api), _megabytes(worker)
        pool = [_megabytes(child) for child in worker.children()]
    return {
        "api_mb": api["rss"],
        "worker_mb": parent["rss"],
        "api": api,
        "worker": parent,
        "worker_pool": pool,
    }


def _megabytes(process: psutil.Process) -> dict[str, float]:
    held = process.memory_full_info()
    return {"rss": round(held.rss / 1e6, 1), "uss": round(held.uss / 1e6, 1)}


def _submissions(plan: dict[str, Any], setup: Setup) -> dict[str, Any]:
    clients = {**plan, "clients": setup.clients}
    paced = _load(
        {**clients, "phase": "paced", "name": "paced", "per_s": setup.offered_per_s, "seconds": setup.submit_s}
    )
    saturated = _load({**clients, "phase": "saturated", "name": "saturated", "seconds": setup.saturated_s})
    return {**_of_submissions(paced), "saturated": _of_submissions(saturated)}


def _of_submissions(measured: dict[str, Any]) -> dict[str, Any]:
    taken = measured["ms"]["submit"]
    return {
        "per_s": measured["per_s"],
        **{f"{name}_ms": value for name, value in taken.items()},
        "refused": measured["refused"],
        "refusals": measured["refusals"],
        "load_cpu_s": measured["cpu_s"],
    }


def _streams(machine: Machine, plan: dict[str, Any], setup: Setup, jobs: list[tuple[str, str]]) -> dict[str, Any]:
    """Open all streams, then let the jobs change until each has ended; compare what came with what is stored."""
    cpu = sum(machine.api.cpu_times()[:2])
    with _started("load", {**plan, "phase": "streams", "jobs": jobs, "seconds": setup.stream_s + 120}) as followers:
        assert followers.stderr is not None
        began = time.monotonic()
        while (line := followers.stderr.readline()).strip() != "open":
            if not line:
                raise RuntimeError("the streams did not open")
            say(line.rstrip())
        opening_s = time.monotonic() - began
        changes = {
            "database_url": machine.database_url,
            "secret_key": machine.secret_key,
            "per_s": setup.changes_per_s,
            "seconds": setup.stream_s,
            "jobs": jobs,
        }
        with _started("changes", changes) as writer:
            written = _answer(writer)
        followed = _answer(followers)
    seen, last = followed["seen"], written["last"]
    return {
        "open": len(jobs),
        "lost_events": sum(len(set(range(1, last[job_id] + 1)) - set(seen[job_id])) for job_id in last),
        "doubled_events": sum(len(seen[job_id]) - len(set(seen[job_id])) for job_id in last),
        "events": sum(last.values()),
        "changes_per_s": written["changes_per_s"],
        "delay_ms": followed["delay_ms"],
        "broken": followed["broken"],
        "unfinished": followed["unfinished"],
        "opening_s": round(opening_s, 1),
        "api_cpu_s": round(sum(machine.api.cpu_times()[:2]) - cpu, 1),
        "load_cpu_s": followed["cpu_s"],
    }


def _load(plan: dict[str, Any]) -> dict[str, Any]:
    with _started("load", plan) as process:
        return _answer(process)


def _started(name: str, plan: dict[str, Any]) -> "subprocess.Popen[str]":
    """One of the programs beside this one, with its plan."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.service.{name}"],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if plan.get("phase") == "streams" else None,
        text=True,
    )
    assert process.stdin is not None
    json.dump(plan, process.stdin)
    process.stdin.close()
    return process


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    answer = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"{process.args} failed with status {process.returncode}")
    return dict(json.loads(answer))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--database", choices=DATABASES, help="this one alone; both unless given")
    parser.add_argument("--quick", action="store_true", help="a little of everything: does it run at all?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
