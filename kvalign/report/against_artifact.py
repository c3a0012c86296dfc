"""A report beside the artifact that lies with it: what the artifact itself says is compared, no model needed."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.artifact import Artifact
from kvalign.evaluate.comparison import KVTC_VALUE_WEIGHTS
from kvalign.evaluate.heads import Columns
from kvalign.geometry import KINDS
from kvalign.report.claims import MISSING, Claim, close, each
from kvalign.report.facts import TOOLS, baseline_settings, codec_facts, resident_facts, size_facts

Report = Mapping[str, Any]

_ID_BYTES = (0, 1, 2, 4, 8)  # of a token, where layers are recomputed


def claims_of_artifact(artifact: Artifact, report: Report) -> Iterator[Claim]:
    """Every comparison of a report with its artifact; the report must be of the form of schema.py."""
    yield from each("source", _without(report["source"], "carried"), artifact.base.to_json())
    yield from each("codec", _without(report["codec"], "target"), codec_facts(artifact))
    yield Claim("artifact_bytes", report["summary"]["artifact_bytes"], len(artifact.tensor_bytes), None)
    yield from _sizes(artifact, report)
    if artifact.resident is None:
        yield Claim("resident: in the artifact", True, False, None)
    else:
        told = _without(report["resident"], "coded_ratio", "quality", "kernel")
        yield from each("resident", told, resident_facts(artifact))
    yield from each("operating_points", report["operating_points"], [asdict(point) for point in artifact.curve])
    yield from _baselines(artifact, report)
    yield from _heads(artifact, report)
    yield from _provenance(artifact, report)


def _without(part: Report, *names: str) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in names}


def _sizes(artifact: Artifact, report: Report) -> Iterator[Claim]:
    told, overall = report["sizes"], report["quality"]["overall"]
    payloads, geometry = PayloadSizes(**told["measured_payloads"]), artifact.shape.geometry
    yield close(
        "sizes.coded_ratio of the payloads", told["coded_ratio"], accounting.coded_ratio(geometry, payloads), 1e-9
    )
    whole = accounting.cache_ratio(geometry, payloads)
    yield close("quality.overall.cache_ratio of the payloads", overall["cache_ratio"], whole, 1e-9)
    prefixes = overall["windows"] * report["quality"]["prefix_tokens"]
    verbatim = overall["windows"] * (artifact.sink_tokens + artifact.recent_tokens)
    yield Claim("sizes: verbatim tokens", payloads.verbatim_tokens, min(verbatim, prefixes), None)
    yield Claim("sizes: tokens of all prefixes", payloads.body_tokens + payloads.verbatim_tokens, prefixes, None)
    ids = payloads.verbatim - accounting.raw_bytes(artifact.shape.stored, payloads.verbatim_tokens)
    widths = [width * payloads.verbatim_tokens for width in _ID_BYTES]
    yield Claim("sizes: verbatim bytes but for token ids", ids in widths, True, None)
    # What is left then follows from the ratio, which was compared above.
    yield from each("sizes", told, size_facts(artifact, payloads, max(told["coded_ratio"], 1 + 1e-9)))


def _baselines(artifact: Artifact, report: Report) -> Iterator[Claim]:
    """Every codec that was measured beside this one is there, under its own name, once."""
    told = [_without_weight(found["name"], found["setting"]) for found in report["baselines"]]
    yield Claim("baselines: every one", told, baseline_settings(artifact, report["summary"]["ratio"]), None)
    kvtc = {found["setting"].rpartition(", ")[2] for found in report["baselines"] if found["name"] == "KVTC"}
    yield Claim("baselines: one weight for KVTC", len(kvtc) <= 1, True, None)


def _without_weight(name: str, setting: str) -> list[str]:
    for weight in KVTC_VALUE_WEIGHTS:
        setting = setting.removesuffix(f", values x {weight:g}")
    return [name, setting]


def _heads(artifact: Artifact, report: Report) -> Iterator[Claim]:
    for kind in KINDS:
        columns, told = Columns.of(artifact.shape.geometry, kind), report["head_alignment"][kind]
        wanted = {"heads": columns.heads, "head_dim": columns.dim, "left_out": columns.left_out}
        yield from each(f"head_alignment.{kind}", {name: told[name] for name in wanted}, wanted)


def _provenance(artifact: Artifact, report: Report) -> Iterator[Claim]:
    """How the artifact was calibrated, and with which tools, as it says itself."""
    written = artifact.provenance if isinstance(artifact.provenance, Mapping) else {}
    yield from each("calibration", report["calibration"], written.get("calibration", MISSING))
    tools = written.get("tools", MISSING)
    yield from each("versions", {name: report["versions"].get(name, MISSING) for name in TOOLS}, tools)
