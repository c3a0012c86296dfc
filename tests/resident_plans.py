"""Plans of the resident form with made-up bases, for tests that need no model."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvalign.geometry import KINDS, Kind
from kvalign.resident.layout import PAGE_TOKENS, Codebook
from kvalign.resident.plan import GroupPlan, LayerPlan, SidePlan
from kvalign.resident.state import LayerState


def codebook(width: int) -> Codebook:
    """Levels up to about three deviations, a little wider apart at the ends."""
    middle = ((1 << width) - 1) / 2
    reach = {1: 0.8, 2: 1.5, 3: 2.2, 4: 2.8, 5: 3.3, 6: 3.7, 7: 4.0, 8: 4.5}[width]
    bend = 0.5 / middle**2
    return Codebook(width, reach / (middle * (1 + bend * middle * middle)), bend)


def side_plan(widths: Sequence[int], features: int, generator: torch.Generator) -> SidePlan:
    """A skewed basis: its inverse is not its transpose, and coefficients differ in size."""
    mixing = torch.randn(features, features, generator=generator) / features**0.5 + torch.eye(features)
    rank = len(widths)
    deviation = torch.linspace(2.0, 0.3, features)
    analysis = torch.linalg.inv(deviation[:, None] * mixing)
    energy = deviation[:rank].square()
    return SidePlan(
        mean=torch.randn(features, generator=generator),
        analysis=analysis[:, :rank].contiguous(),
        synthesis=(deviation[:, None] * mixing)[:rank].contiguous(),
        energy=energy / energy.sum(),
        widths=tuple(sorted(widths, reverse=True)),
        books={width: codebook(width) for width in set(widths)},
    )


def layer_plan(
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    *,
    widths: Sequence[int] = (8,),
    joint: bool = True,
    seed: int = 0,
) -> LayerPlan:
    """Every coefficient coded, its width taken in turn from `widths`."""
    generator = torch.Generator().manual_seed(seed)
    spans = [(0, kv_heads)] if joint else [(head, head + 1) for head in range(kv_heads)]
    groups = []
    for first, end in spans:
        sides = []
        for dim in (key_dim, value_dim):
            features = (end - first) * dim
            turns = [widths[index % len(widths)] for index in range(features)]
            sides.append(side_plan(turns, features, generator))
        groups.append(GroupPlan(first, end, *sides))
    return LayerPlan(kv_heads, key_dim, value_dim, tuple(groups))


def tokens_like(plan: SidePlan, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """[*shape, P]: tokens whose coefficients are about normal, each token larger or smaller as a whole."""
    z = torch.randn(*shape, len(plan.widths), generator=generator)
    size = torch.exp2(torch.randn(*shape, 1, generator=generator))
    return (z * size) @ plan.synthesis + plan.mean


def layer_tokens(plan: LayerPlan, rows: int, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, D] float32 that a layer's plan fits, rounded to bfloat16, which float16 holds too."""
    parts: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
    for group in plan.groups:
        for kind in KINDS:
            x = tokens_like(group.side(kind), (rows, tokens), generator)
            parts[kind].append(x.unflatten(2, (group.heads, -1)).transpose(1, 2))
    keys, values = (torch.cat(parts[kind], dim=1).bfloat16().float() for kind in KINDS)
    return keys, values


def filled(
    plan: LayerPlan,
    tokens: int,
    *,
    rows: int = 1,
    sink_tokens: int = 4,
    recent_tokens: int = 16,
    padding: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> LayerState:
    """The state of a layer that read so many tokens at once."""
    state = LayerState(plan, sink_tokens, recent_tokens)
    keys, values = layer_tokens(plan, rows, tokens, torch.Generator().manual_seed(seed))
    state.append(keys.to(dtype), values.to(dtype), torch.tensor(padding or [0] * rows))
    state.settle()
    return state


def slow_unpack(page: Sequence[int], widths: Sequence[int]) -> list[list[int]]:
    """Codes [R][PAGE_TOKENS] of one page, bit by bit, as layout.py's first sentences say."""
    found, at = [], 0
    for width in widths:
        codes = [0] * PAGE_TOKENS
        low = 0
        for plane in (8, 4, 2, 1):
            if not width & plane:
                continue
            for token in range(PAGE_TOKENS):
                byte, bit = token % (16 * plane), plane * (token // (16 * plane))
                codes[token] |= (page[at + byte] >> bit) % 2**plane << low
            at += 16 * plane
            low += plane
        found.append(codes)
    assert at == len(page)
    return found
