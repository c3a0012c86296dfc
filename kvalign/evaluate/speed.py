"""How quick the codec is beside the model itself: ratios of times taken in turns on one machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from kvalign.capture import run
from kvalign.codec import Codec
from kvalign.evaluate.protocol import PreparedWindow, copied
from kvalign.resident.interface import fused_attention

_ROUNDS = 2
_NEW_TOKENS = 6


@dataclass(frozen=True)
class SpeedResult:
    """Medians of two rounds, everything measured in turns.

    prefill_s           reading the prefix anew, uncompressed
    encode_s, decode_s  its cache to bytes, and from bytes to a plain cache
    dynamic_tokens_per_s, resident_tokens_per_s
                        greedy tokens behind the prefix, one row: uncompressed, and from the resident cache through
                        fused attention; None where there is no resident form
    """

    prefix_tokens: int
    prefill_s: float
    encode_s: float
    decode_s: float
    dynamic_tokens_per_s: float
    resident_tokens_per_s: float | None

    @property
    def prefill_over_encode(self) -> float:
        return self.prefill_s / self.encode_s

    @property
    def prefill_over_decode(self) -> float:
        return self.prefill_s / self.decode_s

    @property
    def resident_over_dynamic(self) -> float | None:
        return None if self.resident_tokens_per_s is None else self.resident_tokens_per_s / self.dynamic_tokens_per_s


@torch.no_grad()
def measure_speed(model: Any, codec: Codec, prepared: PreparedWindow) -> SpeedResult:
    """A prefill, two round trips and 12 single tokens for each of two rounds, and one of each before to warm up."""
    prefix = prepared.window.prefix[None]

    def encode() -> bytes:
        return codec.encode(prepared.cache, input_ids=prefix, watched=prepared.watched)

    data = encode()
    works: dict[str, Callable[[], Any]] = {
        "prefill": lambda: run(model, prefix, logits_to_keep=1),
        "encode": encode,
        "decode": lambda: codec.decode_dense(data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    rates: dict[str, list[float]] = {"dynamic": [], "resident": []}
    for number in range(_ROUNDS + 1):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begun)
        rates["dynamic"].append(_tokens_per_s(model, copied(prepared.cache), prepared))
        if codec.resident is not None:
            with fused_attention(model):
                rates["resident"].append(_tokens_per_s(model, codec.decode(data), prepared))
        if number == 0:
            for times in (*seconds.values(), *rates.values()):
                times.clear()
    return SpeedResult(
        prefix_tokens=prefix.shape[1],
        prefill_s=median(seconds["prefill"]),
        encode_s=median(seconds["encode"]),
        decode_s=median(seconds["decode"]),
        dynamic_tokens_per_s=median(rates["dynamic"]),
        resident_tokens_per_s=median(rates["resident"]) if rates["resident"] else None,
    )


def _tokens_per_s(model: Any, cache: Any, prepared: PreparedWindow) -> float:
    fed = prepared.window.continuation[None, :1]
    begun = time.perf_counter()
    for _ in range(_NEW_TOKENS):
        logits, _ = run(model, fed, cache, logits_to_keep=1)
        fed = logits[:, -1].argmax(-1, keepdim=True)
    return _NEW_TOKENS / (time.perf_counter() - begun)
