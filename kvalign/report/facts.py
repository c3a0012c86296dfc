"""What a report says of an artifact and of what follows from it by arithmetic: written by build, compared by verify."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.artifact import Artifact
from kvalign.evaluate.comparison import settings_of
from kvalign.geometry import KINDS
from kvalign.report.findings import kvtc_fits
from kvalign.resident.layout import PAGE_TOKENS

MOST_LISTED_DOCUMENTS = 1000
_CACHE_LENGTHS = (1024, 2048, 8192)
_SPREAD_TOKENS = (10_000, 1_000_000)
STAGES = ("calibrate", "align", "fit", "validate", "report")
TOOLS = ("kvalign", "torch", "transformers", "numba", "numpy")
_NEVER_MEASURED = (
    "accuracy on downstream tasks; recall and greedy text above are the nearest to it",
    "prefixes longer than the windows above",
    "speed on other machines, other lengths and GPUs; python -m benchmarks.generate measures it where it runs",
    "other codecs' own resident forms, and their speed",
)
_NO_KVTC = "KVTC at equal bytes: its basis over the whole cache of this model is too wide to fit here"
_NO_SENSITIVITY = "sensitivity of layers: calibration asked for none"


def codec_facts(artifact: Artifact) -> dict[str, Any]:
    return {
        "codec_id": artifact.codec_id.hex(),
        "recommended_step": artifact.recommended_step,
        "sink_tokens": artifact.sink_tokens,
        "recent_tokens": artifact.recent_tokens,
        "recomputed_layers": artifact.shape.recomputed,
        "layers": len(artifact.shape.geometry.layers),
        "ranks": {stored.group.name: int(stored.directions.shape[1]) for stored in artifact.groups},
        "features": {stored.group.name: stored.group.width for stored in artifact.groups},
    }


def size_facts(artifact: Artifact, payloads: PayloadSizes, ratio: float) -> dict[str, Any]:
    """payloads: of all windows together; ratio: of their coded tokens."""
    geometry = artifact.shape.geometry
    verbatim = artifact.sink_tokens + artifact.recent_tokens
    artifact_bytes = len(artifact.tensor_bytes)
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
        "measured_payloads": asdict(payloads),
        "artifact_bytes": artifact_bytes,
        "artifact_over_weights": artifact_bytes / sum(size for _, size in artifact.base.weights.values()),
        "artifact_break_even_tokens": accounting.break_even_tokens(geometry, artifact_bytes, ratio),
    }


def resident_facts(artifact: Artifact) -> dict[str, Any]:
    resident, plan = artifact.resident, artifact.resident_plan
    assert resident is not None
    assert plan is not None
    bits = plan.bits_per_value if plan.layers else 16.0
    values = sum(layer.width(kind) for layer in resident.geometry.values() for kind in KINDS)
    room = artifact.sink_tokens + plan.recent_tokens + PAGE_TOKENS
    return {
        "bits": resident.bits,
        "bits_per_value": bits,
        "basis": resident.basis,
        "coded_layers": len(resident.layers),
        "page_tokens": PAGE_TOKENS,
        "recent_tokens": plan.recent_tokens,
        "coded_ratio_means": "bf16 bytes of the tokens on pages / bytes of their pages, scales included",
        "cache_ratio_means": "bf16 bytes of the coded layers / bytes held, room for newest tokens included",
        "cache_ratio_by_tokens": {
            str(tokens): accounting.projected_resident_ratio(values, bits, tokens, room) for tokens in _CACHE_LENGTHS
        },
    }


def baseline_settings(artifact: Artifact, ratio: float) -> list[list[str]]:
    """Names and settings of all codecs that are measured beside this one, without the weight that KVTC is given."""
    return [list(item) for item in settings_of(kvtc=kvtc_fits(artifact), ratio=ratio)]


def not_measured(baselines: Sequence[str], recall: Mapping[str, bool], *, sensitivity: bool) -> list[str]:
    """What the card does not claim, and what this very conversion could not measure.

    baselines  names of those measured
    recall     by task: whether it is applicable
    """
    found = [*_NEVER_MEASURED]
    if "KVTC" not in baselines:
        found.append(_NO_KVTC)
    found += [
        f"recall, task {task}: the uncompressed model does not hold it at any difficulty"
        for task, applicable in recall.items()
        if not applicable
    ]
    if not sensitivity:
        found.append(_NO_SENSITIVITY)
    return found
