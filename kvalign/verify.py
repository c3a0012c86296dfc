"""Measure a converted model's claims again: hashes, sizes, and the quality that its report tells. Writes nothing.

written_claims    what can be compared without the model: the report with itself, with its artifact, with its files
measure_again     the windows once more, through the artifact, by every protocol
measured_claims   what the report says beside what was measured; tolerances come from what was measured alone
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvalign.artifact import Artifact, load_artifact, sha256_of
from kvalign.capture import capture, load_model, load_tokenizer, position_limit
from kvalign.config import BUILTIN_DATASET
from kvalign.errors import DatasetInvalid
from kvalign.evaluate.coders import coders_of
from kvalign.evaluate.comparison import BaselineResult, measure_baselines
from kvalign.evaluate.greedy import GreedyResult, measure_greedy
from kvalign.evaluate.heads import HeadPictures
from kvalign.evaluate.metrics import Summary
from kvalign.evaluate.protocol import FLOOR_LIMIT, prepare
from kvalign.evaluate.recall import RecallResult, measure_recall
from kvalign.evaluate.resident import ResidentResult, measure_resident
from kvalign.evaluate.search import measure
from kvalign.evaluate.validation import DomainResult, Validation, WindowResult
from kvalign.geometry import Kind
from kvalign.load import fetch, model_folder
from kvalign.report.against_artifact import claims_of_artifact
from kvalign.report.against_files import claims_of_files
from kvalign.report.claims import MISSING, Claim, each, known
from kvalign.report.consistency import claims_within
from kvalign.report.findings import pictured_heads
from kvalign.report.read import read_report
from kvalign.report.source_card import carried_fields
from kvalign.report.structure import column_and_row_structure
from kvalign.text import (
    Document,
    builtin_documents,
    evaluation_windows,
    fingerprint,
    kept_aside,
    read_documents,
    token_sequences,
)
from kvalign.windows import WINDOW_TOKENS, prefix_tokens

# Another machine sums in another order: a symbol at a rounding edge may fall to its other side.
_RATIO_TOLERANCE = 0.01
_TOP1_TOLERANCE = 0.01
_TAIL_TOLERANCE = 0.25
_LEAST_KL_TOLERANCE = 0.01
_ONE_WINDOW_TOLERANCE = 0.05  # of a mean KL without an interval
_GREEDY_TOLERANCE = 0.15  # of the longest: a near tie that falls the other way ends one window's agreement
_RECALL_ITEMS = 2
_LIKENESS_TOLERANCE = 0.01
_KERNEL_TOLERANCE = 9  # times what was measured: which sums a kernel makes first depends on the machine
_SHORTEST_SEQUENCE = 8
_NOT_AGAIN = "(not measured again)"

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """What was measured again.

    validation      at the recommended step, and at the finest and the coarsest that the report tells of
    fingerprint     of the text
    heads           None where the calibration text did not come with kvalign
    """

    validation: Validation
    fingerprint: str
    baselines: list[BaselineResult]
    heads: dict[Kind, HeadPictures] | None


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
    Cost: about seventeen passes over the validation windows, and the recall tasks.
    Not measured again, and told as skipped: KVTC, which would be fitted on the calibration text for minutes; likeness
    of heads, where that text did not come with kvalign; speed.
    """
    folder = fetch(repo_or_folder, report=True, **where)
    artifact = load_artifact(folder)
    report = read_report(folder)
    documents = _documents(report, text)
    weights = model_folder(folder, artifact, base, where.get("token"), where.get("endpoint"))
    artifact.base.check(weights)
    on_progress("hashing the weights")
    claims = [
        *_hashes(artifact, weights),
        *written_claims(folder, artifact, report),
        *_carried(folder, weights, report),
    ]
    on_progress("measuring the windows again")
    measured = measure_again(artifact, report, weights, documents, on_progress)
    return [*claims, *measured_claims(report, measured)]


def written_claims(folder: Path, artifact: Artifact, report: Report) -> Iterator[Claim]:
    """What can be compared without the model, in seconds."""
    yield from claims_within(report)
    yield from claims_of_artifact(artifact, report)
    yield from claims_of_files(folder, artifact, report)


def measured_claims(report: Report, measured: Measured) -> Iterator[Claim]:
    """What the report says beside what was measured again."""
    found, quality = measured.validation, report["quality"]
    for name in ("prefix_tokens", "continuation_tokens"):
        yield Claim(f"quality.{name}", quality[name], getattr(found, name), None)
    yield Claim("validation.fingerprint", report["validation"]["fingerprint"], measured.fingerprint, None)
    yield Claim("uncompressed model against itself below the limit", True, found.floor_kl < FLOOR_LIMIT, None)
    yield Claim("summary.floor_kl", report["summary"]["floor_kl"], known(found.floor_kl), FLOOR_LIMIT)
    yield from _domain_claims("all text", quality["overall"], found.overall)
    yield Claim("validation.domains: those of the text", report["validation"]["domains"], sorted(found.domains), None)
    for name, claimed in quality["domains"].items():
        if name in found.domains:
            yield from _domain_claims(name, claimed, found.domains[name])
        else:
            yield Claim(f"{name}: is in the text", True, False, None)
    yield from _payload_claims(report["sizes"]["measured_payloads"], found)
    yield from _window_claims(quality["worst_windows"], found)
    yield from _point_claims(report, found)
    yield from _resident_claims(report["resident"], found.resident)
    yield from _baseline_claims(report["baselines"], measured.baselines)
    yield from _greedy_claims(report["greedy"], found.greedy)
    yield from _recall_claims(report["recall"], found.recall)
    yield from _head_claims(report["head_alignment"], measured.heads)
    yield Claim("speed", _NOT_AGAIN, _NOT_AGAIN, None, skipped=True)


def measure_again(
    artifact: Artifact,
    report: Report,
    weights: Path,
    documents: list[Document],
    on_progress: Callable[[str], None] = lambda what: None,
) -> Measured:
    """The windows once more, by every protocol; of the report only the number of windows and calibration are read."""
    model, tokenizer = load_model(weights), load_tokenizer(weights)
    length = min(WINDOW_TOKENS, position_limit(model, otherwise=WINDOW_TOKENS))
    lengths = {"prefix": prefix_tokens(length), "continuation": length - prefix_tokens(length)}
    windows = evaluation_windows(documents, tokenizer, windows=report["validation"]["windows"], **lengths)
    prepared = list(prepare(model, windows))
    codec = artifact.codec(model)
    coders = coders_of(model, codec)
    steps = [artifact.recommended_step, *_ends(artifact)]
    at_rest = [measure(model, codec, prepared, step, lambda: None) for step in steps]
    resident = measure_resident(model, artifact.resident_plan, windows) if artifact.resident_plan else None
    on_progress("measuring other codecs, greedy text and recall again")
    return Measured(
        validation=Validation.of(
            at_rest,
            resident,
            floor_kl=max(window.floor_kl for window in prepared),
            prefix_tokens=lengths["prefix"],
            continuation_tokens=lengths["continuation"],
            recall=measure_recall(model, tokenizer, documents, coders),
            greedy=measure_greedy(model, prepared, coders),
        ),
        fingerprint=fingerprint(documents),
        baselines=measure_baselines(
            model,
            artifact.shape,
            prepared,
            None,
            ratio=1.0,
            sink_tokens=artifact.sink_tokens,
            recent_tokens=artifact.recent_tokens,
        ),
        heads=_heads_again(model, tokenizer, artifact, report, prepared),
    )


def _ends(artifact: Artifact) -> list[int]:
    """The finest and the coarsest step of the artifact's curve, without the recommended one."""
    steps = [point.step for point in artifact.curve]
    return [] if not steps else sorted({min(steps), max(steps)} - {artifact.recommended_step})


def _heads_again(
    model: Any, tokenizer: Any, artifact: Artifact, report: Report, prepared: Sequence[Any]
) -> dict[Kind, HeadPictures] | None:
    """Where the calibration text came with kvalign: rotations are fitted on it."""
    told, documents = report["calibration"], builtin_documents("calibration")
    if told["dataset"] != BUILTIN_DATASET or fingerprint(documents) != told["fingerprint"]:
        return None
    if told["sequence_length"] < _SHORTEST_SEQUENCE:  # of no conversion; the artifact says otherwise
        return None
    lengths = {"tokens": told["tokens"], "length": told["sequence_length"], "seed": told["seed"]}
    fitting = kept_aside(token_sequences(documents, tokenizer, **lengths))
    return pictured_heads(model, artifact, list(capture(model, artifact.shape, iter(fitting))), prepared)


def _documents(report: Report, text: Path | None) -> list[Document]:
    claimed = report["validation"]
    if text is None and claimed["dataset"] != BUILTIN_DATASET:
        raise DatasetInvalid(
            f"The report was measured on {claimed['dataset'][:80]!r}, which does not come with kvalign.",
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


def _carried(folder: Path, weights: Path, report: Report) -> Iterator[Claim]:
    """Licence and gate text, where the base model lies elsewhere with a card of its own."""
    if weights != folder and (weights / "README.md").is_file():
        yield from each("source.carried", report["source"]["carried"], carried_fields(weights))
    else:
        yield Claim("source.carried", _NOT_AGAIN, _NOT_AGAIN, None, skipped=True)


def _domain_claims(name: str, claimed: Report, found: DomainResult) -> Iterator[Claim]:
    yield Claim(f"{name}: ratio", claimed["ratio"], found.ratio, _RATIO_TOLERANCE * found.ratio)
    yield Claim(
        f"{name}: ratio of the cache", claimed["cache_ratio"], found.cache_ratio, _RATIO_TOLERANCE * found.ratio
    )
    yield from _summary_claims(name, claimed, found.summary)


def _summary_claims(name: str, claimed: Report, found: Summary) -> Iterator[Claim]:
    kl = _kl_tolerance(found)
    tail = _TAIL_TOLERANCE
    yield Claim(f"{name}: windows", claimed["windows"], found.windows, None)
    yield Claim(f"{name}: scored tokens", claimed["tokens"], found.tokens, None)
    yield Claim(f"{name}: mean KL", claimed["kl_mean"], known(found.kl_mean), kl)
    yield from _interval_claims(name, claimed, found)
    yield Claim(f"{name}: KL p99", claimed["kl_p99"], known(found.kl_p99), max(tail * found.kl_p99, FLOOR_LIMIT))
    yield Claim(f"{name}: largest KL", claimed["kl_max"], known(found.kl_max), max(tail * found.kl_max, FLOOR_LIMIT))
    variation = max(_LEAST_KL_TOLERANCE, _TOP1_TOLERANCE * found.total_variation)
    yield Claim(f"{name}: total variation", claimed["total_variation"], known(found.total_variation), variation)
    yield Claim(f"{name}: top-1 agreement", claimed["top1"], found.top1, _TOP1_TOLERANCE)
    yield Claim(f"{name}: change of NLL", claimed["nll_delta"], known(found.nll_delta), kl)


def _interval_claims(name: str, claimed: Report, found: Summary) -> Iterator[Claim]:
    """Ends move as the mean does, and are held closer than it: no interval is told much wider or narrower."""
    within = max(_kl_tolerance(found) / 4, _LEAST_KL_TOLERANCE * found.kl_mean, FLOOR_LIMIT)
    yield Claim(f"{name}: KL from", claimed["kl_low"], known(found.kl_low), within)
    yield Claim(f"{name}: KL to", claimed["kl_high"], known(found.kl_high), within)


def _kl_tolerance(found: Summary) -> float:
    """Half of the interval that was measured, a hundredth of the mean at least; nothing below the floor counts."""
    if found.kl_low is not None and found.kl_high is not None:
        width = max((found.kl_high - found.kl_low) / 2, _LEAST_KL_TOLERANCE * found.kl_mean)
    else:
        width = _ONE_WINDOW_TOLERANCE * found.kl_mean
    return max(width, FLOOR_LIMIT)


def _payload_claims(claimed: Report, found: Validation) -> Iterator[Claim]:
    for name, size in asdict(found.sizes).items():
        within = _RATIO_TOLERANCE * size if name in ("coded", "side_info") else None
        yield Claim(f"payloads: {name}", claimed[name], size, within)


def _window_claims(claimed: Sequence[Report], found: Validation) -> Iterator[Claim]:
    """Rank by rank, since near windows may change places; what else is told is that of a window of this domain."""
    ranked = sorted(found.windows, key=lambda window: -window.kl_mean)
    kl = _kl_tolerance(found.overall.summary)
    for index, (told, at_rank) in enumerate(zip(claimed, ranked, strict=False)):
        name = f"worst window {index + 1}"
        yield Claim(f"{name}: mean KL", told["kl_mean"], known(at_rank.kl_mean), kl)
        own = _nearest(told, ranked)
        if own is None:
            yield Claim(f"{name}: its domain", told["domain"], "another", None)
            continue
        yield Claim(f"{name}: its mean KL in {own.domain}", told["kl_mean"], known(own.kl_mean), kl)
        yield Claim(f"{name}: largest KL", told["kl_max"], known(own.kl_max), max(_TAIL_TOLERANCE * own.kl_max, kl))
        yield Claim(f"{name}: top-1 agreement", told["top1"], own.top1, 2 * _TOP1_TOLERANCE)


def _nearest(told: Report, windows: Sequence[WindowResult]) -> WindowResult | None:
    """The window of the domain told whose mean KL is nearest."""
    own = [window for window in windows if window.domain == told["domain"]]
    return min(own, key=lambda window: abs(window.kl_mean - (told["kl_mean"] or 0.0)), default=None)


def _point_claims(report: Report, found: Validation) -> Iterator[Claim]:
    """The ends of the curve; the recommended step is in the tables, and what lies between is the artifact's own."""
    told = {point["step"]: point for point in report["operating_points"]}
    summary = found.overall.summary
    share = _kl_tolerance(summary) / max(summary.kl_mean, FLOOR_LIMIT) if math.isfinite(summary.kl_mean) else 0.0
    for point in found.curve:
        if point.step == found.step:
            continue
        name, own = f"step {point.step}", told.get(point.step)
        if own is None:
            yield Claim(f"{name}: is in the report", True, False, None)
            continue
        kl = max(share * point.kl_mean, FLOOR_LIMIT)
        yield Claim(f"{name}: ratio", own["ratio"], point.ratio, _RATIO_TOLERANCE * point.ratio)
        yield Claim(f"{name}: mean KL", own["kl_mean"], known(point.kl_mean), kl)
        yield Claim(
            f"{name}: KL p99", own["kl_p99"], known(point.kl_p99), max(_TAIL_TOLERANCE * point.kl_p99, FLOOR_LIMIT)
        )
        yield Claim(f"{name}: top-1 agreement", own["top1"], point.top1, _TOP1_TOLERANCE)


def _resident_claims(claimed: Report, found: ResidentResult | None) -> Iterator[Claim]:
    if found is None:
        yield Claim("resident: is in the artifact", True, False, None)
        return
    quality, kernel = claimed["quality"], claimed["kernel"]
    yield Claim("resident: ratio of coded tokens", claimed["coded_ratio"], found.coded_ratio, 1e-6)
    yield Claim("resident: scored from", quality["scored_from"], found.positions.first, None)
    yield Claim("resident: floor", quality["floor_kl"], known(found.floor_kl), FLOOR_LIMIT)
    yield from _summary_claims("resident, all text", quality["overall"], found.summary)
    for name, summary in found.domains.items():
        if name in quality["domains"]:
            yield from _summary_claims(f"resident, {name}", quality["domains"][name], summary)
        else:
            yield Claim(f"resident, {name}: is in the report", True, False, None)
    yield Claim("resident: fused kernel within its limit of plain attention", True, found.kernel_holds, None)
    yield Claim("resident: layers uncompressed", kernel["dense_layers"], found.dense_layers, None)
    error = found.kernel_error
    within = None if error is None else _KERNEL_TOLERANCE * max(error, FLOOR_LIMIT / 10)
    yield Claim("resident: deviation of the fused kernel", kernel["relative_error"], error, within)
    calls, again = kernel["calls"], found.kernels
    if calls.keys() != again.keys():  # another kernel runs here: as often
        calls, again = ({"all": sum(ran.values())} for ran in (calls, again))
    yield Claim("resident: calls of kernels", calls, again, None)


def _baseline_claims(claimed: Sequence[Report], again: Sequence[BaselineResult]) -> Iterator[Claim]:
    """All but KVTC, which would have to be fitted on the calibration text again."""
    found = {(item.name, item.setting): item for item in again}
    for told in claimed:
        item, name = found.pop((told["name"], told["setting"]), None), f"{told['name']}, {told['setting']}"
        if told["name"] == "KVTC":
            yield Claim(name, _NOT_AGAIN, _NOT_AGAIN, None, skipped=True)
        elif item is None:
            yield Claim(f"{name}: is a codec that is measured", True, False, None)
        else:
            yield from _baseline(name, told, item)
    for missing in found:
        yield Claim(f"{', '.join(missing)}: is in the report", True, False, None)


def _baseline(name: str, told: Report, item: BaselineResult) -> Iterator[Claim]:
    summary, kl = item.summary, _kl_tolerance(item.summary)
    yield Claim(f"{name}: ratio", told["ratio"], item.ratio, _RATIO_TOLERANCE * item.ratio)
    yield Claim(f"{name}: artifact_bytes", told["artifact_bytes"], item.artifact_bytes, None)
    yield Claim(f"{name}: mean KL", told["kl_mean"], known(summary.kl_mean), kl)
    yield from _interval_claims(name, told, summary)
    yield Claim(
        f"{name}: KL p99", told["kl_p99"], known(summary.kl_p99), max(_TAIL_TOLERANCE * summary.kl_p99, FLOOR_LIMIT)
    )
    yield Claim(f"{name}: top-1 agreement", told["top1"], summary.top1, _TOP1_TOLERANCE)


def _greedy_claims(claimed: Report, again: Mapping[str, GreedyResult]) -> Iterator[Claim]:
    for name in dict.fromkeys((*again, *claimed)):
        if name not in again or name not in claimed:
            yield Claim(f"{name}: agreeing greedy tokens", name in claimed, name in again, None)
            continue
        told, found = claimed[name], again[name]
        within = _GREEDY_TOLERANCE * found.new_tokens
        yield Claim(f"{name}: agreeing greedy tokens", told["mean_agreeing_tokens"], found.mean, within)
        yield Claim(f"{name}: greedy tokens made", told["new_tokens"], found.new_tokens, None)
        yield Claim(f"{name}: windows of greedy text", len(told["agreeing"]), len(found.agreeing), None)


def _recall_claims(claimed: Sequence[Report], again: Sequence[RecallResult]) -> Iterator[Claim]:
    asked = {told["task"]: told for told in claimed}
    for found in again:
        name, told = f"recall, {found.task}", asked.get(found.task)
        if told is None:
            yield Claim(f"{name}: is in the report", True, False, None)
            continue
        for key in ("applicable", "difficulty", "items", "prefix_tokens"):
            yield Claim(f"{name}: {key}", told[key], getattr(found, key), None)
        within = _RECALL_ITEMS / max(1, found.items)
        for cache in dict.fromkeys((*found.scores, *told["scores"])):
            score, measured = told["scores"].get(cache, MISSING), found.scores.get(cache, MISSING)
            yield Claim(f"{name}, {cache}", score, measured, within)


def _head_claims(claimed: Report, again: Mapping[Kind, HeadPictures] | None) -> Iterator[Claim]:
    if again is None:
        yield Claim("likeness of heads", _NOT_AGAIN, _NOT_AGAIN, None, skipped=True)
        return
    for kind, pictures in again.items():
        told = claimed[kind]
        for name, measured in {"before": pictures.mean_before, "after": pictures.mean_after}.items():
            claim = f"{kind}: likeness of heads {name} rotation"
            yield Claim(claim, told[name], known(measured), _LIKENESS_TOLERANCE)
        for name, picture in {"absolute": pictures.absolute, "variance": pictures.variance}.items():
            shares = column_and_row_structure(picture.numpy())
            for part, measured in zip(("columns", "rows"), shares, strict=True):
                yield Claim(f"{kind}: {part} of {name} activations", told[name][part], measured, _LIKENESS_TOLERANCE)
