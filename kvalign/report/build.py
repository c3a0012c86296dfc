"""The typed facts of a report, as report.json holds them. Draws nothing and rounds nothing."""

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from kvalign.artifact import Artifact
from kvalign.config import ConversionConfig
from kvalign.evaluate.comparison import BaselineResult
from kvalign.evaluate.heads import HeadPictures
from kvalign.evaluate.protocol import FLOOR_LIMIT
from kvalign.evaluate.resident import CHUNK_TOKENS, KERNEL_LIMIT, SINGLE_TOKENS, ResidentResult
from kvalign.evaluate.validation import DomainResult, Validation
from kvalign.geometry import Kind
from kvalign.printable import printable
from kvalign.report import gate
from kvalign.report.facts import TOOLS, codec_facts, not_measured, resident_facts, size_facts
from kvalign.report.figures import Drawn
from kvalign.report.findings import Findings
from kvalign.report.schema import SCHEMA_VERSION, Report
from kvalign.report.source_card import carried_fields
from kvalign.report.structure import column_and_row_structure, describe_structure
from kvalign.text import Document, fingerprint

WORST_WINDOWS = 3
_LONGEST_NAME = 500


def build_report(
    config: ConversionConfig,
    artifact: Artifact,
    validation: Validation,
    findings: Findings,
    figures: Sequence[Drawn],
    *,
    source_dir: Path,
    held_out: Sequence[Document],
    stage_seconds: dict[str, float],
) -> dict[str, Any]:
    """Everything the card says, of the form of schema.py; the gate is judged here. Numbers that are none are null."""
    failures = gate_failures(config, validation)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "summary": {
            "ratio": validation.overall.ratio,
            "kl_mean": validation.overall.summary.kl_mean,
            "kl_p99": validation.overall.summary.kl_p99,
            "top1": validation.overall.summary.top1,
            "floor_kl": validation.floor_kl,
            "artifact_bytes": len(artifact.tensor_bytes),
        },
        "gate": {
            "max_kl": config.validation.gate.max_kl,
            "min_top1": config.validation.gate.min_top1,
            "passed": not failures,
            "failures": failures,
        },
        "source": {
            **artifact.base.to_json(),
            "carried": carried_fields(source_dir),
        },
        "target": config.target.model_dump(mode="json"),
        "codec": {
            **codec_facts(artifact),
            "target": {"max_kl": config.codec.max_kl, "ratio": config.codec.ratio},
        },
        "sizes": size_facts(artifact, validation.sizes, validation.overall.ratio),
        "quality": {
            "protocol": "R",
            "prefix_tokens": validation.prefix_tokens,
            "continuation_tokens": validation.continuation_tokens,
            "floor_limit": FLOOR_LIMIT,
            "overall": _domain(validation.overall),
            "domains": {name: _domain(result) for name, result in validation.domains.items()},
            "worst_windows": [
                asdict(window)
                for window in sorted(validation.windows, key=lambda window: -window.kl_mean)[:WORST_WINDOWS]
            ],
        },
        "resident": _resident(artifact, validation.resident),
        "operating_points": [asdict(point) for point in validation.curve],
        "baselines": [_baseline(found) for found in findings.baselines],
        "recall": [asdict(found) for found in validation.recall],
        "greedy": {
            name: {
                "new_tokens": found.new_tokens,
                "mean_agreeing_tokens": found.mean,
                "identical": found.identical,
                "agreeing": list(found.agreeing),
            }
            for name, found in validation.greedy.items()
        },
        "speed": {
            **asdict(findings.speed),
            "prefill_over_encode": findings.speed.prefill_over_encode,
            "prefill_over_decode": findings.speed.prefill_over_decode,
            "resident_over_dynamic": findings.speed.resident_over_dynamic,
        },
        "head_alignment": {kind: _heads(kind, found) for kind, found in findings.heads.items()},
        "figures": [asdict(figure) for figure in figures],
        "calibration": (artifact.provenance or {}).get("calibration", {}),
        "validation": {
            "dataset": shown_name(config.validation.dataset),
            "domains": sorted(validation.domains),
            "windows_asked": config.validation.windows,
            "windows": len(validation.windows),
            "fingerprint": fingerprint(held_out),
        },
        "hardware": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
            "device": "cpu",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in TOOLS},
        },
        "stage_seconds": stage_seconds,
        "not_measured": not_measured(
            [found.name for found in findings.baselines],
            {found.task: found.applicable for found in validation.recall},
            sensitivity=bool(findings.sensitivity),
        ),
    }
    report = _finite(report)
    Report.model_validate(report)
    return report


def _baseline(found: BaselineResult) -> dict[str, Any]:
    summary = {key: getattr(found.summary, key) for key in ("kl_mean", "kl_low", "kl_high", "kl_p99", "top1")}
    return {**{key: value for key, value in asdict(found).items() if key != "summary"}, **summary}


def _heads(kind: Kind, found: HeadPictures) -> dict[str, Any]:
    absolute, variance = found.absolute.numpy(), found.variance.numpy()
    return {
        "heads": found.before.shape[0],
        "head_dim": found.absolute.shape[1],
        "left_out": found.left_out,
        "before": found.mean_before,
        "after": found.mean_after,
        "absolute": dict(zip(("columns", "rows"), column_and_row_structure(absolute), strict=True)),
        "variance": dict(zip(("columns", "rows"), column_and_row_structure(variance), strict=True)),
        "says": describe_structure(kind, absolute, variance),
    }


def _resident(artifact: Artifact, found: ResidentResult | None) -> dict[str, Any]:
    assert found is not None
    return {
        **resident_facts(artifact),
        "coded_ratio": found.coded_ratio,
        "quality": {
            "protocol": "C",
            "chunk_tokens": CHUNK_TOKENS,
            "single_tokens": SINGLE_TOKENS,
            "scored_from": found.positions.first,
            "floor_kl": found.floor_kl,
            "overall": asdict(found.summary),
            "domains": {name: asdict(summary) for name, summary in found.domains.items()},
        },
        "kernel": {
            "calls": found.kernels,
            "dense_layers": found.dense_layers,
            "relative_error": found.kernel_error,
            "limit": KERNEL_LIMIT,
        },
    }


def gate_failures(config: ConversionConfig, validation: Validation) -> list[str]:
    """What the gate holds against it, a line each; none when it may be published."""
    return gate.failures(config.validation.gate, *gate.judged(validation))


def _domain(result: DomainResult) -> dict[str, Any]:
    return {"ratio": result.ratio, "cache_ratio": result.cache_ratio, **asdict(result.summary)}


def shown_name(dataset: str) -> str:
    """A dataset's name as reports have it: on one line, of bounded length."""
    return printable(dataset[:_LONGEST_NAME])


def to_json(report: dict[str, Any]) -> str:
    """report.json as text."""
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _finite(item: Any) -> Any:
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return item
