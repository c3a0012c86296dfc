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

from kvalign import accounting
from kvalign.artifact import Artifact
from kvalign.config import ConversionConfig
from kvalign.evaluate.comparison import BaselineResult
from kvalign.evaluate.heads import HeadPictures
from kvalign.evaluate.protocol import FLOOR_LIMIT
from kvalign.evaluate.resident import CHUNK_TOKENS, KERNEL_LIMIT, SINGLE_TOKENS, ResidentResult
from kvalign.evaluate.validation import DomainResult, Validation
from kvalign.geometry import KINDS, Kind
from kvalign.report.figures import Drawn
from kvalign.report.findings import Findings
from kvalign.report.schema import SCHEMA_VERSION, Report
from kvalign.report.source_card import carried_fields
from kvalign.report.structure import column_and_row_structure, describe_structure
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.text import Document, fingerprint

_CACHE_LENGTHS = (1024, 2048, 8192)
_SPREAD_TOKENS = (10_000, 1_000_000)
_WORST_WINDOWS = 3
NOT_MEASURED = (
    "accuracy on downstream tasks; recall and greedy text above are the nearest to it",
    "prefixes longer than the windows above",
    "speed on other machines, other lengths and GPUs; `python -m benchmarks.generate` measures it where it runs",
    "other codecs' own resident forms, and their speed",
)


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
    """Everything the card says, of the form of schema.py; the gate is judged here. Numbers may be NaN."""
    artifact_bytes = len(artifact.tensor_bytes)
    failures = gate_failures(config, validation)
    report = {
        "schema_version": SCHEMA_VERSION,
        "summary": {
            "ratio": validation.overall.ratio,
            "kl_mean": validation.overall.summary.kl_mean,
            "kl_p99": validation.overall.summary.kl_p99,
            "top1": validation.overall.summary.top1,
            "floor_kl": validation.floor_kl,
            "artifact_bytes": artifact_bytes,
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
        "codec": _codec(config, artifact),
        "sizes": _sizes(artifact, validation, artifact_bytes),
        "quality": {
            "protocol": "R",
            "prefix_tokens": validation.prefix_tokens,
            "continuation_tokens": validation.continuation_tokens,
            "floor_limit": FLOOR_LIMIT,
            "overall": _domain(validation.overall),
            "domains": {name: _domain(result) for name, result in validation.domains.items()},
            "worst_windows": [
                asdict(window)
                for window in sorted(validation.windows, key=lambda window: -window.kl_mean)[:_WORST_WINDOWS]
            ],
        },
        "resident": _resident(config, artifact, validation.resident),
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
            "dataset": config.validation.dataset,
            "domains": sorted(validation.domains),
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
            **{name: metadata.version(name) for name in ("kvalign", "torch", "transformers", "numba", "numpy")},
        },
        "stage_seconds": stage_seconds,
        "not_measured": [*NOT_MEASURED, *_left_out(validation, findings)],
    }
    Report.model_validate(report)
    return report


def _left_out(validation: Validation, findings: Findings) -> list[str]:
    """What this very conversion could not measure."""
    found = []
    if not any(result.name == "KVTC" for result in findings.baselines):
        found.append("KVTC at equal bytes: its basis over the whole cache of this model is too wide to fit here")
    found += [
        f"recall, task {result.task}: the uncompressed model does not hold it at any difficulty"
        for result in validation.recall
        if not result.applicable
    ]
    if not findings.sensitivity:
        found.append("sensitivity of layers: calibration asked for no gradients")
    return found


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


def _resident(config: ConversionConfig, artifact: Artifact, found: ResidentResult | None) -> dict[str, Any]:
    assert artifact.resident is not None
    assert found is not None
    layers = artifact.resident.geometry.values()
    values = sum(layer.width(kind) for layer in layers for kind in KINDS)
    room = artifact.sink_tokens + found.recent_tokens + PAGE_TOKENS
    return {
        "bits": config.codec.resident_bits,
        "bits_per_value": found.bits_per_value,
        "basis": artifact.resident.basis,
        "coded_layers": len(artifact.resident.layers),
        "page_tokens": PAGE_TOKENS,
        "recent_tokens": found.recent_tokens,
        "coded_ratio_means": "bf16 bytes of the tokens on pages / bytes of their pages, scales included",
        "coded_ratio": found.coded_ratio,
        "cache_ratio_means": "bf16 bytes of the coded layers / bytes held, room for newest tokens included",
        "cache_ratio_by_tokens": {
            str(tokens): accounting.projected_resident_ratio(values, found.bits_per_value, tokens, room)
            for tokens in _CACHE_LENGTHS
        },
        "quality": {
            "protocol": "C",
            "chunk_tokens": CHUNK_TOKENS,
            "single_tokens": SINGLE_TOKENS,
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
    gate = config.validation.gate
    failures = []
    if not validation.floor_kl < FLOOR_LIMIT:
        failures.append(
            f"the run is void: the uncompressed model differs from itself by KL {validation.floor_kl:.2g}"
            f" (limit {FLOOR_LIMIT:g})"
        )
    for name, result in validation.domains.items():
        summary = result.summary
        if not summary.kl_mean <= gate.max_kl:
            failures.append(f"mean KL on '{name}' is {summary.kl_mean:.4g} nats, above the gate's {gate.max_kl:g}")
        if not summary.top1 >= gate.min_top1:
            failures.append(f"top-1 agreement on '{name}' is {summary.top1:.4f}, below the gate's {gate.min_top1:g}")
    resident = validation.resident
    if resident is not None:
        if not resident.floor_kl < FLOOR_LIMIT:
            failures.append(
                f"the resident run is void: its floor is KL {resident.floor_kl:.2g} (limit {FLOOR_LIMIT:g})"
            )
        if not resident.kernel_holds:
            failures.append(f"the fused kernel is off by {resident.kernel_error:.2g} (limit {KERNEL_LIMIT:g})")
        for name, summary in resident.domains.items():
            if not summary.kl_mean <= gate.max_kl:
                failures.append(
                    f"mean KL of the resident cache on '{name}' is {summary.kl_mean:.4g} nats, above the gate's"
                    f" {gate.max_kl:g}"
                )
            if not summary.top1 >= gate.min_top1:
                failures.append(
                    f"top-1 agreement of the resident cache on '{name}' is {summary.top1:.4f}, below the gate's"
                    f" {gate.min_top1:g}"
                )
    return failures


def _codec(config: ConversionConfig, artifact: Artifact) -> dict[str, Any]:
    return {
        "codec_id": artifact.codec_id.hex(),
        "target": {"max_kl": config.codec.max_kl, "ratio": config.codec.ratio},
        "recommended_step": artifact.recommended_step,
        "sink_tokens": artifact.sink_tokens,
        "recent_tokens": artifact.recent_tokens,
        "recomputed_layers": artifact.shape.recomputed,
        "layers": len(artifact.shape.geometry.layers),
        "ranks": {stored.group.name: int(stored.directions.shape[1]) for stored in artifact.groups},
        "features": {stored.group.name: stored.group.width for stored in artifact.groups},
    }


def _sizes(artifact: Artifact, validation: Validation, artifact_bytes: int) -> dict[str, Any]:
    geometry = artifact.shape.geometry
    verbatim = artifact.sink_tokens + artifact.recent_tokens
    ratio = validation.overall.ratio
    weight_bytes = sum(size for _, size in artifact.base.weights.values())
    return {
        "ratio_means": "bf16 bytes of the coded tokens / bytes they take, all side information included",
        "coded_ratio": ratio,
        "cache_ratio_means": "bf16 bytes of the whole cache / bytes of its payload, sink and recent tokens included",
        "cache_ratio_by_tokens": {
            str(tokens): accounting.projected_cache_ratio(geometry, ratio, tokens, verbatim)
            for tokens in _CACHE_LENGTHS
        },
        "cache_ratio_with_artifact_spread_over_tokens": {
            str(tokens): accounting.projected_cache_ratio(
                geometry, ratio, _CACHE_LENGTHS[-1], verbatim, artifact_bytes * _CACHE_LENGTHS[-1] / tokens
            )
            for tokens in _SPREAD_TOKENS
        },
        "raw_bytes_per_token": accounting.raw_bytes(geometry, 1),
        "measured_payloads": asdict(validation.sizes),
        "artifact_bytes": artifact_bytes,
        "artifact_over_weights": artifact_bytes / weight_bytes,
        "artifact_break_even_tokens": accounting.break_even_tokens(geometry, artifact_bytes, ratio),
    }


def _domain(result: DomainResult) -> dict[str, Any]:
    return {"ratio": result.ratio, "cache_ratio": result.cache_ratio, **asdict(result.summary)}


def to_json(report: dict[str, Any]) -> str:
    """report.json as text: numbers that are none are null."""
    return json.dumps(_finite(report), indent=2, allow_nan=False) + "\n"


def _finite(item: Any) -> Any:
    if isinstance(item, float):
        return item if math.isfinite(item) else None
    if isinstance(item, dict):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return item
