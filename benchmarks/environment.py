"""What a number needs to be read by someone else: hardware, commit, versions, units. Measures nothing itself."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

_PACKAGES = ("kvalign", "torch", "transformers", "numba", "numpy", "safetensors", "constriction", "zstandard")


def describe(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """Hardware, commit and versions of this run; torch's threads where it computes."""
    torch = sys.modules.get("torch")
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu(),
            "usable_cores": len(os.sched_getaffinity(0)),
            **({"torch_threads": torch.get_num_threads()} if torch else {}),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            # Other work on the machine shows here: timings are to be read as ratios within one run.
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "versions": {
            "python": platform.python_version(),
            "os": f"{platform.system()} {platform.machine()}",
            **{name: version for name in packages if (version := _version(name))},
        },
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result; NaN and infinity are refused, so that any reader can parse it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def say(message: str) -> None:
    """A line of progress."""
    print(message, file=sys.stderr, flush=True)


def median_seconds(steps: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each step: one round to warm up, then `repeats` rounds with all steps in turn.

    Turns, because other work on the machine then slows all steps alike and their ratios keep.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: median(seconds) for name, seconds in taken.items()}


def _commit() -> str:
    """Commit of the checkout, with + behind it when files differ from it; empty outside a checkout."""
    root = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
