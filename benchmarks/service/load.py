"""The load generator: clients in one event loop, in a process of its own, timed from the client's side.

    python -m benchmarks.service.load < plan.json

Answers on stdout as JSON. It shares the cores with what it measures; its own share of them is in `cpu_s`.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from benchmarks.service.light_client import Connection

Plan = dict[str, Any]
Call = tuple[str, str, str, Any]  # kind, method, path, body


def main() -> None:
    plan: Plan = json.load(sys.stdin)
    answer = asyncio.run(_PHASES[plan["phase"]](plan))
    json.dump({**answer, "cpu_s": round(time.process_time(), 2)}, sys.stdout)


async def paced(plan: Plan) -> Plan:
    """Submissions from many clients, each at its own steady pace, all of them `per_s` together.

    A latency counts from the moment when the request was due: a client that is held up by a slow answer is late
    with its next one, and that is the server's doing.
    """
    due = 1 / plan["per_s"]
    timed = _Timed()
    began = time.perf_counter() + 0.1

    async def client(number: int, connection: Connection) -> None:
        turn = number
        while turn * due < plan["seconds"]:
            await asyncio.sleep(max(0.0, began + turn * due - time.perf_counter()))
            await timed.ask(connection, _submission(plan, number), since=began + turn * due)
            turn += plan["clients"]

    await _all_clients(plan, client)
    return timed.summary(time.perf_counter() - began)


async def saturated(plan: Plan) -> Plan:
    """Submissions from many clients, each as soon as its last one was answered."""
    return await _closed_loop(plan, lambda number: _submission(plan, number))


async def reads(plan: Plan) -> Plan:
    """Lists of all kinds, and single jobs, from a few clients, each as soon as its last request was answered."""
    chance = random.Random(0)

    def call(number: int) -> Call:
        tenant = plan["tenants"][number % len(plan["tenants"])]
        return _list(plan, tenant, chance) if chance.random() < 0.5 else _get(plan, tenant, chance)

    return await _closed_loop(plan, call)


async def streams(plan: Plan) -> Plan:
    """Open event streams, one a job, until each has ended. Prints a line once all of them are open."""
    seen: dict[str, Counter[int]] = {}
    delays: list[float] = []
    broken: list[str] = []
    opened = asyncio.Semaphore(20)  # at a time: a herd of five hundred is another benchmark

    async def follow(tenant: str, job_id: str, ready: asyncio.Event) -> None:
        counts = seen[job_id] = Counter()
        try:
            async with opened:
                connection = await _connected(plan, tenant).__aenter__()
                events = connection.events(f"/v1/jobs/{job_id}/events")
                first = await anext(events)
            ready.set()
            counts[int(first["id"])] += 1
            async for event in events:
                counts[int(event["id"])] += 1
                at = datetime.fromisoformat(json.loads(event["data"])["at"])
                if event["event"] == "progress":
                    delays.append((datetime.now(UTC) - at).total_seconds())
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            broken.append(f"{type(error).__name__}: {error}")
            ready.set()

    waits = [asyncio.Event() for _ in plan["jobs"]]
    tasks = [
        asyncio.create_task(follow(tenant, job_id, ready))
        for (tenant, job_id), ready in zip(plan["jobs"], waits, strict=True)
    ]
    for ready in waits:
        await ready.wait()
    print("open", file=sys.stderr, flush=True)
    await asyncio.wait(tasks, timeout=plan["seconds"])
    unfinished = sum(not task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    return {
        "seen": {job_id: sorted(counts.elements()) for job_id, counts in seen.items()},
        "delay_ms": _percentiles(delays),
        "broken": broken[:5],
        "unfinished": unfinished,
    }


_PHASES: dict[str, Callable[[Plan], Awaitable[Plan]]] = {
    "paced": paced,
    "saturated": saturated,
    "reads": reads,
    "streams": streams,
}


async def _closed_loop(plan: Plan, call: Callable[[int], Call]) -> Plan:
    timed = _Timed()
    began = time.perf_counter()

    async def client(number: int, connection: Connection) -> None:
        while time.perf_counter() - began < plan["seconds"]:
            await timed.ask(connection, call(number))

    await _all_clients(plan, client)
    return timed.summary(time.perf_counter() - began)


async def _all_clients(plan: Plan, client: Callable[[int, Connection], Awaitable[None]]) -> None:
    async def one(number: int) -> None:
        async with _connected(plan, plan["tenants"][number % len(plan["tenants"])]) as connection:
            await client(number, connection)

    await asyncio.gather(*(one(number) for number in range(plan["clients"])))


def _connected(plan: Plan, tenant: str) -> Connection:
    return Connection(plan["host"], plan["port"], f"hf_bench_{tenant}")


_submitted = iter(range(10**9))


def _submission(plan: Plan, number: int) -> Call:
    """A conversion like no other: a target of its own."""
    tenant = plan["tenants"][number % len(plan["tenants"])]
    target = f"{tenant}/{plan['name']}-{next(_submitted)}"
    body = {"source": {"repo": plan["source"]}, "target": {"repo": target}, "labels": {"team": "blue"}}
    return "submit", "POST", "/v1/jobs", body


def _list(plan: Plan, tenant: str, chance: random.Random) -> Call:
    kind, query = chance.choice(
        [
            ("first_page", ""),
            ("deep_page", f"?after={chance.choice(plan['ids'][tenant])}"),
            ("state", f"?state={chance.choice(['queued', 'failed', 'canceled', 'succeeded'])}"),
            ("label", f"?label=team={chance.choice(['blue', 'red'])}"),
            ("rare_label", f"?label=release=r{chance.randrange(20)}"),
        ]
    )
    return f"list_{kind}", "GET", f"/v1/jobs{query}", None


def _get(plan: Plan, tenant: str, chance: random.Random) -> Call:
    return "get", "GET", f"/v1/jobs/{chance.choice(plan['ids'][tenant])}", None


class _Timed:
    """Seconds that answers took, by kind; anything but success counts as refused."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}
        self._refused: Counter[str] = Counter()

    async def ask(self, connection: Connection, call: Call, since: float | None = None) -> None:
        kind, method, path, body = call
        began = time.perf_counter() if since is None else since
        answer = await connection.ask(method, path, body)
        self._seconds.setdefault(kind, []).append(time.perf_counter() - began)
        if answer.status >= 300:
            self._refused[f"{kind} {answer.status} {answer.body[:300].decode()}"] += 1

    def summary(self, seconds: float) -> Plan:
        count = sum(len(taken) for taken in self._seconds.values())
        return {
            "per_s": round((count - self._refused.total()) / seconds, 1),
            "refused": self._refused.total(),
            "refusals": dict(self._refused.most_common(3)),
            "ms": {kind: _percentiles(taken) for kind, taken in self._seconds.items()},
            "lists_ms": _percentiles([s for kind, taken in self._seconds.items() if kind != "get" for s in taken]),
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds, by the nearest rank."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: round(1000 * ordered[max(0, round(share * len(ordered)) - 1)], 1) for name, share in shares.items()}


if __name__ == "__main__":
    main()
