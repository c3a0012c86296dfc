"""What must hold once a soak is over; stops the topology to see what stays behind."""

import contextlib
import itertools
import re
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from soak_jobs import Clients
from topology import FINAL, Topology, alive

SWEPT_WITHIN_S = 30.0
TRACEBACK = re.compile(r"^(\w[\w.]*(?:Error|Exception|Lost|Away|Refused))\b", re.MULTILINE)


def verdict(topology: Topology, clients: Clients) -> dict[str, Any]:
    """Counts, and `violations` in words."""
    jobs = [{**topology.caller(job["tenant"]).job(job), "tenant": job["tenant"]} for job in clients.jobs]
    states = Counter(job["state"] for job in jobs)
    violations = [f"{job['id']} is {job['state']}" for job in jobs if job["state"] not in FINAL]
    violations += _wrongly_published(topology, jobs)
    violations += [f"workspace {name} is left" for name in _workspaces_left(topology)]
    violations += [f"an API answered wrongly: {text}" for text in clients.trouble]
    lost_s = [seconds for job in jobs for seconds in _waits_after_a_loss(topology, job)]
    errors = Counter(job["error"]["code"] for job in jobs if job["error"])
    violations += _survivors(topology)
    violations += [f"a token is in {place}" for place in _places_of_tokens(topology)]
    return {
        "jobs": dict(states),
        "errors": dict(errors),
        "attempts": sum(job["attempts"] for job in jobs),
        "most_attempts": max(job["attempts"] for job in jobs),
        "queued_after_a_loss_s": {"count": len(lost_s), "max": round(max(lost_s, default=0.0), 1)},
        "published_by_jobs_that_did_not_succeed": sum(
            len(topology.commits_of(job)) for job in jobs if job["state"] != "succeeded"
        ),
        "requests_passed_over": sum(len(topology.caller(name).passed_over) for name in topology.tokens),
        "exceptions_logged": dict(Counter(TRACEBACK.findall(topology.logs())).most_common(20)),
        "violations": violations,
    }


def _wrongly_published(topology: Topology, jobs: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for job in jobs:
        commits = topology.commits_of(job)
        if job["state"] == "succeeded" and commits != [job["result"]["commit"]]:
            wrong.append(f"{job['id']} succeeded with {job['result']['commit']}; its commits are {commits}")
        if len(commits) > 1:
            wrong.append(f"{job['id']} made {len(commits)} commits")
    return wrong


def _workspaces_left(topology: Topology) -> list[str]:
    """Failed jobs keep theirs for KVALIGN_FAILED_KEPT_S, which is short here."""
    deadline = time.monotonic() + SWEPT_WITHIN_S
    while topology.workspaces() and time.monotonic() < deadline:
        time.sleep(0.5)
    return topology.workspaces()


def _waits_after_a_loss(topology: Topology, job: dict[str, Any]) -> list[float]:
    """Seconds in the queue of jobs that the sweeper took from a vanished worker; a free slot is waited for, too."""
    events = [event for event in topology.caller(job["tenant"]).events(job) if event["kind"] == "state"]
    waits = []
    for event, after in itertools.pairwise(events):
        if event["data"].get("reason") == "worker_lost" and after["data"]["state"] == "running":
            at, again = (datetime.fromisoformat(each["at"]) for each in (event, after))
            waits.append((again - at).total_seconds())
    return waits


def _survivors(topology: Topology) -> list[str]:
    """End everything as an init system does, and see who is still there."""
    found = []
    topology.see_workers()
    for part in (*topology.workers, *topology.apis):
        family = part.family()
        try:
            status = part.stop(60)
        except Exception as error:  # whatever it is, it did not stop
            status = -1
            found.append(f"{part.name} does not stop ({type(error).__name__})")
        if status != 0:
            found.append(f"{part.name} ended with status {status}")
        time.sleep(0.5)
        found += [f"process {process.pid} of {part.name} survives" for process in alive(family)]
    return found + [f"process {pid} survives: {words[:200]}" for pid, words in _ours(topology)]


def _ours(topology: Topology) -> list[tuple[int, str]]:
    """Processes whose command line or environment names our folder, but for the Hub and the databases."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            mentions = f"{words} {process.environ()}"
            if str(topology.folder) in mentions and "devhub" not in words and "redis-server" not in words:
                found.append((process.pid, words))
    return found


def _places_of_tokens(topology: Topology) -> list[str]:
    """Files of ours that hold a token; the Hub knows its users' tokens by right."""
    marks = [token.encode() for token in topology.tokens.values()]
    found = []
    for path in topology.folder.rglob("*"):
        if path.is_file() and path.relative_to(topology.folder).parts[0] != "hub":
            found += [str(path.relative_to(topology.folder)) for mark in marks if mark in _read(path)]
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
