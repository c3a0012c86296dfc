"""scripts/soak: two workers, two APIs, a Hub, many jobs, and random faults for some minutes; all on the loopback.

At its end every job is in a final state, each success was published once, no workspace and no process is left, and no
token is in a log or on a disk. Prints one JSON object; exit status 0 when all of that holds, 1 when it does not.
scripts/soak puts the fault tests' topology on the path.
"""

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from soak_chaos import Chaos
from soak_jobs import Clients
from soak_verdict import verdict
from topology import Topology, running_topology

SETTINGS = {
    "KVALIGN_CHILD_STALL_S": "8",
    "KVALIGN_FAILED_KEPT_S": "5",
    "KVALIGN_MAX_ATTEMPTS": "5",
}
SETTLE_S = {"fake": 240.0, "real": 420.0}


def main() -> int:
    options = _options()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda caught, _: sys.exit(128 + caught))  # everything started is ended on the way
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kvalign-soak-", ignore_cleanup_errors=True) as name:
        folder = Path(options.keep or name).resolve()
        model = _real_model(folder / "model") if options.child == "real" else None
        with running_topology(
            folder / "soak", options.database, child=options.child, concurrency=2, model=model, **SETTINGS
        ) as topology:
            topology.mode("slow")
            began = time.monotonic()
            clients, chaos = _troubled(topology, rng, options)
            _settled(topology, clients, SETTLE_S[options.child])
            found = verdict(topology, clients)
    summary = {
        "minutes": options.minutes,
        "seed": options.seed,
        "database": options.database,
        "child": options.child,
        "wall_s": round(time.monotonic() - began, 1),
        "faults": dict(sorted(chaos.done.items())),
        **found,
    }
    print(json.dumps(summary, indent=1))
    return 1 if summary["violations"] else 0


def _troubled(topology: Topology, rng: random.Random, options: argparse.Namespace) -> tuple[Clients, Chaos]:
    """Jobs come in over the first two thirds of the time, faults over all of it."""
    clients = Clients(topology, random.Random(rng.random()), options.jobs, 0.66 * 60 * options.minutes, options.child)
    chaos = Chaos(topology, random.Random(rng.random()), lease_s=float(topology.settings["KVALIGN_LEASE_S"]))
    end = time.monotonic() + 60 * options.minutes
    with clients, contextlib.closing(chaos):
        while time.monotonic() < end:
            chaos.next()
            _note(clients.states(), chaos.done)
    return clients, chaos


def _settled(topology: Topology, clients: Clients, within_s: float) -> None:
    """No more faults; what is left of the jobs has time to end."""
    topology.make_whole()
    deadline = time.monotonic() + within_s
    while clients.alive() and time.monotonic() < deadline:
        time.sleep(0.5)


def _note(states: Counter[str], faults: Counter[str]) -> None:
    last = f"{sum(faults.values())} faults; jobs: " + ", ".join(f"{count} {state}" for state, count in states.items())
    print(last, file=sys.stderr, flush=True)


def _real_model(folder: Path) -> Path:
    import torch
    from e2e_models import write_model

    torch.set_num_threads(1)
    return write_model("llama", folder)


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults; the end takes some more")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and their order")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--child", choices=("fake", "real"), default="fake", help="real converts a tiny model")
    parser.add_argument("--keep", metavar="FOLDER", help="leave logs and databases there")
    options = parser.parse_args()
    if not 0 < options.minutes <= 120 or not 1 <= options.jobs <= 500:
        parser.error("--minutes must be at most 120, --jobs from 1 to 500")
    return options


if __name__ == "__main__":
    sys.exit(main())
