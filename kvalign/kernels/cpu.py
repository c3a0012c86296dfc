"""Attention of one query on pages of codes, and what goes with it, compiled for processors (Numba).

    for two pages at a time:   codes -> levels, some coefficients at a time -> scores of all queries -> online softmax
                               codes -> levels of the values                -> sums weighted by probability
    over ranges of pages in threads, merged at the end

Nothing of full length is ever dense: _CHUNK coefficients of 256 tokens are. The loops count in unsigned numbers,
because Numba must not guess that an index is negative: only then are they compiled to vector instructions. Products of
tiles are in vectors.py.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.compiled import njit, numba, prange
from kvalign.kernels import vectors
from kvalign.kernels.reference import TRIED_SCALES
from kvalign.resident.layout import PAGE_TOKENS, SCALE_BIAS, SCALE_STEPS
from kvalign.resident.plan import GroupPlan, SidePlan

# Numba's plainest threads abort the process when two callers meet in them.
_one_caller = threading.Lock()

_LOG2E = np.float32(np.log2(np.e))
_NEVER = np.float32(-1e30)
_FAINT = np.float32(-60.0)  # probabilities below 2^-60 of the largest are nothing, and never denormal
_SCALES = np.exp2((np.arange(256) - SCALE_BIAS) / SCALE_STEPS).astype(np.float32)
_TRIED = np.array(TRIED_SCALES, dtype=np.int64)

f4, u1, U = np.float32, np.uint8, np.uint64
U0, U1, U2, U3, U4, U16, U32, U64, U96, U128 = (U(i) for i in (0, 1, 2, 3, 4, 16, 32, 64, 96, 128))
_BLOCK = U(2 * PAGE_TOKENS)
_CHUNK = U(16)  # coefficients that are levels at one time; a multiple of 4
_GROUP, _LANES, _TILE = U(vectors.GROUP), U(vectors.LANES), U(vectors.TILE_TOKENS)
add_scores, add_score, add_sums, add_sum = vectors.add_scores, vectors.add_score, vectors.add_sums, vectors.add_sum
look_up_16, look_up_32, look_up_64 = vectors.look_up_16, vectors.look_up_32, vectors.look_up_64
widen_float16, widen_bfloat16 = vectors.widen_float16, vectors.widen_bfloat16
largest, total = vectors.largest, vectors.total
_RAW_BLOCK = U64  # tokens in 16 bit that are read at one time; a multiple of 4


def _threads() -> int:
    """As many as torch uses."""
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


# ---- encoding


def encode(side: SidePlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.encode, on the CPU."""
    z = ((x - side.mean) @ side.analysis).contiguous()
    pages = z.shape[-2] // PAGE_TOKENS * (z[..., 0, 0].numel())
    packed = np.zeros((pages, side.layout.page_bytes), dtype=np.uint8)
    scales = np.zeros((pages, PAGE_TOKENS), dtype=np.uint8)
    levels = side.levels.numpy()
    bounds = np.full((levels.shape[0], levels.shape[1] + 1), np.float32(np.inf), dtype=np.float32)
    bounds[:, 0] = -np.inf
    bounds[:, 1:-1] = (levels[:, 1:] + levels[:, :-1]) / 2
    for width in set(side.widths):
        bounds[width, 1 << width] = np.inf  # above the last code there is nothing
    widths = side.width_array.astype(np.int64)
    middle, gain, cubic = (np.ascontiguousarray(side.centred[widths, column]) for column in range(3))
    with _one_caller:
        numba.set_num_threads(_threads())
        _encode(
            z.view(-1, z.shape[-1]).numpy(),
            side.energy.numpy(),
            widths,
            side.offset_array.astype(np.int64),
            middle,
            1 / gain,
            cubic / gain,
            gain,
            bounds,
            packed,
            scales,
        )
    shape = (*z.shape[:-2], z.shape[-2] // PAGE_TOKENS)
    return torch.from_numpy(packed).view(*shape, -1), torch.from_numpy(scales).view(*shape, PAGE_TOKENS)


@njit(cache=True, nogil=True, parallel=True, fastmath={"contract", "reassoc", "arcp", "nsz"})
def _encode(z, energy, widths, offsets, middle, density, bend, level, bounds, packed, scales):  # type: ignore[no-untyped-def]
    ranks = z.shape[1]
    for page in prange(packed.shape[0]):
        codes = np.empty((ranks, PAGE_TOKENS), dtype=np.uint8)
        placed = np.empty(ranks, dtype=np.float32)
        for t in range(PAGE_TOKENS):
            own = z[page * PAGE_TOKENS + t]
            power = f4(0)
            for r in range(ranks):
                power += own[r] * own[r] * energy[r]
            start = int(np.rint(np.log2(max(power, f4(1e-30))) * (SCALE_STEPS / 2))) + SCALE_BIAS
            best, least = 0, f4(np.inf)
            for step in _TRIED:
                tried = min(max(start + step, 0), 255)
                error = _error(own, energy, middle, density, bend, level, _SCALES[tried], placed)
                if error < least:
                    best, least = tried, error
            scales[page, t] = best
            _error(own, energy, middle, density, bend, level, _SCALES[best], placed)
            for r in range(ranks):
                # Exactly the nearest: what was found by iteration may be one off where two are nearly as near.
                # Clamped, because what stands in padding need not be a number.
                code = min(max(int(placed[r]), 0), int(f4(2) * middle[r]))
                y = own[r] / _SCALES[best]
                code += int(y >= bounds[widths[r], code + 1]) - int(y < bounds[widths[r], code])
                codes[r, t] = code
        for r in range(ranks):
            _pack(codes[r], widths[r], packed[page], offsets[r])


@njit(cache=True, nogil=True, fastmath=True, error_model="numpy")  # a check for zero would forbid vectors
def _error(own, energy, middle, density, bend, level, scale, placed):  # type: ignore[no-untyped-def]
    """Squared error of one token at a scale; placed: its codes, counted from the middle.

    Levels are (z + b z^3) / density, so that half way between those of z and z + 1 stands c (1 + 3/4 b) + b c^3 with
    c = z + 1/2: what solves this for a coefficient, rounded, is its nearest level. Newton's method from above, where
    it never overshoots; what is beyond the last level is brought there first.
    """
    density_of_one = f4(1) / scale
    total = f4(0)
    for r in range(own.size):
        b = bend[r]
        slope = f4(1) + f4(0.75) * b
        last = middle[r]
        far = min(abs(own[r]) * density_of_one * density[r], (slope + b * last * last) * last)
        p = min(far, last)
        p -= ((slope + b * p * p) * p - far) / (slope + f4(3) * b * p * p)
        p -= ((slope + b * p * p) * p - far) / (slope + f4(3) * b * p * p)
        p -= ((slope + b * p * p) * p - far) / (slope + f4(3) * b * p * p)
        p -= ((slope + b * p * p) * p - far) / (slope + f4(3) * b * p * p)
        p = p if own[r] >= f4(0) else -p
        code = f4(np.int32(min(max(p + last + f4(0.5), f4(0)), last + last)))
        z = code - last
        placed[r] = code
        off = (f4(1) + b * z * z) * z * level[r] * scale - own[r]
        total += off * off * energy[r]
    return total


@njit(cache=True)
def _pack(codes, width, page, at):  # type: ignore[no-untyped-def]
    done = 0
    for bits in (8, 4, 2, 1):
        if width & bits:
            span = bits * PAGE_TOKENS // 8
            for t in range(PAGE_TOKENS):
                field = (codes[t] >> done) & ((1 << bits) - 1)
                page[at + t % span] |= u1(field << (bits * (t // span)))
            at += span
            done += bits


# ---- unpacking


def coefficients(side: SidePlan, pages: Tensor, scales: Tensor) -> Tensor:
    """As reference.coefficients, on the CPU."""
    batch, tokens = scales.shape[:-2], scales.shape[-2] * PAGE_TOKENS
    found = np.empty((batch.numel(), len(side.widths), tokens), dtype=np.float32)
    with _one_caller:
        numba.set_num_threads(_threads())
        _coefficients(
            pages.contiguous().view(-1).numpy(),
            U(side.layout.page_bytes),
            scales.contiguous().view(-1).numpy(),
            side.width_array,
            side.offset_array,
            side.centred,
            _SCALES,
            found,
        )
    return torch.from_numpy(found).view(*batch, len(side.widths), tokens)


@njit(cache=True, nogil=True, parallel=True, fastmath=True)
def _coefficients(pages, stride, scales, widths, offsets, centred, table, found):  # type: ignore[no-untyped-def]
    rows, ranks, tokens = found.shape
    per_row = tokens // PAGE_TOKENS
    for item in prange(rows * per_row):
        row, page = item // per_row, item % per_row
        codes = np.empty(PAGE_TOKENS, dtype=np.uint8)
        scale = np.empty(PAGE_TOKENS, dtype=np.float32)
        for t in range(PAGE_TOKENS):
            scale[t] = table[scales[item * PAGE_TOKENS + t]]
        for r in range(ranks):
            _codes(pages, U(item) * stride + offsets[r], widths[r], codes, U0)
            middle, gain, cubic = centred[widths[r], 0], centred[widths[r], 1], centred[widths[r], 2]
            out = found[row, r, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            for t in range(PAGE_TOKENS):
                z = f4(codes[t]) - middle
                out[t] = (cubic * z * z + gain) * z * scale[t]


@njit(cache=True, inline="always")
def _codes(pages, at, width, codes, to):  # type: ignore[no-untyped-def]
    """Codes of one coefficient of a page whose bytes begin at `at`, written to codes[to:]."""
    if width == U4:
        _low_nibbles(pages, at, codes, to)
    elif width == U3:
        _low_pairs(pages, at, codes, to)
        _bits_above(pages, at + U32, codes, to, u1(2))
    elif width == U(5):
        _low_nibbles(pages, at, codes, to)
        _bits_above(pages, at + U64, codes, to, u1(4))
    elif width == U2:
        _low_pairs(pages, at, codes, to)
    elif width == U(6):
        _low_nibbles(pages, at, codes, to)
        _pairs_above(pages, at + U64, codes, to, u1(4))
    elif width == U(7):
        _low_nibbles(pages, at, codes, to)
        _pairs_above(pages, at + U64, codes, to, u1(4))
        _bits_above(pages, at + U96, codes, to, u1(6))
    elif width == U(8):
        for t in range(U128):
            codes[to + t] = pages[at + t]
    else:
        for t in range(U128):
            codes[to + t] = u1(0)
        _bits_above(pages, at, codes, to, u1(0))


@njit(cache=True, inline="always")
def _low_nibbles(pages, at, codes, to):  # type: ignore[no-untyped-def]
    for t in range(U64):
        byte = pages[at + t]
        codes[to + t] = byte & u1(15)
        codes[to + U64 + t] = byte >> u1(4)


@njit(cache=True, inline="always")
def _low_pairs(pages, at, codes, to):  # type: ignore[no-untyped-def]
    for t in range(U32):
        byte = pages[at + t]
        codes[to + t] = byte & u1(3)
        codes[to + U32 + t] = (byte >> u1(2)) & u1(3)
        codes[to + U64 + t] = (byte >> u1(4)) & u1(3)
        codes[to + U96 + t] = byte >> u1(6)


@njit(cache=True, inline="always")
def _pairs_above(pages, at, codes, to, shift):  # type: ignore[no-untyped-def]
    for t in range(U32):
        byte = pages[at + t]
        codes[to + t] |= (byte & u1(3)) << shift
        codes[to + U32 + t] |= ((byte >> u1(2)) & u1(3)) << shift
        codes[to + U64 + t] |= ((byte >> u1(4)) & u1(3)) << shift
        codes[to + U96 + t] |= (byte >> u1(6)) << shift


@njit(cache=True, inline="always")
def _bits_above(pages, at, codes, to, shift):  # type: ignore[no-untyped-def]
    for t in range(U16):
        byte = pages[at + t]
        codes[to + t] |= (byte & u1(1)) << shift
        codes[to + U16 + t] |= ((byte >> u1(1)) & u1(1)) << shift
        codes[to + U32 + t] |= ((byte >> u1(2)) & u1(1)) << shift
        codes[to + U(48) + t] |= ((byte >> u1(3)) & u1(1)) << shift
        codes[to + U64 + t] |= ((byte >> u1(4)) & u1(1)) << shift
        codes[to + U(80) + t] |= ((byte >> u1(5)) & u1(1)) << shift
        codes[to + U96 + t] |= ((byte >> u1(6)) & u1(1)) << shift
        codes[to + U(112) + t] |= (byte >> u1(7)) << shift


# ---- attention of one query a row


@dataclass(frozen=True)
class Coded:
    """The pages of one group as the kernel reads them: gathered once, good until they change.

    matrices      absorbing and releasing of the group
    counts        [N] uint64: tokens that each page holds
    keys, values  pages and log scales flat, widths, offsets and levels of coefficients, bytes of a page
    """

    group: GroupPlan
    matrices: tuple[NDArray[np.float32], NDArray[np.float32]]
    pages: int
    counts: NDArray[np.uint64]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(
        cls, group: GroupPlan, keys: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor], counts: list[int]
    ) -> "Coded":
        """keys, values: codes [B, N, page_bytes] and log scales [B, N, PAGE_TOKENS], uint8 both."""
        sides = [
            (
                codes.contiguous().numpy().reshape(-1),
                scales.contiguous().numpy().reshape(-1),
                side.width_array,
                side.offset_array,
                side.centred,
                U(side.layout.page_bytes),
                side.levels.numpy().reshape(-1),
            )
            for side, (codes, scales) in ((group.keys, keys), (group.values, values))
        ]
        matrices = group.absorbing.numpy(), group.releasing.numpy()
        return cls(group, matrices, keys[0].shape[1], np.array(counts, dtype=np.uint64), *sides)


def attend_one(
    coded: Coded,
    queries: NDArray[np.float32],
    scaling: float,
    first: NDArray[np.uint64],
    hidden: NDArray[np.uint8],
    raw_keys: NDArray[np.int16],
    raw_values: NDArray[np.int16],
    raw_visible: NDArray[np.uint8],
    *,
    bfloat16: bool,
    softcap: float,
    sink_logits: NDArray[np.float32],
) -> NDArray[np.float32]:
    """One query of each head of a group, on the group's pages and on its tokens in 16 bit: [B, G, 1, DV].

    queries      [B, G, 1, DK], times scaling
    first        [B]: first slot that may be seen of the pages
    hidden       [B, slots of the pages]: 1 where a token may not be seen; [B, 0] when none is hidden
    raw_keys     [B, heads of the layer, capacity, DK] bits of 16-bit numbers, contiguous; raw_values alike
    raw_visible  [B, n]: which of the first n raw tokens may be seen
    sink_logits  [G], or [0] for none
    """
    threads = _threads()
    splits = max(1, min((coded.pages + 1) // 2, -(-threads // queries.shape[0])))
    with _one_caller:
        numba.set_num_threads(threads)
        # One call, because what each call costs is felt at every layer of every token.
        return _attend_one(
            np.ascontiguousarray(queries),
            f4(scaling),
            *coded.matrices,
            coded.group.first_head,
            coded.keys,
            coded.values,
            coded.counts,
            first,
            hidden,
            raw_keys,
            raw_values,
            raw_visible,
            bfloat16,
            f4(softcap),
            sink_logits,
            coded.pages,
            splits,
        )


@njit(cache=True, nogil=True, fastmath=True)
def _attend_one(  # type: ignore[no-untyped-def]
    queries,
    scaling,
    absorbing,
    releasing,
    first_head,
    keys,
    values,
    counts,
    first,
    hidden,
    raw_keys,
    raw_values,
    raw_visible,
    bfloat16,
    softcap,
    sink_logits,
    pages,
    splits,
):
    rows, group, items = queries.shape[0], queries.shape[1], queries.shape[0] * splits
    own = np.empty(queries.size, dtype=np.float32)
    flat = queries.reshape(-1)
    for i in range(own.size):
        own[i] = flat[i] * scaling
    absorbed = np.empty((rows, group, absorbing.shape[2]), dtype=np.float32)
    _absorb(own.reshape(rows, group, -1), absorbing, absorbed)
    width = raw_values.shape[3]
    sums = np.empty((items, group, (releasing.shape[1] + 2) // 4 * 4), dtype=np.float32)
    raw_sums = np.empty((items, group, int(_padded(U(width)))), dtype=np.float32)
    stats = np.empty((items, group, 3), dtype=np.float32)
    shape = (U(raw_keys.shape[1]), U(first_head), U(absorbing.shape[0]), U(raw_keys.shape[2]), U(raw_keys.shape[3]))
    _attend(
        absorbed.reshape(-1),
        own,
        U(group),
        keys,
        values,
        counts,
        first,
        hidden,
        raw_keys.reshape(-1),
        raw_values.reshape(-1),
        (*shape, U(width)),
        raw_visible,
        bfloat16,
        softcap,
        U(pages),
        U(splits),
        sums,
        raw_sums,
        stats,
    )
    found = np.empty((rows, group, 1, width), dtype=np.float32)
    _merge(sums, raw_sums, stats, releasing, sink_logits, splits, found.reshape(rows, group, width))
    return found


@njit(cache=True, nogil=True, fastmath=True)
def _absorb(queries, matrices, absorbed):  # type: ignore[no-untyped-def]
    """queries [B, G, D] times their head's [D, R + 1]."""
    shared = queries.shape[1] // matrices.shape[0]
    for row in range(queries.shape[0]):
        for g in range(queries.shape[1]):
            _times_rows(queries[row, g], matrices[g // shared].reshape(-1), absorbed[row, g])


@njit(cache=True, nogil=True, fastmath=True)
def _times_rows(weights, rows, out):  # type: ignore[no-untyped-def]
    """out = sum of weights[i] x row i of rows, flat; four rows at a time, so that out is seldom stored."""
    size = U(out.size)
    for i in range(size):
        out[i] = f4(0)
    fours = U(weights.size) // U4 * U4
    for r in range(U0, fours, U4):
        a, b, c, d = weights[r], weights[r + U1], weights[r + U2], weights[r + U3]
        at = r * size
        for i in range(size):
            out[i] += (
                a * rows[at + i] + b * rows[at + size + i] + c * rows[at + U2 * size + i] + d * rows[at + U3 * size + i]
            )
    for r in range(fours, U(weights.size)):
        a = weights[r]
        for i in range(size):
            out[i] += a * rows[r * size + i]


@njit(cache=True, nogil=True, parallel=True, fastmath={"contract", "reassoc", "arcp", "nsz"})
def _attend(  # type: ignore[no-untyped-def]
    queries,
    own,
    group,
    keys,
    values,
    counts,
    first,
    hidden,
    raw_keys,
    raw_values,
    raw_shape,
    raw_visible,
    bfloat16,
    softcap,
    pages,
    splits,
    sums,
    raw_sums,
    stats,
):
    blocks = (pages + U1) // U2
    raws = U(raw_visible.shape[1])
    for item in prange(sums.shape[0]):
        row = U(item) // splits
        split = U(item) % splits
        _attend_range(
            queries,
            row * group,
            group,
            keys,
            values,
            counts,
            first[row],
            hidden[row],
            softcap,
            row * pages,
            blocks * split // splits * U2,
            min(pages, blocks * (split + U1) // splits * U2),
            sums[item].reshape(-1),
            stats[item],
        )
        _attend_raw(
            own,
            row,
            group,
            raw_keys,
            raw_values,
            raw_shape,
            raw_visible[row],
            bfloat16,
            softcap,
            raws * split // splits,
            raws * (split + U1) // splits,
            sums[item].reshape(-1),
            raw_sums[item].reshape(-1),
            stats[item],
        )


@njit(cache=True, nogil=True, fastmath=True)
def _attend_range(  # type: ignore[no-untyped-def]
    queries,
    query_row,
    group,
    keys,
    values,
    counts,
    first,
    hidden,
    softcap,
    page_row,
    begin,
    end,
    sums,
    stats,
):
    """Pages begin..end of one row: sums [G x RV], stats [G, 3] = largest score, weight, weight on pages."""
    ranks, value_ranks = U(keys[2].size), U(values[2].size)
    sum_stride = U(sums.size) // group
    key_scales, value_scales = keys[1], values[1]
    stride = ranks + U1
    scores = _aligned(group * _BLOCK)
    bits = scores.view(np.int32)
    levels = _aligned(_CHUNK * _BLOCK)
    codes = np.zeros(_BLOCK, dtype=np.uint8)
    exponents = np.empty(_BLOCK, dtype=np.int32)
    key_scale, value_scale, barred = _aligned(_BLOCK), _aligned(_BLOCK), _aligned(_BLOCK)
    for g in range(group):
        stats[g, 0] = _NEVER
        stats[g, 1] = stats[g, 2] = f4(0)
    for i in range(group * sum_stride):
        sums[i] = f4(0)
    slot = U0
    for p in range(begin):
        slot += counts[p]
    tiled = group - group % _GROUP
    for page in range(begin, end, U2):
        here = min(U2, end - page)
        tokens = here * U128
        # Which tokens of these pages may be seen.
        whole = True
        for p in range(here):
            held = counts[page + p]
            if held == U128 and slot >= first and hidden.size == 0:
                for t in range(U128):
                    barred[p * U128 + t] = f4(0)
                slot += held
                continue
            for t in range(U128):
                seen = t < held and slot + t >= first and (hidden.size == 0 or hidden[slot + t] == 0)
                barred[p * U128 + t] = f4(0) if seen else _NEVER
                whole = bool(whole and seen)
            slot += held
        at = (page_row + page) * U128
        for t in range(tokens):
            key_scale[t] = _SCALES[key_scales[at + t]] * _LOG2E
            value_scale[t] = _SCALES[value_scales[at + t]]
        # Scores.
        for i in range(group * _BLOCK):
            scores[i] = f4(0)
        for r in range(U0, ranks, _CHUNK):
            count = min(_CHUNK, ranks - r)
            _levels(keys, page_row + page, here, r, count, codes, levels)
            q = query_row * stride + r
            for g in range(U0, tiled, _GROUP):
                for t in range(U0, tokens, _TILE):
                    add_scores(
                        levels, t, _BLOCK, queries, q + g * stride, stride, count, scores, g * _BLOCK + t, _BLOCK
                    )
            for g in range(tiled, group):
                for t in range(U0, tokens, _TILE):
                    add_score(levels, t, _BLOCK, queries, q + g * stride, stride, count, scores, g * _BLOCK + t, _BLOCK)
        # Online softmax, in powers of two.
        for g in range(group):
            s = g * _BLOCK
            mean = queries[(query_row + g) * stride + ranks] * _LOG2E
            for t in range(tokens):
                scores[s + t] = scores[s + t] * key_scale[t] + mean
            if softcap > f4(0):
                _cap(scores, s, tokens, softcap * _LOG2E)
            if not whole:
                for t in range(tokens):
                    scores[s + t] += barred[t]
            fade, weight = _softmax(scores, bits, s, tokens, stats[g], exponents)
            stats[g, 2] = stats[g, 2] * fade + weight
            for t in range(tokens):
                scores[s + t] *= value_scale[t]
            if fade != f4(1):
                for r in range(value_ranks):
                    sums[g * sum_stride + r] *= fade
        # Values.
        for r in range(U0, value_ranks, _CHUNK):
            count = min(_CHUNK, value_ranks - r)
            _levels(values, page_row + page, here, r, count, codes, levels)
            for i in range(count * _BLOCK, (count + U3) // U4 * U4 * _BLOCK):
                levels[i] = f4(0)
            for c in range(U0, count, U4):
                x = c * _BLOCK
                for g in range(U0, tiled, _GROUP):
                    add_sums(
                        levels,
                        x,
                        _BLOCK,
                        scores,
                        g * _BLOCK,
                        _BLOCK,
                        tokens // _LANES,
                        sums,
                        g * sum_stride + r + c,
                        sum_stride,
                    )
                for g in range(tiled, group):
                    add_sum(
                        levels,
                        x,
                        _BLOCK,
                        scores,
                        g * _BLOCK,
                        _BLOCK,
                        tokens // _LANES,
                        sums,
                        g * sum_stride + r + c,
                        sum_stride,
                    )


@njit(cache=True)
def _aligned(size):  # type: ignore[no-untyped-def]
    """Room for float32 that begins where a cache line does: vectors of 512 bits then never straddle two."""
    room = np.empty(size + U16, dtype=np.float32)
    start = (U64 - U(room.ctypes.data) % U64) // U4 % U16
    return room[start : start + size]


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _levels_looked_up(side, page, here, r, count, codes, levels):  # type: ignore[no-untyped-def]
    """Levels of coefficients r..r + count, of one or two pages, each _BLOCK long."""
    pages, _, widths, offsets, centred, stride, table = side
    for j in range(count):
        width = widths[r + j]
        for p in range(here):
            _codes(pages, (page + p) * stride + offsets[r + j], width, codes, p * U128)
        if width <= U4:
            look_up_16(codes, U0, table, width << U(8), levels, j * _BLOCK, here * U(8))
        elif width == U(5):
            look_up_32(codes, U0, table, width << U(8), levels, j * _BLOCK, here * U(8))
        elif width == U(6):
            look_up_64(codes, U0, table, width << U(8), levels, j * _BLOCK, here * U(8))
        else:
            _compute(codes, here * U128, centred[width], levels, j * _BLOCK)


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _levels_computed(side, page, here, r, count, codes, levels):  # type: ignore[no-untyped-def]
    """As _levels_looked_up, for processors whose registers are no tables."""
    pages, _, widths, offsets, centred, stride, _ = side
    for j in range(count):
        width = widths[r + j]
        for p in range(here):
            _codes(pages, (page + p) * stride + offsets[r + j], width, codes, p * U128)
        _compute(codes, here * U128, centred[width], levels, j * _BLOCK)


_levels = _levels_looked_up if vectors.CAN_LOOK_UP else _levels_computed


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _compute(codes, tokens, book, levels, at):  # type: ignore[no-untyped-def]
    middle, gain, cubic = book[0], book[1], book[2]
    for t in range(tokens):
        z = f4(codes[t]) - middle
        levels[at + t] = (cubic * z * z + gain) * z


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _cap(scores, s, tokens, cap):  # type: ignore[no-untyped-def]
    for t in range(tokens):
        scores[s + t] = cap * np.tanh(scores[s + t] / cap)


@njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "arcp", "nsz"}, inline="always")
def _softmax(scores, bits, s, tokens, stats, exponents):  # type: ignore[no-untyped-def]
    """Scores of one query to weights below the largest so far; returns what older sums fade by, and the new weight.

    tokens: a multiple of the lanes
    """
    top = max(stats[0], largest(scores, s, tokens // _LANES))
    if top <= _NEVER / f4(2):
        for t in range(tokens):
            scores[s + t] = f4(0)
        return f4(1), f4(0)
    fade = f4(np.exp2(max(stats[0] - top, f4(-1000))))
    _exp2(scores, bits, s, tokens, top, exponents)
    weight = total(scores, s, tokens // _LANES)
    stats[0] = top
    stats[1] = stats[1] * fade + weight
    return fade, weight


@njit(cache=True, inline="always")
def _exp2(scores, bits, s, tokens, top, exponents):  # type: ignore[no-untyped-def]
    """2^(score - top) in place, within 1e-7; 0 for what is faint. Whole part by bits, the rest by a polynomial."""
    for t in range(tokens):
        x = max(scores[s + t] - top, _FAINT)
        whole = np.int32(x - f4(0.5))
        rest = x - f4(whole)
        exponents[t] = whole << np.int32(23)
        y = f4(1.0) + rest * (
            f4(0.69314718)
            + rest
            * (
                f4(0.24022651)
                + rest * (f4(0.05550411) + rest * (f4(0.00961813) + rest * (f4(0.00133336) + rest * f4(0.00015404))))
            )
        )
        scores[s + t] = y if x > _FAINT else f4(0)
        exponents[t] = exponents[t] if x > _FAINT else np.int32(0)
    for t in range(tokens):
        bits[s + t] += exponents[t]


@njit(cache=True, nogil=True, fastmath=True)
def _attend_raw(  # type: ignore[no-untyped-def]
    own, row, group, raw_keys, raw_values, raw_shape, visible, bfloat16, softcap, begin, end, sums, raw_sums, stats
):
    """Raw tokens begin..end of one row, added to what its pages gave: raw_sums [G x padded width]."""
    layer_heads, first_head, heads, capacity, key_width, width = raw_shape
    shared, sum_stride = group // heads, U(sums.size) // group
    tiled = shared - shared % _GROUP
    key_padded, padded = _padded(key_width), _padded(width)
    scores = _aligned(shared * _RAW_BLOCK)
    bits = scores.view(np.int32)
    exponents = np.empty(_RAW_BLOCK, dtype=np.int32)
    numbers = _aligned(_RAW_BLOCK * max(key_padded, padded))
    queries = _aligned(shared * key_padded)
    for i in range(shared * key_padded):
        queries[i] = f4(0)
    for i in range(group * padded):
        raw_sums[i] = f4(0)
    for head in range(heads):
        base = (row * layer_heads + first_head + head) * capacity
        for j in range(shared):
            for d in range(key_width):
                queries[j * key_padded + d] = own[(row * group + head * shared + j) * key_width + d]
        for start in range(begin, end, _RAW_BLOCK):
            tokens = min(_RAW_BLOCK, end - start)
            whole = (tokens + _LANES - U1) // _LANES * _LANES  # a multiple of 4 too
            _widen(raw_keys, (base + start) * key_width, key_width, visible[start:], tokens, bfloat16, numbers)
            for i in range(shared * _RAW_BLOCK):
                scores[i] = f4(0)
            for t in range(U0, whole, U4):
                x, count = t * key_padded, key_padded // _LANES
                for j in range(U0, tiled, _GROUP):
                    q, s = j * key_padded, j * _RAW_BLOCK + t
                    add_sums(numbers, x, key_padded, queries, q, key_padded, count, scores, s, _RAW_BLOCK)
                for j in range(tiled, shared):
                    q, s = j * key_padded, j * _RAW_BLOCK + t
                    add_sum(numbers, x, key_padded, queries, q, key_padded, count, scores, s, _RAW_BLOCK)
            _widen(raw_values, (base + start) * width, width, visible[start:], tokens, bfloat16, numbers)
            for j in range(shared):
                g, s = head * shared + j, j * _RAW_BLOCK
                for t in range(tokens):
                    scores[s + t] *= _LOG2E
                if softcap > f4(0):
                    _cap(scores, s, tokens, softcap * _LOG2E)
                for t in range(whole):
                    scores[s + t] = scores[s + t] if t < tokens and visible[start + t] else _NEVER
                fade, _ = _softmax(scores, bits, s, whole, stats[g], exponents)
                if fade != f4(1):
                    stats[g, 2] *= fade
                    for r in range(sum_stride):
                        sums[g * sum_stride + r] *= fade
                    for d in range(padded):
                        raw_sums[g * padded + d] *= fade
            for d in range(U0, padded, _TILE):
                s = head * shared * padded + d
                for j in range(U0, tiled, _GROUP):
                    p = j * _RAW_BLOCK
                    add_scores(numbers, d, padded, scores, p, _RAW_BLOCK, tokens, raw_sums, s + j * padded, padded)
                for j in range(tiled, shared):
                    p = j * _RAW_BLOCK
                    add_score(numbers, d, padded, scores, p, _RAW_BLOCK, tokens, raw_sums, s + j * padded, padded)


@njit(cache=True, inline="always")
def _padded(width):  # type: ignore[no-untyped-def]
    """Channels as whole tiles."""
    return (width + _TILE - U1) // _TILE * _TILE


@njit(cache=True, nogil=True)
def _widen(half, at, width, visible, tokens, bfloat16, numbers):  # type: ignore[no-untyped-def]
    """Tokens half[at:] as float32, each row padded; zeros where a token may not be seen, whatever stands there."""
    padded, whole = _padded(width), width // _LANES
    bare = numbers.view(np.int32)
    for t in range((tokens + _LANES - U1) // _LANES * _LANES):
        to = t * padded
        if t >= tokens or not visible[t]:
            for d in range(padded):
                numbers[to + d] = f4(0)
            continue
        if whole and bfloat16:
            widen_bfloat16(half, at + t * width, numbers, to, whole)
        elif whole:
            widen_float16(half, at + t * width, numbers, to, whole)
        for d in range(whole * _LANES, width):
            _widen_one(half[at + t * width + d], bare, numbers, to + d, bfloat16)
        for d in range(width, padded):
            numbers[to + d] = f4(0)


@njit(cache=True, inline="always")
def _widen_one(half, bare, numbers, at, bfloat16):  # type: ignore[no-untyped-def]
    """bare and numbers are the same memory, as bits and as numbers."""
    if bfloat16:
        bare[at] = np.int32(half) << np.int32(16)
    else:
        # Exponent and fraction moved into place, then the difference of the biases made good by a product.
        bare[at] = (np.int32(half) & np.int32(0x7FFF)) << np.int32(13)
        numbers[at] *= f4(5.192296858534828e33)
        bare[at] |= np.int32(half < 0) << np.int32(31)


@njit(cache=True, nogil=True, fastmath=True)
def _merge(sums, raw_sums, stats, matrices, sink_logits, splits, found):  # type: ignore[no-untyped-def]
    """The ranges of each row together, and coefficients back to channels: found [B, G, DV]."""
    ranks = matrices.shape[1] - 1
    shared = found.shape[1] // matrices.shape[0]
    together = np.empty(ranks + 1, dtype=np.float32)
    for row in range(found.shape[0]):
        items = range(row * splits, (row + 1) * splits)
        for g in range(found.shape[1]):
            top = sink_logits[g] * _LOG2E if sink_logits.size else _NEVER
            for item in items:
                top = max(top, stats[item, g, 0])
            weight = f4(np.exp2(sink_logits[g] * _LOG2E - top)) if sink_logits.size else f4(0)
            for r in range(together.size):
                together[r] = f4(0)
            for item in items:
                share = f4(np.exp2(max(stats[item, g, 0] - top, f4(-1000))))
                weight += share * stats[item, g, 1]
                for r in range(ranks):
                    together[r] += share * sums[item, g, r]
                together[ranks] += share * stats[item, g, 2]
            out = found[row, g]
            _times_rows(together, matrices[g // shared].reshape(-1), out)
            for item in items:
                share = f4(np.exp2(max(stats[item, g, 0] - top, f4(-1000))))
                for d in range(out.size):
                    out[d] += share * raw_sums[item, g, d]
            for d in range(out.size):
                out[d] = out[d] / weight if weight > f4(0) else f4(0)
