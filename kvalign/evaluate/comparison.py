"""Other people's codecs on the windows that ours was judged on, keeping the same tokens in 16 bit. Protocol R.

KVTC is tried at the published 16 times and at the ratio that our codec reached, with the better of two weights for
values on the first window; the others at every setting they have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.capture import CacheShape, layer_tensors
from kvalign.evaluate.baselines import Baseline, Fp8, Kivi, KvtcFit
from kvalign.evaluate.metrics import Summary, summarise
from kvalign.evaluate.protocol import CacheCoder, PreparedWindow, try_coder
from kvalign.verbatim import verbatim_dtype

PUBLISHED_KVTC_RATIO = 16.0
# How much squared error in values counts against keys: the better of the two is KVTC's.
KVTC_VALUE_WEIGHTS = (1.0, 4.0)
KIVI_BITS = (4, 3, 2)
# DEFLATE takes about this much off KVTC's nominal size at high ratios (docs/log.md).
_DEFLATE_GAIN = 1.1


@dataclass(frozen=True)
class BaselineResult:
    """One baseline at one setting.

    ratio           bf16 bytes of the coded tokens / bytes they take, side information included
    artifact_bytes  what decoding needs besides the payload
    """

    name: str
    setting: str
    ratio: float
    artifact_bytes: int
    summary: Summary

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "BaselineResult":
        return cls(**{**data, "summary": Summary(**data["summary"])})


def settings_of(*, kvtc: bool, ratio: float) -> list[tuple[str, str]]:
    """Names and settings of what measure_baselines measures, in its order, without the weight that KVTC is given."""
    found = [("fp8", "E4M3"), *(("KIVI-style", f"{bits} bit") for bits in KIVI_BITS)]
    return found + ([("KVTC", _kvtc_setting(wanted)) for wanted in _kvtc_ratios(ratio)] if kvtc else [])


def _kvtc_ratios(ratio: float) -> list[float]:
    """Nominal ones: as published, and what comes out near ours."""
    return sorted({PUBLISHED_KVTC_RATIO, ratio / _DEFLATE_GAIN})


def _kvtc_setting(wanted: float) -> str:
    return f"{wanted:.4g} times nominally"


@torch.no_grad()
def measure_baselines(
    model: Any,
    shape: CacheShape,
    prepared: Sequence[PreparedWindow],
    kvtc: KvtcFit | None,
    *,
    ratio: float,
    sink_tokens: int,
    recent_tokens: int,
    on_window: Callable[[], None] = lambda: None,
) -> list[BaselineResult]:
    """Every baseline on every window.

    shape   of the whole cache: baselines recompute nothing
    kvtc    None where no basis over the whole cache was fitted
    ratio   of coded tokens, that ours has

    Cost: a round trip and a continuation pass for each window and setting, seven settings with KVTC.
    """
    shape = replace(shape, recomputed=0)

    def measured(name: str, setting: str, body: Any, windows: Sequence[PreparedWindow]) -> BaselineResult:
        coder = keeping_recent(Baseline(shape, body, sink_tokens), recent_tokens)
        trials = []
        for window in windows:
            trials.append(try_coder(model, window, coder))
            on_window()
        sizes = accounting.merged([trial.sizes for trial in trials])
        return BaselineResult(
            name,
            setting,
            accounting.coded_ratio(shape.geometry, sizes),
            getattr(body, "artifact_bytes", 0),
            summarise([trial.divergence for trial in trials]),
        )

    found = [measured("fp8", "E4M3", Fp8(shape), prepared)]
    found += [measured("KIVI-style", f"{bits} bit", Kivi(shape, bits), prepared) for bits in KIVI_BITS]
    if kvtc is not None:
        first = {
            weight: measured("KVTC", "", kvtc.at(PUBLISHED_KVTC_RATIO, weight), prepared[:1]).summary.kl_mean
            for weight in KVTC_VALUE_WEIGHTS
        }
        weight = min(first, key=lambda weight: first[weight])
        for wanted in _kvtc_ratios(ratio):
            setting = f"{_kvtc_setting(wanted)}, values x {weight:g}"
            found.append(measured("KVTC", setting, kvtc.at(wanted, weight), prepared))
    return found


def keeping_recent(coder: CacheCoder, recent_tokens: int) -> CacheCoder:
    """The coder on all tokens but the newest, which stay in 16 bit."""

    def kept(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        pairs = layer_tensors(prepared.cache)
        recent = min(recent_tokens, pairs[0][0].shape[2])
        half = verbatim_dtype(pairs)
        body, cache = DynamicCache(), DynamicCache()
        for index, (keys, values) in enumerate(pairs):
            body.update(keys[:, :, : keys.shape[2] - recent], values[:, :, : keys.shape[2] - recent], index)
        decoded, sizes = coder(replace(prepared, cache=body))
        verbatim = 0
        for index, (pair, coded) in enumerate(zip(pairs, layer_tensors(decoded), strict=True)):
            newest = [x[:, :, x.shape[2] - recent :].to(half) for x in pair]
            verbatim += sum(x.nbytes for x in newest)
            cache.update(*(torch.cat([a, b.to(a.dtype)], dim=2) for a, b in zip(coded, newest, strict=True)), index)
        return cache, replace(sizes, verbatim=sizes.verbatim + verbatim, verbatim_tokens=sizes.verbatim_tokens + recent)

    return kept
