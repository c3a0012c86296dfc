"""What the gate holds against a conversion, judged on numbers alone.

convert judges what it measured, verify what a report says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvalign.config import Gate
from kvalign.evaluate.protocol import FLOOR_LIMIT
from kvalign.evaluate.resident import KERNEL_LIMIT
from kvalign.evaluate.validation import Validation


@dataclass(frozen=True)
class Judged:
    """One form of the cache. domains: mean KL, NaN where it is none, and top-1 agreement of each."""

    floor_kl: float
    domains: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Resident(Judged):
    """kernel_error: of the fused kernel; None where none ran."""

    kernel_error: float | None


def judged(validation: Validation) -> tuple[Judged, Resident | None]:
    """What was measured, as the gate sees it."""
    at_rest = {name: (found.summary.kl_mean, found.summary.top1) for name, found in validation.domains.items()}
    held = validation.resident
    resident = (
        None
        if held is None
        else Resident(
            held.floor_kl,
            {name: (found.kl_mean, found.top1) for name, found in held.domains.items()},
            held.kernel_error,
        )
    )
    return Judged(validation.floor_kl, at_rest), resident


def told(report: Mapping[str, Any]) -> tuple[Judged, Resident]:
    """What a report says, as the gate sees it."""
    held = report["resident"]
    resident = Resident(
        _number(held["quality"]["floor_kl"]), _domains(held["quality"]["domains"]), held["kernel"]["relative_error"]
    )
    return Judged(_number(report["summary"]["floor_kl"]), _domains(report["quality"]["domains"])), resident


def failures(gate: Gate, at_rest: Judged, resident: Resident | None) -> list[str]:
    """A line each; none when it may be published."""
    found = []
    if not at_rest.floor_kl < FLOOR_LIMIT:
        found.append(
            f"the run is void: the uncompressed model differs from itself by KL {at_rest.floor_kl:.2g}"
            f" (limit {FLOOR_LIMIT:g})"
        )
    found += _failed_domains(gate, at_rest, "")
    if resident is not None:
        if not resident.floor_kl < FLOOR_LIMIT:
            found.append(f"the resident run is void: its floor is KL {resident.floor_kl:.2g} (limit {FLOOR_LIMIT:g})")
        if resident.kernel_error is not None and not resident.kernel_error <= KERNEL_LIMIT:
            found.append(f"the fused kernel is off by {resident.kernel_error:.2g} (limit {KERNEL_LIMIT:g})")
        found += _failed_domains(gate, resident, " of the resident cache")
    return found


def _failed_domains(gate: Gate, form: Judged, whose: str) -> list[str]:
    found = []
    for name, (kl, top1) in form.domains.items():
        if not kl <= gate.max_kl:
            found.append(f"mean KL{whose} on '{name}' is {kl:.4g} nats, above the gate's {gate.max_kl:g}")
        if not top1 >= gate.min_top1:
            found.append(f"top-1 agreement{whose} on '{name}' is {top1:.4f}, below the gate's {gate.min_top1:g}")
    return found


def _domains(told: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    return {name: (_number(found["kl_mean"]), found["top1"]) for name, found in told.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
