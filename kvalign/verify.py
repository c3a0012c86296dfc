"""Measure a converted model's claims again: hashes, sizes, and the quality that its report tells. Writes nothing."""

import difflib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvalign import accounting
from kvalign.artifact import Artifact, load_artifact, sha256_of
from kvalign.capture import capture, load_model, load_tokenizer
from kvalign.config import BUILTIN_DATASET, describe
from kvalign.errors import ArtifactInvalid, DatasetInvalid
from kvalign.evaluate.coders import coders_of
from kvalign.evaluate.comparison import measure_baselines
from kvalign.evaluate.greedy import measure_greedy
from kvalign.evaluate.metrics import Summary
from kvalign.evaluate.protocol import FLOOR_LIMIT, Coder, PreparedWindow, prepare
from kvalign.evaluate.recall import measure_recall
from kvalign.evaluate.resident import ResidentResult, measure_resident
from kvalign.evaluate.search import measure
from kvalign.evaluate.validation import DomainResult, Validation
from kvalign.load import fetch, model_folder
from kvalign.report import card
from kvalign.report.draw import FOLDER as FIGURES
from kvalign.report.findings import pictured_heads
from kvalign.report.schema import SCHEMA_VERSION, Report
from kvalign.text import (
    Document,
    builtin_documents,
    evaluation_windows,
    fingerprint,
    kept_aside,
    read_documents,
    token_sequences,
)

# Another machine sums in another order: a symbol at a rounding edge may fall to its other side.
_RATIO_TOLERANCE = 0.01
_TOP1_TOLERANCE = 0.01
_TAIL_TOLERANCE = 0.25
_GREEDY_TOLERANCE = 0.15  # of the longest: a near tie that falls the other way ends one window's agreement
_RECALL_ITEMS = 2
_LIKENESS_TOLERANCE = 0.01


@dataclass(frozen=True)
class Claim:
    """One claim, measured again. tolerance is absolute, around what is claimed; None: exact."""

    name: str
    claimed: Any
    measured: Any
    tolerance: float | None

    @property
    def holds(self) -> bool:
        if self.tolerance is None or self.claimed is None or self.measured is None:
            return bool(self.claimed == self.measured)
        if math.isnan(self.measured):  # a report has null for it
            return False
        return abs(self.claimed - self.measured) <= self.tolerance


def verify(
    repo_or_folder: str | Path,
    *,
    base: str | Path | None = None,
    text: Path | None = None,
    on_progress: Callable[[str], None] = lambda what: None,
    **where: Any,
) -> list[Claim]:
    """Every claim of the report, measured again.

    base         folder or repo of the base model, for layout `codec`
    text         the validation text, where it did not come with kvalign; its fingerprint must be the report's
    on_progress  called with a line on what is done next
    where        revision, token, endpoint, as kvalign.load takes them

    Raises ArtifactInvalid when there is no report or the parts do not fit each other, DatasetInvalid for other text.
    Cost: about fifteen passes over the validation windows, and the recall tasks.
    Not measured again: KVTC, which would be fitted on the calibration text for minutes; likeness of heads, where that
    text did not come with kvalign; speed.
    """
    folder = fetch(repo_or_folder, report=True, **where)
    artifact = load_artifact(folder)
    report = read_report(folder)
    documents = _documents(report, text)
    weights = model_folder(folder, artifact, base, where.get("token"), where.get("endpoint"))
    artifact.base.check(weights)
    on_progress("hashing the weights")
    claims = [*_hashes(artifact, weights), *_written(folder, artifact, report)]
    on_progress("measuring the windows again")
    return [*claims, *_quality(artifact, report, weights, documents, on_progress)]


def read_report(folder: Path) -> dict[str, Any]:
    """report.json of a converted model; raises ArtifactInvalid."""
    try:
        report = json.loads((folder / "report.json").read_bytes())
        version = report["schema_version"] if isinstance(report, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"its schema version is {str(version)[:20]}, not {SCHEMA_VERSION}")
        Report.model_validate(report)
    except ValidationError as error:
        raise _unreadable(folder, describe(error)) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise _unreadable(folder, str(error)) from error
    assert isinstance(report, dict)
    return report


def _unreadable(folder: Path, why: str) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"{folder.name} holds no report.json that this kvalign reads: {why[:300].rstrip('.')}.",
        "Pull the artifact again, or update kvalign.",
    )


def _documents(report: dict[str, Any], text: Path | None) -> list[Document]:
    claimed = report["validation"]
    if text is None and claimed["dataset"] != "builtin":
        raise DatasetInvalid(
            f"The report was measured on {claimed['dataset']!r}, which does not come with kvalign.",
            "Name that text with --text.",
        )
    documents = read_documents(text) if text else builtin_documents("validation")
    if fingerprint(documents) != claimed["fingerprint"]:
        raise DatasetInvalid(
            f"This text has fingerprint {fingerprint(documents)[:16]}, the report's has {claimed['fingerprint'][:16]}.",
            "Give the very text that the report was measured on, or the kvalign version that brought it.",
        )
    return documents


def _hashes(artifact: Artifact, weights: Path) -> Iterator[Claim]:
    for name, (sha256, _) in sorted(artifact.base.weights.items()):
        yield Claim(f"SHA-256 of {name}", sha256, sha256_of(weights / name), None)


def _written(folder: Path, artifact: Artifact, report: dict[str, Any]) -> Iterator[Claim]:
    """What can be checked without running the model."""
    yield Claim("codec_id", report["codec"]["codec_id"], artifact.codec_id.hex(), None)
    yield Claim("recommended step", report["codec"]["recommended_step"], artifact.recommended_step, None)
    yield Claim("artifact_bytes", report["summary"]["artifact_bytes"], len(artifact.tensor_bytes), None)
    geometry, sizes = artifact.shape.geometry, report["sizes"]
    verbatim = artifact.sink_tokens + artifact.recent_tokens
    for tokens, claimed in sizes["cache_ratio_by_tokens"].items():
        again = accounting.projected_cache_ratio(geometry, sizes["coded_ratio"], int(tokens), verbatim)
        yield Claim(f"ratio of a cache of {int(tokens):,} tokens", claimed, again, 1e-6 * again)
    for name in ("ratio", "kl_mean", "kl_p99", "top1"):
        told = {"ratio": sizes["coded_ratio"]}.get(name, report["quality"]["overall"].get(name))
        yield Claim(f"{name} in the summary and in the table", report["summary"][name], told, None)
    yield Claim("README.md is the report's card", "", _first_difference(folder, report), None)
    for figure in report["figures"]:
        for kind in ("image", "data"):
            file = folder / FIGURES / Path(figure[kind]).name
            found = sha256_of(file) if file.is_file() else "(missing)"
            yield Claim(f"SHA-256 of {FIGURES}/{file.name}", figure[f"{kind}_sha256"], found, None)


def _first_difference(folder: Path, report: dict[str, Any]) -> str:
    """The first line of the card that the report does not say; empty when there is none."""
    file = folder / "README.md"
    written = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rendered = card.render(report).splitlines()
    for kind, start, end, *_ in difflib.SequenceMatcher(None, written, rendered, autojunk=False).get_opcodes():
        if kind != "equal":
            line = written[start] if start < end else "(a line is missing)"
            return f"line {start + 1}: {line[:120]}"
    return ""


def _quality(
    artifact: Artifact,
    report: dict[str, Any],
    weights: Path,
    documents: list[Document],
    on_progress: Callable[[str], None],
) -> Iterator[Claim]:
    model, tokenizer, quality = load_model(weights), load_tokenizer(weights), report["quality"]
    windows = evaluation_windows(
        documents,
        tokenizer,
        windows=report["validation"]["windows"],
        prefix=quality["prefix_tokens"],
        continuation=quality["continuation_tokens"],
    )
    prepared = list(prepare(model, windows))
    found = Validation.of(
        [measure(model, artifact.codec(model), prepared, artifact.recommended_step, lambda: None)],
        measure_resident(model, artifact.resident_plan, windows) if artifact.resident_plan else None,
        floor_kl=max(window.floor_kl for window in prepared),
        prefix_tokens=quality["prefix_tokens"],
        continuation_tokens=quality["continuation_tokens"],
    )
    yield Claim("uncompressed model against itself below the limit", True, found.floor_kl < FLOOR_LIMIT, None)
    yield from _domain_claims("all text", quality["overall"], found.overall)
    for name, claimed in quality["domains"].items():
        if name in found.domains:
            yield from _domain_claims(name, claimed, found.domains[name])
        else:
            yield Claim(f"{name}: is in the text", True, False, None)
    if found.resident is not None:
        yield from _resident_claims(report["resident"], found.resident)
    on_progress("measuring other codecs, greedy text and recall again")
    yield from _baseline_claims(model, artifact, report, prepared)
    coders = coders_of(model, artifact.codec(model))
    again = measure_greedy(model, prepared, coders)
    for name, told in report["greedy"].items():
        measured = again[name].mean if name in again else None
        tolerance = _GREEDY_TOLERANCE * told["new_tokens"]
        yield Claim(f"{name}: agreeing greedy tokens", told["mean_agreeing_tokens"], measured, tolerance)
    yield from _recall_claims(model, tokenizer, documents, coders, report["recall"])
    yield from _head_claims(model, tokenizer, artifact, report, prepared)


def _baseline_claims(
    model: Any, artifact: Artifact, report: dict[str, Any], prepared: list[PreparedWindow]
) -> Iterator[Claim]:
    """All but KVTC, which would have to be fitted on the calibration text again."""
    again = measure_baselines(
        model,
        artifact.shape,
        prepared,
        None,
        ratio=report["summary"]["ratio"],
        sink_tokens=artifact.sink_tokens,
        recent_tokens=artifact.recent_tokens,
    )
    found = {(item.name, item.setting): item for item in again}
    for told in report["baselines"]:
        item = found.get((told["name"], told["setting"]))
        if item is not None:
            name = f"{told['name']}, {told['setting']}"
            yield Claim(f"{name}: ratio", told["ratio"], item.ratio, _RATIO_TOLERANCE * told["ratio"])
            yield Claim(f"{name}: mean KL", told["kl_mean"], item.summary.kl_mean, _half_interval(told, item.summary))


def _recall_claims(
    model: Any, tokenizer: Any, documents: list[Document], coders: dict[str, Coder], claimed: list[dict[str, Any]]
) -> Iterator[Claim]:
    asked = {told["task"]: told for told in claimed}
    for found in measure_recall(model, tokenizer, documents, coders):
        told = asked.get(found.task)
        if told is None:
            yield Claim(f"recall, {found.task}: is in the report", True, False, None)
            continue
        yield Claim(f"recall, {found.task}: applicable", told["applicable"], found.applicable, None)
        yield Claim(f"recall, {found.task}: difficulty", told["difficulty"], found.difficulty, None)
        for name, score in told["scores"].items():
            tolerance = _RECALL_ITEMS / max(1, told["items"])
            yield Claim(f"recall, {found.task}, {name}", score, found.scores.get(name, 0.0), tolerance)


def _resident_claims(claimed: dict[str, Any], found: ResidentResult) -> Iterator[Claim]:
    yield Claim("resident: bits a number", claimed["bits_per_value"], found.bits_per_value, 1e-9)
    yield Claim("resident: ratio of coded tokens", claimed["coded_ratio"], found.coded_ratio, 1e-6)
    for name, summary in {"all text": found.summary, **found.domains}.items():
        told = claimed["quality"]["overall"] if name == "all text" else claimed["quality"]["domains"].get(name)
        if told is None:
            yield Claim(f"resident, {name}: is in the report", True, False, None)
            continue
        yield Claim(f"resident, {name}: mean KL", told["kl_mean"], summary.kl_mean, _half_interval(told, summary))
        yield Claim(f"resident, {name}: top-1 agreement", told["top1"], summary.top1, _TOP1_TOLERANCE)
    yield Claim("resident: fused kernel within its limit of plain attention", True, found.kernel_holds, None)


def _domain_claims(name: str, claimed: dict[str, Any], found: DomainResult) -> Iterator[Claim]:
    yield Claim(f"{name}: windows", claimed["windows"], found.summary.windows, None)
    yield Claim(f"{name}: ratio", claimed["ratio"], found.ratio, _RATIO_TOLERANCE * claimed["ratio"])
    yield Claim(f"{name}: mean KL", claimed["kl_mean"], found.summary.kl_mean, _half_interval(claimed, found.summary))
    yield Claim(f"{name}: KL p99", claimed["kl_p99"], found.summary.kl_p99, _share(_TAIL_TOLERANCE, claimed["kl_p99"]))
    yield Claim(f"{name}: top-1 agreement", claimed["top1"], found.summary.top1, _TOP1_TOLERANCE)


def _head_claims(
    model: Any, tokenizer: Any, artifact: Artifact, report: dict[str, Any], prepared: list[PreparedWindow]
) -> Iterator[Claim]:
    """Where the calibration text came with kvalign: rotations are fitted on it."""
    told, documents = report["calibration"], builtin_documents("calibration")
    if told["dataset"] != BUILTIN_DATASET or fingerprint(documents) != told["fingerprint"]:
        return
    lengths = {"tokens": told["tokens"], "length": told["sequence_length"], "seed": told["seed"]}
    fitting = kept_aside(token_sequences(documents, tokenizer, **lengths))
    found = pictured_heads(model, artifact, list(capture(model, artifact.shape, iter(fitting))), prepared)
    for kind, pictures in found.items():
        claimed = report["head_alignment"][kind]
        for name, measured in {"before": pictures.mean_before, "after": pictures.mean_after}.items():
            yield Claim(f"{kind}: likeness of heads {name} rotation", claimed[name], measured, _LIKENESS_TOLERANCE)


def _half_interval(claimed: dict[str, Any], measured: Summary) -> float:
    """Half of the report's own interval, or of the one measured again where that is narrower; a hundredth at least."""
    widths = [
        (high - low) / 2
        for low, high in ((claimed["kl_low"], claimed["kl_high"]), (measured.kl_low, measured.kl_high))
        if low is not None and high is not None
    ]
    return max(min(widths), _share(0.01, claimed["kl_mean"]))


def _share(part: float, claimed: float | None) -> float:
    return part * (claimed or 0.0)
