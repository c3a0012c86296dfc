"""Protocol C: teacher forcing through a compressed cache from the first token on, in chunks, then one by one.

A chunk's own tokens are exact while it is read; every later token sees what the cache kept of them. Scores begin with
the first chunk that finds a page of codes: nothing was compressed before it. Knows any cache of transformers, not only
ours.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from kvalign import accounting
from kvalign.accounting import ResidentSizes
from kvalign.capture import run
from kvalign.evaluate.metrics import Divergence, PositionCurve, Summary, by_position, divergence, summarise
from kvalign.kernels import reference
from kvalign.resident.attention import Mask, attend
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import ResidentPlan
from kvalign.text import Window

CHUNK_TOKENS = 128
KERNEL_LIMIT = 1e-4  # of the fused kernel's deviation from plain attention, relative, in float32
SINGLE_TOKENS = 32


@dataclass(frozen=True)
class ResidentResult:
    """What protocol C found of a resident plan.

    recent_tokens   newest tokens kept in 16 bit while this was measured
    coded_ratio     bf16 bytes of the tokens on pages / bytes of their pages
    bits_per_value  of a coded token, scales included
    kernels         calls of each fused kernel; `tiled` where several tokens were read at once
    dense_layers    layers that were uncompressed whole, because the model's attention cannot read codes
    kernel_error    largest deviation of the fused kernel from plain attention on the same codes, relative to the
                    largest output; None where no fused kernel ran
    """

    summary: Summary
    domains: dict[str, Summary]
    floor_kl: float
    recent_tokens: int
    coded_ratio: float
    bits_per_value: float
    kernels: dict[str, int]
    dense_layers: int
    kernel_error: float | None
    positions: PositionCurve

    @property
    def kernel_holds(self) -> bool:
        return self.kernel_error is None or self.kernel_error <= KERNEL_LIMIT

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ResidentResult":
        domains = {name: Summary(**item) for name, item in data["domains"].items()}
        positions = PositionCurve(**data["positions"])
        return cls(**{**data, "summary": Summary(**data["summary"]), "domains": domains, "positions": positions})


@torch.no_grad()
def forced_logits(model: Any, cache: Cache, tokens: Tensor) -> Tensor:
    """Logits at each token but the last, [T - 1, vocab]; tokens [T] int64, read in chunks and then one by one."""
    bounds = _bounds(tokens.numel())
    parts = [run(model, tokens[None, start:end].to(model.device), cache)[0][0] for start, end in pairwise(bounds)]
    return torch.cat(parts)


def _bounds(tokens: int) -> list[int]:
    """Where each chunk begins, and where the last one ends."""
    last = tokens - 1
    singles = max(0, last - SINGLE_TOKENS)
    return [*range(0, singles, CHUNK_TOKENS), *range(singles, last + 1)]


def first_scored(tokens: int, recent_tokens: int) -> int:
    """Position of the first token that sees a page of codes; behind the first chunk where none does.

    >>> first_scored(1024, 64)
    256
    """
    last, needed = tokens - 1, PAGE_TOKENS + recent_tokens
    singles = max(0, last - SINGLE_TOKENS)
    chunk = -(-needed // CHUNK_TOKENS) * CHUNK_TOKENS
    if chunk < singles:
        return chunk
    return max(needed, singles) if needed < last else min(CHUNK_TOKENS, tokens - 2)


def measure_resident(
    model: Any, plan: ResidentPlan, windows: Sequence[Window], on_window: Callable[[], None] = lambda: None
) -> ResidentResult:
    """Protocol C on every window, through fused attention where the model can be set to it.

    Two passes over each window, by the uncompressed model and through the resident cache; over the first window of each
    domain a third, by the uncompressed model again, for the floor.
    """
    found: list[tuple[str, Divergence]] = []
    floor, error = 0.0, None
    kernels: dict[str, int] = {}
    dense = first = 0
    sizes: list[ResidentSizes] = []
    values = 0
    for window in windows:
        tokens = torch.cat([window.prefix, window.continuation])
        first = first_scored(tokens.numel(), plan.recent_tokens)
        scored = slice(first, None)
        targets = tokens[1:][scored]
        plain = forced_logits(model, DynamicCache(), tokens)[scored]
        if window.domain not in {name for name, _ in found}:
            again = forced_logits(model, DynamicCache(), tokens)[scored]
            floor = max(floor, float(divergence(plain, again, targets).kl.mean()))
        cache = ResidentCache(plan, model)
        with fused_attention(model):
            measured = forced_logits(model, cache, tokens)[scored]
        found.append((window.domain, divergence(plain, measured, targets)))
        for name, calls in {**cache.counters.fused, "tiled": cache.counters.tiled}.items():
            kernels[name] = kernels.get(name, 0) + calls
        dense += cache.counters.dense
        sizes.append(cache.sizes())
        values = cache.values_per_token
        deviation = kernel_error(cache)
        error = deviation if error is None else max(error, deviation or 0.0)
        on_window()
    names = dict.fromkeys(name for name, _ in found)
    return ResidentResult(
        summary=summarise([part for _, part in found]),
        domains={name: summarise([part for other, part in found if other == name]) for name in names},
        floor_kl=floor,
        recent_tokens=plan.recent_tokens,
        coded_ratio=accounting.resident_coded_ratio(values, accounting.merged(sizes)),
        bits_per_value=plan.bits_per_value if plan.layers else 16.0,
        kernels=kernels,
        dense_layers=dense,
        kernel_error=error,
        positions=by_position([part for _, part in found], first),
    )


def kernel_error(cache: ResidentCache, seed: int = 0) -> float | None:
    """Deviation of the fused kernel from plain attention on the first coded layer's own codes, for random queries."""
    layer = next((layer for layer in cache.coded_layers().values() if layer.state.coded_tokens), None)
    if layer is None:
        return None
    state, plan = layer.state, layer.state.plan
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(state.rows, 2 * plan.kv_heads, 1, plan.key_dim, generator=generator)
    queries = queries.to(state.padding.device)
    scaling = plan.key_dim**-0.5
    keys, values = state.dense("keys", torch.float32), state.dense("values", torch.float32)
    wanted = reference.attend(queries, keys, values, None, scaling=scaling)
    got = attend(state, queries, Mask(), layer.counters, scaling=scaling)
    return float((got - wanted).abs().max() / wanted.abs().max())
