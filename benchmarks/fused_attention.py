"""Attention of one query on packed codes against dense attention on uncompressed keys and values, side by side.

    python -m benchmarks.fused_attention --json OUT

Made-up keys and values of one layer, three KV heads of 64 channels with three queries each as SmolLM2-135M has them,
coded by a joint basis. As many copies as a model has layers take turns, because that is how attention meets them:
from memory, not from the processor's caches. The columns *_hot_ms are of one copy again and again.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.environment import describe, say, write_json
from kvalign.kernels import reference
from kvalign.resident.attention import Counters, Mask, attend
from kvalign.resident.fit import allocate_bits, fit_codebook, squared_error
from kvalign.resident.layout import MAX_WIDTH
from kvalign.resident.plan import GroupPlan, LayerPlan, SidePlan
from kvalign.resident.state import LayerState
from kvalign.resident.stored import StoredSide

TOKENS = (1024, 4096, 16384, 65536)
BITS = (3.0, 4.0)
KV_HEADS, SHARED, DIM = 3, 3, 64
SINK_TOKENS, RECENT_TOKENS = 4, 64
UNITS = {
    "bits": "for each number of a coded token, scales included, as asked for",
    "*_ms": "milliseconds, median over the repeats; all ways in turn within a repeat, copies in turn",
    "dense_sdpa": "torch's scaled_dot_product_attention in float32, as transformers calls it for one query",
    "dequant_then_sdpa": "all codes to dense keys and values, then the same",
    "max_abs_error": "of the fused output, against plain attention in float32 on what the codes stand for",
    "relative_error": "that over the largest output",
}


def main() -> None:
    arguments = _arguments()
    rows = []
    for bits in arguments.bits:
        plan = made_up_plan(bits)
        for tokens in arguments.tokens:
            rows.append(measured(plan, bits, tokens, arguments.copies, arguments.repeats))
            say(str(rows[-1]))
    result = {
        "benchmark": "fused_attention",
        "environment": describe(),
        "units": UNITS,
        "setup": {
            "kv_heads": KV_HEADS,
            "queries_per_kv_head": SHARED,
            "head_dim": DIM,
            "batch": 1,
            "copies": arguments.copies,
            "repeats": arguments.repeats,
            "kernel": "numba",
            "sink_tokens": SINK_TOKENS,
            "recent_tokens": RECENT_TOKENS,
        },
        "rows": rows,
    }
    write_json(arguments.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fused_attention", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument("--bits", type=float, nargs="+", default=BITS, metavar="B")
    parser.add_argument("--copies", type=int, default=30, metavar="N", help="layers that take turns")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    return parser.parse_args()


def made_up_plan(bits: float) -> LayerPlan:
    """A joint basis at random over coefficients whose deviations fall by a factor of 30, as measured ones do."""
    generator = torch.Generator().manual_seed(0)
    features = KV_HEADS * DIM
    deviation = torch.exp(torch.linspace(0.0, -math.log(30.0), features))
    sample = torch.randn(100_000, generator=generator).double().sort().values
    books = {width: fit_codebook(sample, width) for width in range(1, MAX_WIDTH + 1)}
    errors = torch.ones(MAX_WIDTH + 1, features, dtype=torch.float64)
    for width, book in books.items():
        errors[width] = squared_error(sample, book.levels().double())
    widths = allocate_bits(errors * deviation.double().square(), bits * features - 8)

    def side() -> SidePlan:
        turned, _ = torch.linalg.qr(torch.randn(features, features, generator=generator))
        return StoredSide.of(torch.zeros(features), deviation[:, None] * turned, deviation, widths).side(books)

    return LayerPlan(KV_HEADS, DIM, DIM, (GroupPlan(0, KV_HEADS, side(), side()),))


@torch.no_grad()
def measured(plan: LayerPlan, bits: float, tokens: int, copies: int, repeats: int) -> dict[str, Any]:
    """One length: milliseconds of each way, and how far the fused one is off."""
    generator = torch.Generator().manual_seed(tokens)
    states = [_filled(plan, tokens, generator) for _ in range(copies)]
    dense = [
        (torch.randn(1, KV_HEADS, tokens, DIM, generator=generator), torch.randn(1, KV_HEADS, tokens, DIM))
        for _ in range(copies)
    ]
    query = torch.randn(1, KV_HEADS * SHARED, 1, DIM, generator=generator)
    counters = Counters({})
    scaling = DIM**-0.5

    def fused(state: LayerState) -> Tensor:
        return attend(state, query, Mask(), counters, scaling=scaling)

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=True)

    def unpacked(state: LayerState) -> Tensor:
        return sdpa(state.dense("keys", torch.float32), state.dense("values", torch.float32))

    wanted = reference.attend(
        query, states[0].dense("keys", torch.float32), states[0].dense("values", torch.float32), None, scaling=scaling
    )
    error = float((fused(states[0]) - wanted).abs().max())
    cold = _milliseconds(
        {
            "fused_ms": lambda copy: fused(states[copy]),
            "dense_sdpa_ms": lambda copy: sdpa(*dense[copy]),
            "dequant_then_sdpa_ms": lambda copy: unpacked(states[copy]),
        },
        copies,
        repeats,
    )
    hot = _milliseconds(
        {"fused_hot_ms": lambda copy: fused(states[0]), "dense_sdpa_hot_ms": lambda copy: sdpa(*dense[0])},
        copies,
        repeats,
    )
    return {
        "tokens": tokens,
        "bits": bits,
        "bits_per_value": round(plan.token_bits / plan.values_per_token, 4),
        **cold,
        **hot,
        "dense_over_fused": round(cold["dense_sdpa_ms"] / cold["fused_ms"], 3),
        "max_abs_error": error,
        "relative_error": error / float(wanted.abs().max()),
    }


def _filled(plan: LayerPlan, tokens: int, generator: torch.Generator) -> LayerState:
    """A state of made-up tokens whose coefficients are normal."""
    state = LayerState(plan, SINK_TOKENS, RECENT_TOKENS)
    group = plan.groups[0]
    keys, values = (
        (torch.randn(tokens, len(side.widths), generator=generator) @ side.synthesis)
        .unflatten(1, (KV_HEADS, DIM))
        .transpose(0, 1)[None]
        for side in (group.keys, group.values)
    )
    state.append(keys, values, torch.zeros(1, dtype=torch.int64))
    state.settle()
    return state


def _milliseconds(ways: dict[str, Callable[[int], Tensor]], copies: int, repeats: int) -> dict[str, float]:
    """Median of each way: one round to warm up, then all ways in turn, each over all copies."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            for copy in range(copies):
                begun = perf_counter()
                way(copy)
                if turn:
                    taken[name].append(1000 * (perf_counter() - begun))
    return {name: round(median(found), 4) for name, found in taken.items()}


if __name__ == "__main__":
    main()
