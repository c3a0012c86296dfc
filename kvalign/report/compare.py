"""Several reports side by side: the numbers that decide, and why some of them may not be compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """rows: name of the number, then one value for each report, None where it was not measured."""

    names: list[str]
    rows: list[tuple[str, list[Any]]]
    warnings: list[str]


def compare(reports: Mapping[str, dict[str, Any]]) -> Comparison:
    """Reports by the name of their artifact, in the order to show them; report.json of each."""
    columns = [_column(report) for report in reports.values()]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [(key, [column.get(key) for column in columns]) for key in keys]
    return Comparison(list(reports), rows, _warnings(list(reports.values())))


def _column(report: dict[str, Any]) -> dict[str, Any]:
    overall, sizes, resident = report["quality"]["overall"], report["sizes"], report["resident"]
    held = resident["quality"]["overall"]
    found: dict[str, Any] = {
        "base": f"{report['source']['repo']}@{report['source']['commit'][:12] or 'local folder'}",
        "gate": "passed" if report["gate"]["passed"] else "failed",
        "at rest: ratio of coded tokens": sizes["coded_ratio"],
        "at rest: ratio of a cache of 8,192 tokens": sizes["cache_ratio_by_tokens"]["8192"],
        "at rest: mean KL, nats": overall["kl_mean"],
        "at rest: KL, 95 % interval": _interval(overall),
        "at rest: KL, 99th percentile": overall["kl_p99"],
        "at rest: top-1 agreement": overall["top1"],
        "resident: ratio of coded tokens": resident["coded_ratio"],
        "resident: mean KL, nats": held["kl_mean"],
        "resident: KL, 95 % interval": _interval(held),
        "resident: top-1 agreement": held["top1"],
        "artifact, bytes": report["summary"]["artifact_bytes"],
        "decoding: times quicker than prefill": report["speed"]["prefill_over_decode"],
        "resident: tokens a second over uncompressed": report["speed"]["resident_over_dynamic"],
    }
    for name, text in report["greedy"].items():
        found[f"{name}: agreeing greedy tokens"] = text["mean_agreeing_tokens"]
    for task in report["recall"]:
        for name, score in task["scores"].items():
            found[f"recall, {task['task']} of {task['difficulty']}: {name}"] = score
    return found


def _interval(quality: dict[str, Any]) -> str:
    low, high = quality["kl_low"], quality["kl_high"]
    if low is None or high is None:
        return "not a number" if quality["kl_mean"] is None else "none: one window"
    return f"{low:.4g} to {high:.4g}"


def _warnings(reports: list[dict[str, Any]]) -> list[str]:
    """What keeps numbers of these reports from being compared."""
    told = {
        "Base models differ: KL is relative to each model's own uncompressed cache.": [
            sorted(weight["sha256"] for weight in report["source"]["weights"].values()) for report in reports
        ],
        "They were judged on different text: KL and recall are not comparable.": [
            report["validation"]["fingerprint"] for report in reports
        ],
        "Windows have different lengths: KL is not comparable.": [
            (report["quality"]["prefix_tokens"], report["quality"]["continuation_tokens"]) for report in reports
        ],
        "They keep different numbers of first or last tokens in 16 bit.": [
            (report["codec"]["sink_tokens"], report["codec"]["recent_tokens"]) for report in reports
        ],
        "Speeds were measured on different machines.": [report["hardware"] for report in reports],
    }
    return [warning for warning, values in told.items() if any(value != values[0] for value in values)]
