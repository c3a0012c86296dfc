"""Attention of queries on one layer's state: pages of codes and tokens in 16 bit, merged in one softmax.

One query a row goes through the fused kernel of its device. More of them (a chunk of a prompt, candidates to verify)
are multiplied with a few pages of coefficients at a time. Neither ever makes keys or values of full length.
"""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign import kernels
from kvalign.errors import ConfigInvalid
from kvalign.geometry import KINDS, Kind
from kvalign.kernels import cpu
from kvalign.resident.plan import GroupPlan, by_head
from kvalign.resident.state import LayerState

_TILE_PAGES = 8
_TILE_QUERIES = 256
_TILE_TOKENS = 1024  # uncompressed, read at once
_NO_LOGITS = np.zeros(0, dtype=np.float32)
_LOWEST = torch.finfo(torch.float32).min / 2


@dataclass
class Counters:
    """How attention was computed since the cache was made; proof that nothing of full length was dense.

    fused           calls of the fused kernel, by its name
    tiled           calls with several queries a row, on a few pages at a time
    dense           layers that were uncompressed whole for an attention that cannot read codes
    widest_tokens   most tokens of one layer that were coefficients or keys and values at one time
    """

    fused: dict[str, int]
    tiled: int = 0
    dense: int = 0
    widest_tokens: int = 0

    def ran(self, kernel: str) -> None:
        self.fused[kernel] = self.fused.get(kernel, 0) + 1

    def saw(self, tokens: int) -> None:
        self.widest_tokens = max(self.widest_tokens, tokens)


@dataclass(frozen=True)
class Mask:
    """What queries may see, and what is added to their scores.

    visible  [B or 1, QH or 1, Q, slots] bool; None: all, or all before where causal
    bias     [B or 1, QH or 1, Q, slots] float32; None: nothing
    causal   whether a query of several sees only slots up to its own, where visible is None
    """

    visible: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = True

    @classmethod
    def of(cls, attention_mask: Tensor | None, causal: bool = True) -> "Mask":
        """A mask as transformers hands it to attention: booleans, or numbers with the lowest where nothing is seen."""
        if attention_mask is None:
            return cls(causal=causal)
        if attention_mask.dtype == torch.bool:
            return cls(attention_mask)
        bias = attention_mask.float()
        visible = bias > max(_LOWEST, torch.finfo(attention_mask.dtype).min / 2)
        return cls(visible, torch.where(visible, bias, 0.0) if bias[visible].any() else None)


def attend(
    state: LayerState,
    queries: Tensor,
    mask: Mask,
    counters: Counters,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    fresh: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of the newest Q slots on everything held, themselves included.

    queries      [B, QH, Q, D], rotated
    sink_logits  [QH]: learned logit of a token that has no value
    fresh        keys and values of the newest Q slots before they were rounded to 16 bit
    returns      [B, QH, Q, DV] in the dtype of queries; zeros where a query may see nothing
    """
    queries = queries.detach()
    _check(state, queries)
    if queries.shape[2] == 1 and _is_plain(mask):
        if queries.device.type == "cpu":
            counters.ran("numba")
            found = _fused_on_cpu(state, queries, mask, scaling, softcap, sink_logits)
            return found if queries.dtype == torch.float32 else found.to(queries.dtype)
        triton = kernels.triton_kernels() if queries.device.type == "cuda" else None
        if triton is not None:
            counters.ran("triton")
            return fused_by_triton(triton, state, queries, mask, scaling, softcap, sink_logits).to(queries.dtype)
    counters.tiled += 1
    parts = [
        _tiled(
            state, queries, slice(start, start + _TILE_QUERIES), mask, counters, scaling, softcap, sink_logits, fresh
        )
        for start in range(0, queries.shape[2], _TILE_QUERIES)
    ]
    return torch.cat(parts, dim=2).to(queries.dtype)


def _check(state: LayerState, queries: Tensor) -> None:
    plan = state.plan
    if queries.shape[0] != state.rows or queries.shape[1] % plan.kv_heads or queries.shape[3] != plan.key_dim:
        raise ConfigInvalid(
            f"Queries {tuple(queries.shape)} do not fit a cache of {state.rows} rows, {plan.kv_heads} KV heads and keys"
            f" of {plan.key_dim} channels.",
            "Use the cache with the model and the batch that it was made for.",
        )


def _is_plain(mask: Mask) -> bool:
    """Whether the mask is the same for all heads, and adds nothing."""
    return mask.bias is None and (mask.visible is None or mask.visible.shape[1] == 1)


# ---- one query a row


def _fused_on_cpu(
    state: LayerState,
    queries: Tensor,
    mask: Mask,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    own = queries.float().numpy()
    seen, hidden = _visible_on_cpu(state, mask)
    raw_keys, raw_values = (state.raw_buffer(kind).view(torch.int16).numpy() for kind in KINDS)
    shared = queries.shape[1] // state.plan.kv_heads
    out = []
    for index, group in enumerate(state.plan.groups):
        heads = slice(group.first_head * shared, group.end_head * shared)
        out.append(
            cpu.attend_one(
                state.gathered(index),
                own[:, heads],
                scaling,
                state.first_coded_array,
                hidden,
                raw_keys,
                raw_values,
                seen,
                bfloat16=state.raw_buffer("keys").dtype == torch.bfloat16,
                softcap=softcap or 0.0,
                sink_logits=_NO_LOGITS if sink_logits is None else sink_logits[heads].detach().float().numpy(),
            )
        )
    return torch.from_numpy(out[0] if len(out) == 1 else np.concatenate(out, axis=1))


def _visible_on_cpu(state: LayerState, mask: Mask) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """As _visible, [B, n] and [B, slots], [B, 0] for none hidden; without calls of torch where nothing is masked."""
    none = np.zeros((state.rows, 0), dtype=np.uint8)
    if mask.visible is None and not state.most_padding and min(state.slots, state.coded_tokens) >= state.sink_tokens:
        return np.ones((state.rows, state.sink_tokens + state.raw_tokens), dtype=np.uint8), none
    seen, hidden = _visible(state, mask)
    return seen.numpy().view(np.uint8), none if hidden is None else hidden.numpy().view(np.uint8)


def fused_by_triton(
    triton: ModuleType,
    state: LayerState,
    queries: Tensor,
    mask: Mask,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """One query a row through kernels/cuda.py, [B, QH, 1, DV] float32."""
    seen, hidden = _visible(state, mask)
    counts = torch.tensor(state.counts, dtype=torch.int32, device=queries.device)
    own = queries[:, :, 0].float() * scaling
    shared = queries.shape[1] // state.plan.kv_heads
    out = []
    for group, pages in zip(state.plan.groups, state.pages, strict=True):
        heads = slice(group.first_head * shared, group.end_head * shared)
        out.append(
            triton.attend_one(
                group,
                own[:, heads],
                *((pages[kind].codes, pages[kind].scales) for kind in KINDS),
                counts,
                state.first_coded,
                hidden,
                *(state.raw(kind)[:, group.first_head : group.end_head] for kind in KINDS),
                seen,
                softcap=softcap or 0.0,
                sink_logits=None if sink_logits is None else sink_logits[heads],
            )
        )
    return torch.cat(out, dim=1)[:, :, None]


def _visible(state: LayerState, mask: Mask) -> tuple[Tensor, Tensor | None]:
    """For one query a row: raw tokens that are seen [B, n], and slots of pages that are not [B, slots]; None: none."""
    if mask.visible is None:
        return state.raw_slots() >= 0, None
    slots, visible = state.raw_slots(), mask.visible[:, 0, 0].expand(state.rows, -1)
    seen = (slots >= 0) & visible.gather(1, slots.clamp_min(0))
    return seen, ~visible[:, : state.coded_tokens]


# ---- several queries a row


def _tiled(
    state: LayerState,
    queries: Tensor,
    span: slice,
    mask: Mask,
    counters: Counters,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    fresh: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The queries of a span, [B, QH, Q, DV] float32."""
    q = queries[:, :, span].float() * scaling
    own_slots = torch.arange(state.slots - queries.shape[2], state.slots, device=q.device)[span]
    shared = q.shape[1] // state.plan.kv_heads
    out = []
    for index, group in enumerate(state.plan.groups):
        heads = slice(group.first_head * shared, group.end_head * shared)
        softmax = _OnlineSoftmax(q[:, heads], group, softcap, None if sink_logits is None else sink_logits[heads])
        for first in range(0, len(state.counts), _TILE_PAGES):
            slots = state.coded_slots(first, first + _TILE_PAGES).to(q.device)
            seen = _seen(mask, slots.expand(state.rows, -1), own_slots, span, heads, state.first_coded)
            if not seen.any():
                continue
            counters.saw(slots.numel())
            keys, values = (
                kernels.coefficients(
                    group.side(kind),
                    state.pages[index][kind].codes[:, first : first + _TILE_PAGES],
                    state.pages[index][kind].scales[:, first : first + _TILE_PAGES],
                )
                for kind in KINDS
            )
            softmax.add_coded(keys, values, seen, _bias(mask, slots.expand(state.rows, -1), span, heads))
        slots = state.raw_slots()
        raw_keys, raw_values = (
            _newest_exact(state, kind, group, None if fresh is None else fresh[part]) for part, kind in enumerate(KINDS)
        )
        held = (slots >= 0)[:, None, :, None]
        raw_keys, raw_values = raw_keys.where(held, 0.0), raw_values.where(held, 0.0)  # padding may hold anything
        for first in range(0, slots.shape[1], _TILE_TOKENS):
            part = slice(first, first + _TILE_TOKENS)
            seen = _seen(mask, slots[:, part], own_slots, span, heads, torch.zeros_like(state.padding))
            if seen.any():
                bias = _bias(mask, slots[:, part], span, heads)
                softmax.add_raw(raw_keys[:, :, part], raw_values[:, :, part], seen, bias)
        out.append(softmax.result())
    return torch.cat(out, dim=1)


def _newest_exact(state: LayerState, kind: Kind, group: GroupPlan, fresh: Tensor | None) -> Tensor:
    """Raw keys or values of a group in float32, the newest as they were before they were rounded."""
    found = state.raw(kind)[:, group.first_head : group.end_head].float()
    if fresh is None:
        return found
    new = fresh[:, group.first_head : group.end_head].float()
    found[:, :, found.shape[2] - new.shape[2] :] = new
    state.fill_sinks(found, new, state.slots - new.shape[2])
    return found


def _seen(mask: Mask, slots: Tensor, own: Tensor, span: slice, heads: slice, first: Tensor) -> Tensor:
    """Whether queries see the tokens at slots: [B, QH or 1, Q, T] bool.

    slots  [B, T], -1 for none; own [Q]: slots of the queries; first [B]: slots below it are not seen
    """
    seen = (slots >= first[:, None])[:, None, None] & (slots >= 0)[:, None, None]
    if mask.visible is not None:
        return seen & _at(mask.visible, slots, span, heads)
    if mask.causal:
        return seen & (slots[:, None, None] <= own[:, None])
    return seen.expand(-1, -1, own.numel(), -1)


def _bias(mask: Mask, slots: Tensor, span: slice, heads: slice) -> Tensor | None:
    return None if mask.bias is None else _at(mask.bias, slots, span, heads)


def _at(table: Tensor, slots: Tensor, span: slice, heads: slice) -> Tensor:
    """Columns of a mask at slots [B, T]: [B, QH or 1, Q, T]."""
    picked = table[:, heads if table.shape[1] > 1 else slice(None), span].expand(slots.shape[0], -1, -1, -1)
    return picked.gather(3, slots.clamp_min(0)[:, None, None].expand(-1, *picked.shape[1:3], -1))


class _OnlineSoftmax:
    """Softmax over tokens that come in parts; keeps the largest score, the weight, and sums.

    queries      [B, G, Q, D] scaled, of the heads of one group
    sink_logits  [G], or None
    """

    def __init__(self, queries: Tensor, group: GroupPlan, softcap: float | None, sink_logits: Tensor | None) -> None:
        self._queries = queries
        self._absorbed = by_head(queries, group.absorbing)  # [B, G, Q, R + 1]
        self._group = group
        self._softcap = softcap
        shape = queries.shape[:3]
        if sink_logits is None:
            self._top = queries.new_full(shape, float("-inf"))
            self._weight = queries.new_zeros(shape)
        else:
            self._top = sink_logits.float().view(1, -1, 1).expand(shape).clone()
            self._weight = queries.new_ones(shape)
        self._coded = queries.new_zeros(*shape, len(group.values.widths))
        self._coded_weight = queries.new_zeros(shape)
        self._raw = queries.new_zeros(*shape, group.releasing.shape[2])

    def add_coded(self, keys: Tensor, values: Tensor, seen: Tensor, bias: Tensor | None) -> None:
        """keys and values [B, R, T] coefficients."""
        scores = self._absorbed[..., :-1].flatten(1, 2) @ keys
        scores = scores.view(*self._absorbed.shape[:3], -1) + self._absorbed[..., -1:]
        weights = self._weights(scores, seen, bias)
        sums = weights.flatten(1, 2) @ values.mT
        self._coded += sums.view(*weights.shape[:3], -1)
        self._coded_weight += weights.sum(-1)

    def add_raw(self, keys: Tensor, values: Tensor, seen: Tensor, bias: Tensor | None) -> None:
        """keys and values [B, H, T, D]."""
        weights = self._weights(_times_own(self._queries, keys.mT), seen, bias)
        self._raw += _times_own(weights, values)

    def _weights(self, scores: Tensor, seen: Tensor, bias: Tensor | None) -> Tensor:
        if self._softcap:
            scores = self._softcap * (scores / self._softcap).tanh()
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~seen, float("-inf"))
        top = torch.maximum(self._top, scores.amax(-1))
        settled = top.masked_fill(top == float("-inf"), 0.0)
        fade = (self._top - settled).exp()
        weights = (scores - settled[..., None]).exp()
        self._top = top
        self._weight = self._weight * fade + weights.sum(-1)
        self._coded = self._coded * fade[..., None]
        self._raw = self._raw * fade[..., None]
        self._coded_weight = self._coded_weight * fade
        return weights

    def result(self) -> Tensor:
        """[B, G, Q, DV]."""
        sums = torch.cat([self._coded, self._coded_weight[..., None]], dim=-1)
        found = by_head(sums, self._group.releasing) + self._raw
        return found / self._weight.masked_fill(self._weight == 0, 1.0)[..., None]


def _times_own(x: Tensor, matrices: Tensor) -> Tensor:
    """x [B, G, Q, X], query heads of a KV head in a row, times its row's own of [B, H, X, Y]: [B, G, Q, Y]."""
    grouped = x.unflatten(1, (matrices.shape[1], -1))
    return (grouped.flatten(2, 3) @ matrices).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
