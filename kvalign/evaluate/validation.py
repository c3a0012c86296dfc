"""What validation found, as it is stored between stages: the chosen step, the curve, every window, the resident form.

Plain data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.curve import OperatingPoint
from kvalign.evaluate.greedy import GreedyResult
from kvalign.evaluate.metrics import PositionCurve, Summary, by_position, summarise
from kvalign.evaluate.recall import RecallResult
from kvalign.evaluate.resident import ResidentResult
from kvalign.evaluate.search import Measurement

_FILE = "validation.json"


@dataclass(frozen=True)
class DomainResult:
    """One domain, or all together, at the chosen step."""

    summary: Summary
    ratio: float
    cache_ratio: float


@dataclass(frozen=True)
class WindowResult:
    """One window at the chosen step."""

    domain: str
    kl_mean: float
    kl_max: float
    top1: float


@dataclass(frozen=True)
class Validation:
    """Protocol R on held-out text, protocol C of the resident form, recall, and greedy text by coder."""

    step: int
    curve: tuple[OperatingPoint, ...]
    overall: DomainResult
    domains: dict[str, DomainResult]
    windows: tuple[WindowResult, ...]
    sizes: PayloadSizes
    floor_kl: float
    prefix_tokens: int
    continuation_tokens: int
    positions: PositionCurve
    resident: ResidentResult | None
    recall: tuple[RecallResult, ...] = ()
    greedy: Mapping[str, GreedyResult] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        measured: Sequence[Measurement],
        resident: ResidentResult | None,
        *,
        floor_kl: float,
        prefix_tokens: int,
        continuation_tokens: int,
        recall: Sequence[RecallResult] = (),
        greedy: Mapping[str, GreedyResult] = MappingProxyType({}),
    ) -> "Validation":
        """measured: the chosen step first, then the others."""
        chosen = measured[0]
        by_step = {found.step: found.point() for found in measured}
        return cls(
            step=chosen.step,
            curve=tuple(by_step[step] for step in sorted(by_step)),
            overall=_domain_result(chosen),
            domains={name: _domain_result(part) for name, part in chosen.domains().items()},
            windows=tuple(_window_result(chosen, index) for index in range(len(chosen.trials))),
            sizes=chosen.sizes(),
            floor_kl=floor_kl,
            prefix_tokens=prefix_tokens,
            continuation_tokens=continuation_tokens,
            positions=by_position(chosen.divergences(), prefix_tokens),
            resident=resident,
            recall=tuple(recall),
            greedy=dict(greedy),
        )

    def save(self, folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path) -> "Validation":
        data: dict[str, Any] = json.loads((folder / _FILE).read_text())
        return cls(
            **{
                **data,
                "curve": tuple(OperatingPoint(**point) for point in data["curve"]),
                "overall": _domain_from_json(data["overall"]),
                "domains": {name: _domain_from_json(part) for name, part in data["domains"].items()},
                "windows": tuple(WindowResult(**window) for window in data["windows"]),
                "sizes": PayloadSizes(**data["sizes"]),
                "recall": tuple(RecallResult(**item) for item in data["recall"]),
                "greedy": {
                    name: GreedyResult(item["new_tokens"], tuple(item["agreeing"]))
                    for name, item in data["greedy"].items()
                },
                "positions": PositionCurve(**data["positions"]),
                "resident": ResidentResult.from_json(data["resident"]) if data["resident"] else None,
            }
        )


def _domain_result(found: Measurement) -> DomainResult:
    return DomainResult(found.summary(), found.ratio(), accounting.cache_ratio(found.geometry, found.sizes()))


def _window_result(found: Measurement, index: int) -> WindowResult:
    trial = found.trials[index]
    summary = summarise([trial.divergence])
    return WindowResult(trial.domain, summary.kl_mean, summary.kl_max, summary.top1)


def _domain_from_json(data: dict[str, Any]) -> DomainResult:
    return DomainResult(Summary(**data["summary"]), data["ratio"], data["cache_ratio"])
