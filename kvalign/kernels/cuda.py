"""Attention of one query on pages of codes, compiled for graphics processors (Triton). Knows no cache and no model.

    _score_pages   a program a page:   codes of keys -> levels -> scores of all queries, in global memory
    _sum_values    a program a range of pages and a block of coefficients:
                                       scores -> online softmax; codes of values -> levels -> weighted sums
    PyTorch        queries absorbed before; tokens in 16 bit, ranges merged, and coefficients back to channels after

Scores of full length are held, 4 bytes a token and query; keys and values never: a block of coefficients of one page
is. Scores stand between the two kernels because the values of many heads together have more coefficients than one
program has registers, and no score should be made twice.
"""

import math
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvalign.resident.layout import MAX_WIDTH, PAGE_TOKENS, SCALE_BIAS, SCALE_STEPS
from kvalign.resident.plan import GroupPlan, SidePlan, by_head

# Sides of the tiles that are multiplied: the smallest is what a product takes, and the others are about the largest
# with which programs fit their registers (ptxas for sm_90, behind Triton 3.9).
_SMALLEST_TILE = 16
_MOST_QUERIES = 64
_MOST_KEYS = 16  # coefficients at a time
_MOST_VALUES = 64
_CHUNK_TOKENS = 32  # whose values are summed at a time
_PROGRAMS_PER_PROCESSOR = 4
_PROGRAMS_INTERPRETED = 16
_OPTIONS = {"enable_fp_fusion": True}  # which Triton means to leave out from 3.10 on, and warns of where it is not said

_PAGE = tl.constexpr(PAGE_TOKENS)
_BIAS = tl.constexpr(SCALE_BIAS)
_STEPS = tl.constexpr(SCALE_STEPS)
_LOG2E = tl.constexpr(math.log2(math.e))


# ---- unpacking


def coefficients(side: SidePlan, pages: Tensor, scales: Tensor) -> Tensor:
    """As reference.coefficients, on a graphics processor.

    pages    [..., N, page_bytes] uint8, scales [..., N, PAGE_TOKENS] uint8
    returns  [..., R, N x PAGE_TOKENS] float32

    Reads each code once, O(N R PAGE_TOKENS); a program a page and block of coefficients.
    """
    table = _Table.of(side, _MOST_KEYS)
    batch, count, ranks = scales.shape[:-2], scales.shape[-2], len(side.widths)
    flat_pages, flat_scales = _rows(pages), _rows(scales)
    rows = flat_scales.shape[0]
    found = torch.empty(rows, ranks, count * PAGE_TOKENS, dtype=torch.float32, device=pages.device)
    if found.numel():
        with torch.cuda.device_of(found):
            _coefficients[(count, table.blocks, rows)](
                flat_pages,
                flat_scales,
                *table.arguments,
                found,
                ranks,
                count,
                *_strides(flat_pages, flat_scales),
                BLOCK=table.block,
                **_OPTIONS,
            )
    return found.view(*batch, ranks, count * PAGE_TOKENS)


@triton.jit(do_not_specialize=["ranks", "count"])
def _coefficients(  # type: ignore[no-untyped-def]
    pages,
    scales,
    widths,
    offsets,
    polynomials,
    planes,
    padded,
    found,
    ranks,
    count,
    row_stride,
    page_stride,
    scale_row_stride,
    scale_page_stride,
    BLOCK: tl.constexpr,
):
    page = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    t = tl.arange(0, _PAGE)
    r = block * BLOCK + tl.arange(0, BLOCK)
    scale = _scale(scales + row * scale_row_stride + page * scale_page_stride, t, t < _PAGE)
    at = pages + row * row_stride + page * page_stride
    level = _levels(at, t, widths, offsets, polynomials, planes, padded, block, BLOCK)
    to = found + (row * ranks + r)[:, None] * (count * _PAGE) + page * _PAGE + t[None, :]
    tl.store(to, level * scale[None, :], mask=(r < ranks)[:, None])


@triton.jit
def _scale(scales, t, held):  # type: ignore[no-untyped-def]
    """[T] float32: scales of the tokens t of a page; of those not held, one that is finite."""
    code = tl.load(scales + t, mask=held, other=0)
    return tl.exp2((code.to(tl.float32) - _BIAS) / _STEPS)


@triton.jit
def _levels(page, t, widths, offsets, polynomials, planes, padded, block, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK, T] float32: levels of a block of coefficients, tokens t of the page at `page`; zeros past the last one.

    The tables are padded to whole blocks: their own loads need no mask.
    """
    r = block * BLOCK + tl.arange(0, BLOCK)
    width = tl.load(widths + r)[:, None]
    # Times 16 here, so that the compiler knows how bytes are aligned.
    start = tl.load(offsets + r)[:, None] * 16
    present = tl.load(planes + block)
    code = tl.full([BLOCK, t.shape[0]], 0, tl.int32)
    if present & 8:
        code += _plane(page, t[None, :], width, start, 8)
    if present & 4:
        code += _plane(page, t[None, :], width, start, 4)
    if present & 2:
        code += _plane(page, t[None, :], width, start, 2)
    if present & 1:
        code += _plane(page, t[None, :], width, start, 1)
    u = code.to(tl.float32)
    c0 = tl.load(polynomials + r)[:, None]
    c1 = tl.load(polynomials + padded + r)[:, None]
    c2 = tl.load(polynomials + 2 * padded + r)[:, None]
    c3 = tl.load(polynomials + 3 * padded + r)[:, None]
    return ((c3 * u + c2) * u + c1) * u + c0


@triton.jit
def _plane(page, t, width, start, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK, T] int32: the part of codes that is in planes of BITS; zeros where a width has none.

    Wider planes come before it: as many bits of the code as they have, and 16 bytes for each of these (layout.planes).
    """
    before = width & (16 - 2 * BITS)
    byte = tl.load(page + start + before * 16 + t % (16 * BITS), mask=(width & BITS) != 0, other=0)
    field = (byte.to(tl.int32) >> (t // (16 * BITS) * BITS)) & ((1 << BITS) - 1)
    return field << before


# ---- attention of one query a row


def attend_one(
    group: GroupPlan,
    queries: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    counts: Tensor,
    first: Tensor,
    hidden: Tensor | None,
    raw_keys: Tensor,
    raw_values: Tensor,
    raw_visible: Tensor,
    *,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """One query of each head of a group, on the group's pages and on its tokens in 16 bit; see cpu.attend_one.

    queries      [B, G, DK] float32, scaled
    keys         codes [B, N, page_bytes] and log scales [B, N, PAGE_TOKENS], uint8 both; values alike
    counts       [N] int32: tokens that each page holds; slots of the pages are numbered through them
    first        [B] int64: first slot that may be seen of the pages
    hidden       [B, slots of the pages] bool: True where a token may not be seen; None when none is hidden
    raw_keys     [B, H, n, DK] 16-bit floats; raw_values [B, H, n, DV]
    raw_visible  [B, n] bool: which of the raw tokens may be seen
    softcap      bound that scores approach; 0 for none
    sink_logits  [G]: learned logit of a token that has no value; None for none
    returns      [B, G, DV] float32; zeros where nothing is seen

    O(B N PAGE_TOKENS G (RK + RV)) multiplications, in float32; besides codes it reads and writes the scores,
    4 B G N PAGE_TOKENS bytes. Pages are read where they are, as long as the bytes of each are consecutive.
    """
    pages = _attend_pages(group, queries, keys, values, counts, first, hidden, softcap)
    raw = _attend_raw(group, queries, raw_keys, raw_values, raw_visible, softcap)
    return _merged(group, pages, raw, sink_logits)


@dataclass(frozen=True)
class _Part:
    """What S ranges of tokens add to attention, in powers of two: tops [B, S, G], weights [B, S, G], sums [B, S, G, X].

    sums are of coefficients for pages, X = R, and of channels for raw tokens, X = DV. A range that saw nothing has
    weight 0 and the top -inf.
    """

    tops: Tensor
    weights: Tensor
    sums: Tensor


def _attend_pages(
    group: GroupPlan,
    queries: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    counts: Tensor,
    first: Tensor,
    hidden: Tensor | None,
    softcap: float,
) -> _Part:
    rows, heads, device = queries.shape[0], queries.shape[1], queries.device
    pages, ranks = keys[0].shape[1], len(group.values.widths)
    key_table, value_table = _Table.of(group.keys, _MOST_KEYS), _Table.of(group.values, _MOST_VALUES)
    tile = _tile(heads, _MOST_QUERIES)
    tiles = -(-heads // tile)
    splits, share = _splits(pages, rows * tiles * value_table.blocks, device)
    part = _Part(
        torch.empty(rows, splits, heads, dtype=torch.float32, device=device),
        torch.empty(rows, splits, heads, dtype=torch.float32, device=device),
        torch.empty(rows, splits, heads, ranks, dtype=torch.float32, device=device),
    )
    if not splits or not rows:
        return part
    absorbed = by_head(queries.float(), group.absorbing).contiguous()
    scores = torch.empty(rows, heads, pages * PAGE_TOKENS, dtype=torch.float32, device=device)
    held = counts.to(device=device, dtype=torch.int32)
    unseen = None if hidden is None else hidden.contiguous().view(torch.uint8)
    key_pages, key_scales, value_pages, value_scales = map(_dense_pages, (*keys, *values))
    warps = 4 if tile == _SMALLEST_TILE else 8
    with torch.cuda.device_of(queries):
        _score_pages[(pages, tiles, rows)](
            absorbed,
            key_pages,
            key_scales,
            *key_table.arguments,
            held,
            held.cumsum(0) - held,
            first.to(device),
            unseen,
            scores,
            heads,
            len(group.keys.widths),
            pages,
            0 if unseen is None else unseen.shape[1],
            *_strides(key_pages, key_scales),
            float(softcap),
            CAPPED=softcap > 0,
            TILE=tile,
            BLOCK=key_table.block,
            num_warps=warps,
            **_OPTIONS,
        )
        _sum_values[(splits, value_table.blocks * tiles, rows)](
            scores,
            value_pages,
            value_scales,
            *value_table.arguments,
            held,
            part.tops,
            part.weights,
            part.sums,
            heads,
            ranks,
            pages,
            share,
            *_strides(value_pages, value_scales),
            TILE=tile,
            BLOCK=value_table.block,
            TOKENS=_CHUNK_TOKENS,
            num_warps=warps,
            **_OPTIONS,
        )
    return part


@triton.jit(do_not_specialize=["heads", "ranks", "count", "slots"])
def _score_pages(  # type: ignore[no-untyped-def]
    absorbed,
    pages,
    scales,
    widths,
    offsets,
    polynomials,
    planes,
    padded,
    counts,
    starts,
    first,
    hidden,
    scores,
    heads,
    ranks,
    count,
    slots,
    row_stride,
    page_stride,
    scale_row_stride,
    scale_page_stride,
    softcap,
    CAPPED: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of a tile of queries on one page, in powers of two: [TILE, PAGE_TOKENS]; -inf where nothing is seen.

    absorbed [B, G, R + 1]: what a query is to each coefficient, and to the mean.
    """
    page = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    g = tl.program_id(1) * TILE + tl.arange(0, TILE)
    t = tl.arange(0, _PAGE)
    own = g < heads
    slot = tl.load(starts + page) + t
    seen = (t < tl.load(counts + page)) & (slot >= tl.load(first + row))
    if hidden is not None:
        seen = seen & (tl.load(hidden + row * slots + slot, mask=seen, other=1) == 0)
    scale = _scale(scales + row * scale_row_stride + page * scale_page_stride, t, seen)
    at = pages + row * row_stride + page * page_stride
    query = absorbed + (row * heads + g) * (ranks + 1)
    score = tl.full([TILE, _PAGE], 0, tl.float32)
    for block in range(0, padded // BLOCK):
        r = block * BLOCK + tl.arange(0, BLOCK)
        level = _levels(at, t, widths, offsets, polynomials, planes, padded, block, BLOCK)
        part = tl.load(query[:, None] + r[None, :], mask=own[:, None] & (r < ranks)[None, :], other=0.0)
        score = tl.dot(part, level, score, input_precision="ieee")
    mean = tl.load(query + ranks, mask=own, other=0.0)
    score = score * scale[None, :] + mean[:, None]
    if CAPPED:
        score = softcap * _tanh(score / softcap)
    score = tl.where(seen[None, :], score * _LOG2E, float("-inf"))
    to = scores + (row * heads + g)[:, None] * (count * _PAGE) + page * _PAGE + t[None, :]
    tl.store(to, score, mask=own[:, None])


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Within 1e-7: the power never overflows, and Triton's interpreter has no tanh of its own."""
    e = tl.exp2(tl.abs(x) * (-2 * _LOG2E))
    y = (1 - e) / (1 + e)
    return tl.where(x < 0, -y, y)


@triton.jit(do_not_specialize=["heads", "ranks", "count", "share"])
def _sum_values(  # type: ignore[no-untyped-def]
    scores,
    pages,
    scales,
    widths,
    offsets,
    polynomials,
    planes,
    padded,
    counts,
    tops,
    weights,
    sums,
    heads,
    ranks,
    count,
    share,
    row_stride,
    page_stride,
    scale_row_stride,
    scale_page_stride,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """A block of coefficients of the values, summed over a range of `share` pages with the probabilities of a tile."""
    split = tl.program_id(0)
    block = tl.program_id(1) % (padded // BLOCK)
    row = tl.program_id(2).to(tl.int64)
    g = tl.program_id(1) // (padded // BLOCK) * TILE + tl.arange(0, TILE)
    r = block * BLOCK + tl.arange(0, BLOCK)
    own = g < heads
    top = tl.full([TILE], float("-inf"), tl.float32)
    weight = tl.full([TILE], 0, tl.float32)
    total = tl.full([TILE, BLOCK], 0, tl.float32)
    chunks = _PAGE // TOKENS
    for chunk in range(split * share * chunks, tl.minimum((split + 1) * share, count) * chunks):
        page = tl.cast(chunk // chunks, tl.int64)
        t = chunk % chunks * TOKENS + tl.arange(0, TOKENS)
        at = scores + (row * heads + g)[:, None] * (count * _PAGE) + page * _PAGE + t[None, :]
        score = tl.load(at, mask=own[:, None], other=float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        settled = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(top - settled)
        p = tl.exp2(score - settled[:, None])
        weight = weight * fade + tl.sum(p, 1)
        scale = _scale(scales + row * scale_row_stride + page * scale_page_stride, t, t < tl.load(counts + page))
        codes = pages + row * row_stride + page * page_stride
        level = _levels(codes, t, widths, offsets, polynomials, planes, padded, block, BLOCK)
        total = tl.dot(p * scale[None, :], tl.trans(level), total * fade[:, None], input_precision="ieee")
        top = higher
    to = (row * tl.num_programs(0) + split) * heads + g
    tl.store(sums + to[:, None] * ranks + r[None, :], total, mask=own[:, None] & (r < ranks)[None, :])
    if block == 0:
        tl.store(tops + to, top, mask=own)
        tl.store(weights + to, weight, mask=own)


def _attend_raw(
    group: GroupPlan, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, softcap: float
) -> _Part:
    """Tokens in 16 bit, in one range. What is not seen may be anything, not a number too."""
    tokens = visible.shape[1]
    grouped = queries.float().unflatten(1, (group.heads, -1))
    scores = (grouped @ keys[:, :, :tokens].float().mT).flatten(1, 2)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = (scores * math.log2(math.e)).masked_fill(~visible[:, None], float("-inf"))
    tops = scores.amax(-1) if tokens else scores.new_full(scores.shape[:-1], float("-inf"))
    weights = (scores - _settled(tops)[..., None]).exp2()
    seen = values[:, :, :tokens].float().masked_fill(~visible[:, None, :, None], 0.0)
    sums = (weights.unflatten(1, (group.heads, -1)) @ seen).flatten(1, 2)
    return _Part(tops[:, None], weights.sum(-1)[:, None], sums[:, None])


def _merged(group: GroupPlan, pages: _Part, raw: _Part, sink_logits: Tensor | None) -> Tensor:
    """Ranges of pages and of raw tokens in one softmax, and coefficients back to channels: [B, G, DV]."""
    tops, weights = torch.cat([pages.tops, raw.tops], dim=1), torch.cat([pages.weights, raw.weights], dim=1)
    if sink_logits is not None:
        logits = (sink_logits.detach().float() * math.log2(math.e)).expand(tops.shape[0], 1, -1)
        tops, weights = torch.cat([tops, logits], dim=1), torch.cat([weights, torch.ones_like(logits)], dim=1)
    shares = (tops - _settled(tops.amax(1, keepdim=True))).exp2()
    weights = weights * shares
    splits = pages.tops.shape[1]
    coded = (pages.sums * shares[:, :splits, :, None]).sum(1)
    held = weights[:, :splits].sum(1)
    found = by_head(torch.cat([coded, held[..., None]], dim=-1), group.releasing)
    found = found + raw.sums[:, 0] * shares[:, splits, :, None]
    weight = weights.sum(1)
    return found / weight.masked_fill(weight == 0, 1.0)[..., None]


# ---- what they share


def _settled(tops: Tensor) -> Tensor:
    """Tops to take scores from: 0 where nothing is seen, as -inf less -inf is not a number."""
    return tops.masked_fill(tops == float("-inf"), 0.0)


@dataclass(frozen=True)
class _Table:
    """Where and what each coefficient of one side is, on its device, padded to whole blocks with width 0.

    arguments  widths [padded] int32, offsets [padded] int32 in 16 bytes, polynomials [4, padded] float32,
               planes [blocks] int32 (bits of all widths of a block), padded
    """

    block: int
    blocks: int
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, int]

    @classmethod
    def of(cls, side: SidePlan, most: int) -> "_Table":
        """With at most `most` coefficients in a block; made once for each plan."""
        made = _tables.setdefault(side, {})
        if most not in made:
            made[most] = cls._made(side, most)
        return made[most]

    @classmethod
    def _made(cls, side: SidePlan, most: int) -> "_Table":
        ranks, device = len(side.widths), side.mean.device
        block = _tile(ranks, most)
        blocks = max(1, -(-ranks // block))
        widths = torch.zeros(blocks * block, dtype=torch.int32)
        widths[:ranks] = torch.tensor(side.widths, dtype=torch.int32)
        offsets = torch.zeros_like(widths)
        offsets[:ranks] = torch.tensor(side.layout.offsets, dtype=torch.int32) // 16
        polynomials = torch.from_numpy(side.polynomials)[widths].mT.contiguous()
        planes = torch.zeros(blocks, dtype=torch.int32)
        for width in range(1, MAX_WIDTH + 1):
            planes |= (widths.view(blocks, block) == width).any(1).int() * width
        tensors = (widths.to(device), offsets.to(device), polynomials.to(device), planes.to(device))
        return cls(block, blocks, (*tensors, blocks * block))


_tables: WeakKeyDictionary[SidePlan, dict[int, _Table]] = WeakKeyDictionary()


def _tile(size: int, most: int) -> int:
    """Side of the tiles that `size` coefficients or queries are taken in: a power of two up to `most`."""
    return min(max(_SMALLEST_TILE, 1 << max(0, size - 1).bit_length()), most)


def _splits(pages: int, others: int, device: torch.device) -> tuple[int, int]:
    """How many ranges, and pages of each, keep the device busy beside `others` programs a range."""
    wanted = -(-_programs(device) // max(1, others))
    share = max(1, -(-pages // wanted))
    return -(-pages // share), share


@cache
def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROGRAMS_INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS_PER_PROCESSOR


def _rows(x: Tensor) -> Tensor:
    """[..., N, bytes] as [rows, N, bytes]."""
    return _dense_pages(x.reshape(x.shape[:-2].numel(), *x.shape[-2:]))


def _dense_pages(x: Tensor) -> Tensor:
    """The same where the bytes of each page are consecutive; else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(pages: Tensor, scales: Tensor) -> tuple[int, int, int, int]:
    """Bytes from row to row and from page to page, of codes and of scales."""
    return (pages.stride(0), pages.stride(1), scales.stride(0), scales.stride(1))
