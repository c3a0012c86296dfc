"""Attention of one query on pages of codes, and what goes with it, compiled for processors (Numba).

    for two pages at a time:   codes -> levels, four coefficients at a time -> scores of all queries -> online softmax
                               codes -> levels of the values                -> sums weighted by probability
    over ranges of pages in threads, merged at the end

Nothing of full length is ever dense: 4 coefficients of 256 tokens are. The loops count in unsigned numbers, because
Numba must not guess that an index is negative: only then are they compiled to vector instructions.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.compiled import njit, numba, prange
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

    counts        [N] uint64: tokens that each page holds
    keys, values  pages and log scales flat, widths, offsets and levels of coefficients, bytes of a page
    """

    group: GroupPlan
    rows: int
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
            )
            for side, (codes, scales) in ((group.keys, keys), (group.values, values))
        ]
        return cls(group, keys[0].shape[0], keys[0].shape[1], np.array(counts, dtype=np.uint64), *sides)


def attend_one(
    coded: Coded,
    queries: NDArray[np.float32],
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
    """One query of each head of a group, on the group's pages and on its tokens in 16 bit: [B, G, DV].

    queries      [B, G, DK], scaled
    first        [B]: first slot that may be seen of the pages
    hidden       [B, slots of the pages]: 1 where a token may not be seen; [B, 0] when none is hidden
    raw_keys     [B, H, capacity, DK] bits of 16-bit numbers; raw_values alike
    raw_visible  [B, n]: which of the first n raw tokens may be seen
    sink_logits  [G], or [0] for none
    """
    group = coded.group
    rows, heads, _ = queries.shape
    threads = _threads()
    splits = max(1, min((coded.pages + 1) // 2, -(-threads // rows)))
    ranks, width = len(group.values.widths), raw_values.shape[3]
    absorbed = np.empty((rows, heads, len(group.keys.widths) + 1), dtype=np.float32)
    sums = np.empty((rows * splits, heads, ranks), dtype=np.float32)
    raw_sums = np.empty((rows * splits, heads, width), dtype=np.float32)
    stats = np.empty((rows * splits, heads, 3), dtype=np.float32)
    found = np.empty((rows, heads, width), dtype=np.float32)
    with _one_caller:
        numba.set_num_threads(threads)
        _absorb(queries, group.absorbing.numpy(), absorbed)
        _attend(
            absorbed.reshape(-1),
            queries,
            coded.keys,
            coded.values,
            _SCALES,
            coded.counts,
            first,
            hidden,
            raw_keys,
            raw_values,
            raw_visible,
            bfloat16,
            f4(softcap),
            U(coded.pages),
            U(splits),
            sums,
            raw_sums,
            stats,
        )
        _merge(sums, raw_sums, stats, group.releasing.numpy(), sink_logits, U(splits), found)
    return found


@njit(cache=True, nogil=True, fastmath=True)
def _absorb(queries, matrices, absorbed):  # type: ignore[no-untyped-def]
    """queries [B, G, D] times their head's [D, R + 1]."""
    shared = queries.shape[1] // matrices.shape[0]
    for row in range(queries.shape[0]):
        for g in range(queries.shape[1]):
            matrix = matrices[g // shared]
            out = absorbed[row, g]
            for r in range(out.size):
                out[r] = f4(0)
            for d in range(matrix.shape[0]):
                q = queries[row, g, d]
                line = matrix[d]
                for r in range(out.size):
                    out[r] += q * line[r]


@njit(cache=True, nogil=True, parallel=True, fastmath={"contract", "reassoc", "arcp", "nsz"})
def _attend(  # type: ignore[no-untyped-def]
    queries,
    own,
    keys,
    values,
    table,
    counts,
    first,
    hidden,
    raw_keys,
    raw_values,
    raw_visible,
    bfloat16,
    softcap,
    pages,
    splits,
    sums,
    raw_sums,
    stats,
):
    group = U(own.shape[1])
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
            table,
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
            own[row],
            raw_keys[row],
            raw_values[row],
            raw_visible[row],
            bfloat16,
            softcap,
            raws * split // splits,
            raws * (split + U1) // splits,
            sums[item],
            raw_sums[item],
            stats[item],
        )


@njit(cache=True, nogil=True, fastmath=True)
def _attend_range(  # type: ignore[no-untyped-def]
    queries,
    query_row,
    group,
    keys,
    values,
    table,
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
    ranks = U(keys[2].size)
    value_ranks = U(values[2].size)
    key_scales, value_scales = keys[1], values[1]
    stride = ranks + U1
    scores = np.zeros(group * _BLOCK, dtype=np.float32)
    bits = scores.view(np.int32)
    levels = np.empty(U4 * _BLOCK, dtype=np.float32)
    codes = np.zeros(_BLOCK, dtype=np.uint8)
    exponents = np.empty(_BLOCK, dtype=np.int32)
    key_scale = np.empty(_BLOCK, dtype=np.float32)
    value_scale = np.empty(_BLOCK, dtype=np.float32)
    barred = np.empty(_BLOCK, dtype=np.float32)
    for g in range(group):
        stats[g, 0] = _NEVER
        stats[g, 1] = stats[g, 2] = f4(0)
    for i in range(group * value_ranks):
        sums[i] = f4(0)
    slot = U0
    for p in range(begin):
        slot += counts[p]
    triples = group - group % U3
    for page in range(begin, end, U2):
        here = min(U2, end - page)
        # Which tokens of these pages may be seen.
        whole = True
        for p in range(U2):
            held = counts[page + p] if p < here else U0
            for t in range(U128):
                seen = t < held and slot + t >= first and (hidden.size == 0 or hidden[slot + t] == 0)
                barred[p * U128 + t] = f4(0) if seen else _NEVER
                whole = bool(whole and seen)
            slot += held
        for p in range(U2):
            at = (page_row + page + min(p, here - U1)) * U128
            for t in range(U128):
                key_scale[p * U128 + t] = table[key_scales[at + t]] * _LOG2E
                value_scale[p * U128 + t] = table[value_scales[at + t]]
        # Scores.
        for i in range(group * _BLOCK):
            scores[i] = f4(0)
        for r in range(U0, ranks, U4):
            fours = min(U4, ranks - r)
            _levels(keys, page_row + page, here, r, fours, codes, levels)
            for g in range(U0, triples, U3):
                h = (query_row + g) * stride + r
                a0, a1, a2, a3 = _four(queries, h, fours)
                h += stride
                b0, b1, b2, b3 = _four(queries, h, fours)
                h += stride
                c0, c1, c2, c3 = _four(queries, h, fours)
                s = g * _BLOCK
                for t in range(_BLOCK):
                    x0 = levels[t]
                    x1 = levels[_BLOCK + t]
                    x2 = levels[U2 * _BLOCK + t]
                    x3 = levels[U3 * _BLOCK + t]
                    scores[s + t] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
                    scores[s + _BLOCK + t] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
                    scores[s + U2 * _BLOCK + t] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            for g in range(triples, group):
                a0, a1, a2, a3 = _four(queries, (query_row + g) * stride + r, fours)
                s = g * _BLOCK
                for t in range(_BLOCK):
                    scores[s + t] += (
                        a0 * levels[t]
                        + a1 * levels[_BLOCK + t]
                        + a2 * levels[U2 * _BLOCK + t]
                        + a3 * levels[U3 * _BLOCK + t]
                    )
        # Online softmax, in powers of two.
        for g in range(group):
            s = g * _BLOCK
            mean = queries[(query_row + g) * stride + ranks] * _LOG2E
            for t in range(_BLOCK):
                scores[s + t] = scores[s + t] * key_scale[t] + mean
            if softcap > f4(0):
                cap = softcap * _LOG2E
                for t in range(_BLOCK):
                    scores[s + t] = cap * np.tanh(scores[s + t] / cap)
            if not whole:
                for t in range(_BLOCK):
                    scores[s + t] += barred[t]
            top = _NEVER
            for t in range(_BLOCK):
                top = max(top, scores[s + t])
            before = stats[g, 0]
            top = max(top, before)
            if top <= _NEVER / f4(2):
                for t in range(_BLOCK):
                    scores[s + t] = f4(0)
                continue
            fade = f4(np.exp2(max(before - top, f4(-1000))))
            stats[g, 0] = top
            _exp2(scores, bits, s, top, exponents)
            weight = f4(0)
            for t in range(_BLOCK):
                weight += scores[s + t]
            for t in range(_BLOCK):
                scores[s + t] *= value_scale[t]
            stats[g, 1] = stats[g, 1] * fade + weight
            stats[g, 2] = stats[g, 1]
            for r in range(value_ranks):
                sums[g * value_ranks + r] *= fade
        # Values.
        for r in range(U0, value_ranks, U4):
            fours = min(U4, value_ranks - r)
            _levels(values, page_row + page, here, r, fours, codes, levels)
            for g in range(U0, triples, U3):
                s = g * _BLOCK
                a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = f4(0)
                for t in range(_BLOCK):
                    x0 = levels[t]
                    x1 = levels[_BLOCK + t]
                    x2 = levels[U2 * _BLOCK + t]
                    x3 = levels[U3 * _BLOCK + t]
                    pa = scores[s + t]
                    pb = scores[s + _BLOCK + t]
                    pc = scores[s + U2 * _BLOCK + t]
                    a0 += pa * x0
                    a1 += pa * x1
                    a2 += pa * x2
                    a3 += pa * x3
                    b0 += pb * x0
                    b1 += pb * x1
                    b2 += pb * x2
                    b3 += pb * x3
                    c0 += pc * x0
                    c1 += pc * x1
                    c2 += pc * x2
                    c3 += pc * x3
                at = g * value_ranks + r
                _add_four(sums, at, fours, a0, a1, a2, a3)
                _add_four(sums, at + value_ranks, fours, b0, b1, b2, b3)
                _add_four(sums, at + U2 * value_ranks, fours, c0, c1, c2, c3)
            for g in range(triples, group):
                s = g * _BLOCK
                a0 = a1 = a2 = a3 = f4(0)
                for t in range(_BLOCK):
                    pa = scores[s + t]
                    a0 += pa * levels[t]
                    a1 += pa * levels[_BLOCK + t]
                    a2 += pa * levels[U2 * _BLOCK + t]
                    a3 += pa * levels[U3 * _BLOCK + t]
                _add_four(sums, g * value_ranks + r, fours, a0, a1, a2, a3)


@njit(cache=True, nogil=True, fastmath=True, inline="always")
def _levels(side, page, here, r, fours, codes, levels):  # type: ignore[no-untyped-def]
    """Levels of coefficients r..r + fours, of one or two pages; of a page too few, old codes'."""
    pages, _, widths, offsets, centred, stride = side
    for j in range(fours):
        width = widths[r + j]
        for p in range(here):
            _codes(pages, (page + p) * stride + offsets[r + j], width, codes, p * U128)
        middle, gain, cubic = centred[width, 0], centred[width, 1], centred[width, 2]
        to = j * _BLOCK
        for t in range(_BLOCK):
            z = f4(codes[t]) - middle
            levels[to + t] = (cubic * z * z + gain) * z
    for t in range(fours * _BLOCK, U4 * _BLOCK):
        levels[t] = f4(0)


@njit(cache=True, inline="always")
def _four(x, at, count):  # type: ignore[no-untyped-def]
    return (
        x[at],
        x[at + U1] if count > U1 else f4(0),
        x[at + U2] if count > U2 else f4(0),
        x[at + U3] if count > U3 else f4(0),
    )


@njit(cache=True, inline="always")
def _add_four(x, at, count, a, b, c, d):  # type: ignore[no-untyped-def]
    x[at] += a
    if count > U1:
        x[at + U1] += b
    if count > U2:
        x[at + U2] += c
    if count > U3:
        x[at + U3] += d


@njit(cache=True, inline="always")
def _exp2(scores, bits, s, top, exponents):  # type: ignore[no-untyped-def]
    """2^(score - top) in place, within 1e-7; 0 for what is faint. Whole part by bits, the rest by a polynomial."""
    for t in range(_BLOCK):
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
    for t in range(_BLOCK):
        bits[s + t] += exponents[t]


@njit(cache=True, nogil=True, fastmath=True)
def _attend_raw(own, raw_keys, raw_values, visible, bfloat16, softcap, begin, end, sums, raw_sums, stats):  # type: ignore[no-untyped-def]
    """Raw tokens begin..end of one row, added to what its pages gave."""
    heads = raw_keys.shape[0]
    shared = own.shape[0] // heads
    raw_sums[:] = f4(0)
    row = np.empty(max(raw_keys.shape[2], raw_values.shape[2]), dtype=np.int32)
    number = row.view(np.float32)
    scores = np.empty((shared, int(end - begin)), dtype=np.float32)
    for head in range(heads):
        for t in range(begin, end):
            if visible[t]:
                _to_float(raw_keys[head, t], row, number, bfloat16)
                for j in range(shared):
                    scores[j, t - begin] = _dot(own[head * shared + j], number)
        for j in range(shared):
            g = head * shared + j
            own_scores = scores[j]
            top = stats[g, 0]
            for t in range(begin, end):
                if visible[t]:
                    score = own_scores[t - begin] * _LOG2E
                    if softcap > f4(0):
                        cap = softcap * _LOG2E
                        score = cap * np.tanh(score / cap)
                    own_scores[t - begin] = score
                    top = max(top, score)
            fade = f4(np.exp2(max(stats[g, 0] - top, f4(-1000))))
            stats[g, 0] = top
            for i in range(1, 3):
                stats[g, i] *= fade
            own_sums = sums[g]
            for r in range(own_sums.size):
                own_sums[r] *= fade
            for t in range(begin, end):
                if visible[t]:
                    own_scores[t - begin] = np.exp2(own_scores[t - begin] - top)
                    stats[g, 1] += own_scores[t - begin]
        for t in range(begin, end):
            if visible[t]:
                _to_float(raw_values[head, t], row, number, bfloat16)
                for j in range(shared):
                    _add(raw_sums[head * shared + j], number, scores[j, t - begin])


@njit(cache=True, nogil=True, fastmath=True)
def _dot(x, y):  # type: ignore[no-untyped-def]
    total = f4(0)
    for d in range(x.size):
        total += x[d] * y[d]
    return total


@njit(cache=True, nogil=True, fastmath=True)
def _add(out, x, weight):  # type: ignore[no-untyped-def]
    for d in range(out.size):
        out[d] += weight * x[d]


@njit(cache=True, nogil=True)
def _to_float(half, row, number, bfloat16):  # type: ignore[no-untyped-def]
    """16-bit numbers as float32: row and number are the same memory, as bits and as numbers."""
    if bfloat16:
        for d in range(half.size):
            row[d] = np.int32(half[d]) << np.int32(16)
    else:
        for d in range(half.size):
            # Exponent and fraction moved into place, then the difference of the biases made good by a product.
            row[d] = (np.int32(half[d]) & np.int32(0x7FFF)) << np.int32(13)
        for d in range(half.size):
            number[d] *= f4(5.192296858534828e33)
        for d in range(half.size):
            row[d] |= np.int32(half[d] < 0) << np.int32(31)


@njit(cache=True, nogil=True, fastmath=True)
def _merge(sums, raw_sums, stats, matrices, sink_logits, splits, found):  # type: ignore[no-untyped-def]
    """The ranges of each row together, and coefficients back to channels: found [B, G, DV]."""
    ranks = sums.shape[2]
    shared = found.shape[1] // matrices.shape[0]
    together = np.empty(ranks + 1, dtype=np.float32)
    for row in range(found.shape[0]):
        items = range(row * splits, (row + 1) * splits)
        for g in range(found.shape[1]):
            top = sink_logits[g] * _LOG2E if sink_logits.size else _NEVER
            for item in items:
                top = max(top, stats[item, g, 0])
            weight = f4(np.exp2(sink_logits[g] * _LOG2E - top)) if sink_logits.size else f4(0)
            out = found[row, g]
            for d in range(out.size):
                out[d] = f4(0)
            for r in range(together.size):
                together[r] = f4(0)
            for item in items:
                share = f4(np.exp2(max(stats[item, g, 0] - top, f4(-1000))))
                weight += share * stats[item, g, 1]
                own = sums[item, g]
                for r in range(ranks):
                    together[r] += share * own[r]
                together[ranks] += share * stats[item, g, 2]
                _add(out, raw_sums[item, g], share)
            if weight <= f4(0):
                continue
            matrix = matrices[g // shared]
            for r in range(ranks + 1):
                _add(out, matrix[r], together[r])
            for d in range(out.size):
                out[d] /= weight
