"""What a report says twice, or says and follows from the rest of it: compared without artifact, files or model."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from kvalign.config import Gate
from kvalign.evaluate.protocol import FLOOR_LIMIT
from kvalign.evaluate.recall import DIFFICULTIES, THRESHOLD
from kvalign.evaluate.resident import CHUNK_TOKENS, KERNEL_LIMIT, SINGLE_TOKENS, first_scored
from kvalign.report import gate
from kvalign.report.build import WORST_WINDOWS
from kvalign.report.claims import ROUNDING, Claim, at_most, close, each
from kvalign.report.facts import MOST_LISTED_DOCUMENTS, STAGES, TOOLS, not_measured

Report = Mapping[str, Any]

_FIGURES = {
    "head_alignment": "npz",
    "activations": "npz",
    "bits": "json",
    "sensitivity": "json",
    "rate_distortion": "json",
    "kl_by_position": "json",
}


def claims_within(report: Report) -> Iterator[Claim]:
    """Every comparison of a report with itself; it must be of the form of schema.py."""
    yield from _summary(report)
    yield from _gate(report)
    yield from _at_rest(report)
    yield from _resident(report)
    yield from _operating_points(report)
    yield from _recall(report)
    yield from _greedy(report)
    yield from _speed(report)
    yield from _figures(report)
    yield from _texts(report)
    yield from _made_with(report)


def _summary(report: Report) -> Iterator[Claim]:
    overall, summary = report["quality"]["overall"], report["summary"]
    for name in ("ratio", "kl_mean", "kl_p99", "top1"):
        yield Claim(f"{name} in the summary and in the table", summary[name], overall[name], None)
    yield Claim("sizes.coded_ratio and the table", report["sizes"]["coded_ratio"], overall["ratio"], None)
    yield Claim(
        "artifact_bytes in the summary and in the sizes",
        summary["artifact_bytes"],
        report["sizes"]["artifact_bytes"],
        None,
    )


def _gate(report: Report) -> Iterator[Claim]:
    told = report["gate"]
    try:
        limits = Gate(max_kl=told["max_kl"], min_top1=told["min_top1"])
    except ValidationError:
        yield Claim("gate: limits that a conversion takes", [told["max_kl"], told["min_top1"]], "others", None)
        return
    failures = gate.failures(limits, *gate.told(report))
    yield Claim("gate.failures", told["failures"], failures, None)
    yield Claim("gate.passed", told["passed"], not failures, None)
    yield Claim("quality.floor_limit", report["quality"]["floor_limit"], FLOOR_LIMIT, None)
    yield Claim("resident.kernel.limit", report["resident"]["kernel"]["limit"], KERNEL_LIMIT, None)


def _at_rest(report: Report) -> Iterator[Claim]:
    quality = report["quality"]
    overall, domains = quality["overall"], quality["domains"]
    yield from _parts("quality", overall, domains, quality["continuation_tokens"] - 1)
    for name in ("ratio", "cache_ratio"):
        together = sum(part["windows"] for part in domains.values()) / sum(
            part["windows"] / part[name] for part in domains.values()
        )
        yield close(f"quality.overall.{name} and that of the domains", overall[name], together)
    worst = quality["worst_windows"]
    yield Claim("quality.worst_windows: their number", len(worst), min(WORST_WINDOWS, overall["windows"]), None)
    falling = sorted(worst, key=lambda window: -(window["kl_mean"] or 0.0))
    yield Claim("quality.worst_windows: falling", [w["kl_mean"] for w in worst], [w["kl_mean"] for w in falling], None)
    for index, window in enumerate(worst):
        home = domains.get(window["domain"])
        yield Claim(f"quality.worst_windows.{index}.domain", home is not None, True, None)
        if home is not None:
            yield at_most(f"quality.worst_windows.{index}.kl_max", window["kl_max"], home["kl_max"])
            yield at_most(f"quality.worst_windows.{index}.kl_mean", window["kl_mean"], window["kl_max"])


def _parts(name: str, overall: Report, domains: Report, tokens: int) -> Iterator[Claim]:
    """A table's first line is what its other lines make together. tokens: scored of a window."""
    windows = sum(part["windows"] for part in domains.values())
    yield Claim(f"{name}.overall.windows and those of the domains", overall["windows"], windows, None)
    for part_name, part in {"overall": overall, **domains}.items():
        yield Claim(f"{name}.{part_name}.tokens", part["tokens"], part["windows"] * tokens, None)
        yield at_most(f"{name}.{part_name}.kl_p99", part["kl_p99"], part["kl_max"])
        has_none = part["windows"] < 2 or part["kl_mean"] is None
        ends = [part["kl_low"] is None, part["kl_high"] is None]
        yield Claim(f"{name}.{part_name}: no interval over one window", ends, [has_none, has_none], None)
    for key in ("kl_mean", "total_variation", "top1", "nll_delta"):
        yield _mean(f"{name}.overall.{key} and those of the domains", overall[key], domains, key, windows)
    largest = [part["kl_max"] for part in domains.values()]
    yield close(
        f"{name}.overall.kl_max and those of the domains", overall["kl_max"], None if None in largest else max(largest)
    )


def _mean(name: str, claimed: float | None, domains: Report, key: str, windows: int) -> Claim:
    values = [part[key] for part in domains.values()]
    if None in values or not windows:
        return Claim(name, claimed, None, None)
    mean = sum(part[key] * part["windows"] for part in domains.values()) / windows
    size = sum(abs(part[key]) * part["windows"] for part in domains.values()) / windows  # terms may cancel
    return Claim(name, claimed, mean, max(ROUNDING * size, 1e-9))


def _resident(report: Report) -> Iterator[Claim]:
    found, prefix = report["resident"], report["quality"]["prefix_tokens"]
    quality = found["quality"]
    tokens = prefix + report["quality"]["continuation_tokens"]
    scored_from = first_scored(tokens, found["recent_tokens"])
    yield Claim("resident.quality.scored_from", quality["scored_from"], scored_from, None)
    yield Claim("resident.quality.chunk_tokens", quality["chunk_tokens"], CHUNK_TOKENS, None)
    yield Claim("resident.quality.single_tokens", quality["single_tokens"], SINGLE_TOKENS, None)
    yield from _parts("resident.quality", quality["overall"], quality["domains"], tokens - 1 - scored_from)
    yield Claim(
        "resident: judged on the same domains", list(quality["domains"]), list(report["quality"]["domains"]), None
    )
    yield close("resident.coded_ratio and bits_per_value", found["coded_ratio"], 16.0 / found["bits_per_value"], 1e-6)


def _operating_points(report: Report) -> Iterator[Claim]:
    overall, step = report["quality"]["overall"], report["codec"]["recommended_step"]
    points = report["operating_points"]
    steps = [point["step"] for point in points]
    yield Claim("operating_points: rising steps, each once", steps, sorted(set(steps)), None)
    chosen = [point for point in points if point["step"] == step]
    yield Claim("operating_points: the recommended step", len(chosen), 1, None)
    for point in chosen:
        yield Claim("operating_points: ratio at the recommended step", point["ratio"], overall["ratio"], 1e-4)
        for name in ("kl_mean", "kl_p99", "top1"):
            yield Claim(f"operating_points: {name} at the recommended step", point[name], overall[name], None)


def _recall(report: Report) -> Iterator[Claim]:
    tasks = [told["task"] for told in report["recall"]]
    yield Claim("recall: every task", sorted(tasks), sorted(DIFFICULTIES), None)
    for told in report["recall"]:
        name, share = f"recall, {told['task']}", told["scores"].get("uncompressed")
        applicable = share is not None and share >= THRESHOLD
        yield Claim(f"{name}: applicable by its own score", told["applicable"], applicable, None)
        if told["applicable"]:
            yield Claim(f"{name}: caches", sorted(told["scores"]), sorted(["uncompressed", *report["greedy"]]), None)
        for cache, score in told["scores"].items():
            whole = round(score * told["items"]) / told["items"] if told["items"] else 0.0
            yield close(f"{name}, {cache}: a share of its items", score, whole, 1e-9)


def _greedy(report: Report) -> Iterator[Claim]:
    for name, told in report["greedy"].items():
        agreeing, longest = told["agreeing"], told["new_tokens"]
        yield close(
            f"{name}: mean of agreeing greedy tokens", told["mean_agreeing_tokens"], sum(agreeing) / len(agreeing)
        )
        identical = sum(tokens == longest for tokens in agreeing) / len(agreeing)
        yield close(f"{name}: share of identical greedy text", told["identical"], identical)
        yield at_most(f"{name}: agreeing greedy tokens of so many", max(agreeing), longest)


def _speed(report: Report) -> Iterator[Claim]:
    told, resident = report["speed"], report["speed"]["resident_tokens_per_s"]
    yield Claim("speed.prefix_tokens", told["prefix_tokens"], report["quality"]["prefix_tokens"], None)
    for part in ("encode", "decode"):
        again = told["prefill_s"] / told[f"{part}_s"]
        yield close(f"speed.prefill_over_{part}", told[f"prefill_over_{part}"], again)
    times = None if resident is None else resident / told["dynamic_tokens_per_s"]
    yield close("speed.resident_over_dynamic", told["resident_over_dynamic"], times)


def _figures(report: Report) -> Iterator[Claim]:
    """Every picture is there, once, in the files of its name."""
    without = {"sensitivity"} if report["calibration"]["metric"] == "none" else set()
    if report["quality"]["overall"]["kl_mean"] is None:
        without |= {"rate_distortion", "kl_by_position"}
    names = [figure["name"] for figure in report["figures"]]
    yield Claim("figures: every one", names, [name for name in _FIGURES if name not in without], None)
    for figure in report["figures"]:
        name = figure["name"]
        yield Claim(f"figures.{name}.image", figure["image"], f"{name}.png", None)
        yield Claim(f"figures.{name}.data", figure["data"], f"{name}.{_FIGURES[name]}", None)


def _texts(report: Report) -> Iterator[Claim]:
    calibration, validation, quality = report["calibration"], report["validation"], report["quality"]
    yield Claim("validation.domains", validation["domains"], sorted(quality["domains"]), None)
    yield Claim("validation.windows", validation["windows"], quality["overall"]["windows"], None)
    shared = windows_taken(validation["windows_asked"], len(quality["domains"]))
    yield Claim("validation.windows_asked", validation["windows"], shared, None)
    tokens = calibration["sequences"] * calibration["sequence_length"]
    yield Claim("calibration.tokens", calibration["tokens"], tokens, None)
    documents = calibration["documents"]
    yield Claim("calibration.documents: in order", documents, sorted(documents), None)
    if len(documents) < MOST_LISTED_DOCUMENTS:
        together = hashlib.sha256("".join(documents).encode()).hexdigest()
        yield Claim("calibration.fingerprint", calibration["fingerprint"], together, None)


def windows_taken(asked: int, domains: int) -> int:
    """By evaluation_windows: a share of those asked for in each domain, one at least."""
    return max(asked, domains)


def _made_with(report: Report) -> Iterator[Claim]:
    yield Claim("stage_seconds: every stage", list(report["stage_seconds"]), list(STAGES), None)
    yield Claim("versions: every tool", list(report["versions"]), ["python", *TOOLS], None)
    left_out = not_measured(
        [told["name"] for told in report["baselines"]],
        {told["task"]: told["applicable"] for told in report["recall"]},
        sensitivity=any(figure["name"] == "sensitivity" for figure in report["figures"]),
    )
    yield Claim("not_measured", report["not_measured"], left_out, None)
    yield from each("target", {"one": sum(aim is not None for aim in report["codec"]["target"].values())}, {"one": 1})
