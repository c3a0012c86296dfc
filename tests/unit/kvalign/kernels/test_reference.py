"""The reference against one number at a time: it is what every kernel is held to."""

import math
from typing import Any

import pytest
import torch
from resident_plans import side_plan, slow_unpack, tokens_like
from torch import Tensor

from kvalign.kernels import reference
from kvalign.kernels.reference import TRIED_SCALES
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import GroupPlan, SidePlan, by_head

WIDTHS = [(8,), (1,), (8, 7, 6, 5, 4, 3, 2, 1), (4, 4, 3, 3, 2, 1), (6, 2, 2)]


def made(widths: tuple[int, ...], pages: int = 1, seed: int = 0, extra: int = 1) -> tuple[SidePlan, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    side = side_plan(widths, len(widths) + extra, generator)
    return side, tokens_like(side, (pages * PAGE_TOKENS,), generator)


def unpacked(side: SidePlan, pages: Tensor) -> Tensor:
    """Codes [T, R] of pages [N, page_bytes], by the slow unpacker."""
    return torch.cat([torch.tensor(slow_unpack(page.tolist(), side.widths)).T for page in pages])


def squared_error(side: SidePlan, z: list[float], log_scale: int) -> float:
    """Weighted squared error of one token's coefficients at a scale, each at the nearest of its levels."""
    scale = 2 ** ((log_scale - 128) / 8)
    total = 0.0
    for number, width, energy in zip(z, side.widths, side.energy.tolist(), strict=True):
        levels = side.books[width].levels().tolist()
        total += min((level * scale - number) ** 2 for level in levels) * energy
    return total


# ---- codes


@pytest.mark.parametrize("widths", WIDTHS)
def test_codes_are_of_the_nearest_levels(widths: tuple[int, ...]) -> None:
    side, _ = made(widths)
    z = torch.randn(200, len(widths), generator=torch.Generator().manual_seed(1)) * 3
    codes = reference.nearest_codes(side, z)
    assert codes.dtype == torch.uint8
    for token in range(200):
        for r, width in enumerate(widths):
            distance = (side.books[width].levels() - z[token, r]).abs()
            assert distance[int(codes[token, r])] <= distance.min() + 1e-6


def test_between_two_levels_the_upper_one_is_taken() -> None:
    side, _ = made((3, 1))
    three, one = (side.books[width].levels() for width in (3, 1))
    between = torch.stack([(three[1:] + three[:-1]) / 2, (one[:1] + one[1:]).expand(7) / 2], dim=1)
    assert reference.nearest_codes(side, between).tolist() == [[code, 1] for code in range(1, 8)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_scale_is_the_best_of_those_tried(widths: tuple[int, ...]) -> None:
    side, x = made(widths)
    z = (x - side.mean) @ side.analysis
    found = reference.encoded_scale(side, z)
    assert found.dtype == torch.uint8
    for token in range(PAGE_TOKENS):
        own = z[token].tolist()
        power = sum(number * number * energy for number, energy in zip(own, side.energy.tolist(), strict=True))
        start = round(4 * math.log2(power)) + 128
        least = min(squared_error(side, own, start + step) for step in TRIED_SCALES)
        assert squared_error(side, own, int(found[token])) <= least * (1 + 1e-4) + 1e-9
        assert int(found[token]) - start in TRIED_SCALES


@pytest.mark.parametrize("widths", WIDTHS)
def test_encoding_keeps_the_nearest_levels_at_that_scale(widths: tuple[int, ...]) -> None:
    side, x = made(widths, pages=2)
    pages, scales = reference.encode(side, x)
    assert pages.shape == (2, side.layout.page_bytes)
    assert scales.shape == (2, PAGE_TOKENS)
    assert pages.dtype == scales.dtype == torch.uint8
    z = (x - side.mean) @ side.analysis
    assert torch.equal(scales.flatten(), reference.encoded_scale(side, z))
    size = torch.exp2((scales.flatten().float() - 128) / 8)
    assert torch.equal(unpacked(side, pages), reference.nearest_codes(side, z / size[:, None]).long())


def test_a_token_is_coded_the_same_wherever_it_stands() -> None:
    side, x = made((6, 4, 4, 3, 1), pages=3)
    order = torch.randperm(3 * PAGE_TOKENS, generator=torch.Generator().manual_seed(2))
    pages, scales = reference.encode(side, x)
    moved_pages, moved_scales = reference.encode(side, x[order])
    assert torch.equal(unpacked(side, moved_pages), unpacked(side, pages)[order])
    assert torch.equal(moved_scales.flatten(), scales.flatten()[order])


def test_a_token_is_coded_the_same_whatever_its_neighbours_are() -> None:
    side, x = made((6, 4, 4, 3, 1))
    others = x * 1000
    others[37] = x[37]
    (ours,), (theirs,) = (reference.encode(side, tokens)[1] for tokens in (x, others))
    assert ours[37] == theirs[37]
    pages, other_pages = (reference.encode(side, tokens)[0] for tokens in (x, others))
    assert torch.equal(unpacked(side, pages)[37], unpacked(side, other_pages)[37])


def test_batches_are_coded_row_by_row() -> None:
    side, x = made((5, 3, 2), pages=4)
    pages, scales = reference.encode(side, x.view(2, 2 * PAGE_TOKENS, -1))
    assert pages.shape == (2, 2, side.layout.page_bytes)
    flat_pages, flat_scales = reference.encode(side, x)
    assert torch.equal(pages.flatten(0, 1), flat_pages)
    assert torch.equal(scales.flatten(0, 1), flat_scales)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 1.0, 1e3])
def test_tokens_of_any_size_come_back_in_proportion(size: float) -> None:
    side, x = made((8, 8, 8, 8), extra=0)
    off = (x - side.mean) * size
    found = reference.dense(side, *reference.encode(side, off + side.mean)) - side.mean
    assert float((found - off).norm()) <= 0.03 * float(off.norm()) + 1e-4


def test_tokens_too_large_for_the_scale_stay_finite_and_on_their_side() -> None:
    side, x = made((8, 8, 8), extra=0)
    off = (x - side.mean) * 1e9
    pages, scales = reference.encode(side, off + side.mean)
    assert int(scales.min()) == 255
    z = off @ side.analysis
    found = reference.coefficients(side, pages, scales).T
    assert found.isfinite().all()
    assert torch.equal(found.sign(), z.sign())


@pytest.mark.parametrize("widths", WIDTHS)
def test_coefficients_are_levels_times_scales(widths: tuple[int, ...]) -> None:
    side, _ = made(widths)
    generator = torch.Generator().manual_seed(3)
    pages = torch.randint(0, 256, (3, side.layout.page_bytes), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 256, (3, PAGE_TOKENS), generator=generator).to(torch.uint8)
    found = reference.coefficients(side, pages, scales)
    assert found.shape == (len(widths), 3 * PAGE_TOKENS)
    codes = unpacked(side, pages)
    for token in range(0, 3 * PAGE_TOKENS, 7):
        size = 2 ** ((int(scales.flatten()[token]) - 128) / 8)
        wanted = [side.books[w].levels()[codes[token, r]].item() * size for r, w in enumerate(widths)]
        assert found[:, token].tolist() == pytest.approx(wanted, rel=1e-5)


def test_dense_is_coefficients_on_the_basis() -> None:
    side, x = made((8, 6, 3), pages=2)
    pages, scales = reference.encode(side, x)
    z = reference.coefficients(side, pages, scales)
    found = reference.dense(side, pages, scales)
    assert found.shape == x.shape
    for token in (0, 100, 128, 255):
        wanted = sum(z[r, token] * side.synthesis[r] for r in range(3)) + side.mean
        torch.testing.assert_close(found[token], wanted)


def test_wider_codes_err_less() -> None:
    errors = []
    for width in range(1, 9):
        side, x = made((width,) * 6, pages=2, extra=0)
        errors.append(float((reference.dense(side, *reference.encode(side, x)) - x).norm() / (x - side.mean).norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02


# ---- attention


def slow_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    bias: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: list[float] | None,
) -> Tensor:
    rows, query_heads, count, _ = queries.shape
    shared = query_heads // keys.shape[1]
    found = torch.zeros(rows, query_heads, count, values.shape[3], dtype=torch.float64)
    for b in range(rows):
        for g in range(query_heads):
            for q in range(count):
                weights, total = {}, math.exp(sink_logits[g]) if sink_logits else 0.0
                for t in range(keys.shape[2]):
                    if visible[b, g, q, t]:
                        score = float(queries[b, g, q].double() @ keys[b, g // shared, t].double()) * scaling
                        score = softcap * math.tanh(score / softcap) if softcap else score
                        weights[t] = math.exp(score + float(bias[b, g, q, t]))
                total += sum(weights.values())
                for t, weight in weights.items():
                    found[b, g, q] += weight / total * values[b, g // shared, t].double()
    return found


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, [0.5, -2.0, 3.0, 0.0, 1.0, -1.0]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_attention_is_a_softmax_over_what_is_seen(
    softcap: float | None, sinks: list[float] | None, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(2, 6, 3, 5, generator=generator)
    keys, values = torch.randn(2, 2, 7, 5, generator=generator), torch.randn(2, 2, 7, 4, generator=generator)
    visible = torch.rand(2, 6, 3, 7, generator=generator) < 0.6
    visible[1, 2, 0] = False
    bias = torch.randn(2, 6, 3, 7, generator=generator) if with_bias else torch.zeros(2, 6, 3, 7)
    found = reference.attend(
        queries,
        keys,
        values,
        visible,
        scaling=0.7,
        softcap=softcap,
        sink_logits=None if sinks is None else torch.tensor(sinks),
        bias=bias if with_bias else None,
    )
    wanted = slow_attention(queries, keys, values, visible, bias, 0.7, softcap, sinks)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    assert not found[1, 2, 0].any()


def test_attention_without_a_mask_sees_everything() -> None:
    generator = torch.Generator().manual_seed(5)
    queries, keys, values = (torch.randn(1, 2, 4, 3, generator=generator) for _ in range(3))
    bare: dict[str, Any] = {"scaling": 1.0}
    everything = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    assert torch.equal(
        reference.attend(queries, keys, values, None, **bare),
        reference.attend(queries, keys, values, everything, **bare),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_answers_in_the_dtype_of_the_queries(dtype: torch.dtype) -> None:
    queries, keys, values = (torch.randn(1, 1, 2, 3).to(dtype) for _ in range(3))
    assert reference.attend(queries, keys, values, None, scaling=1.0).dtype == dtype


@pytest.mark.parametrize("heads", [1, 2])
def test_absorbed_queries_score_coefficients_as_queries_score_keys(heads: int) -> None:
    generator = torch.Generator().manual_seed(6)
    side = side_plan((8, 5, 5, 2), 4 * heads, generator)
    dim = side.mean.numel() // heads
    z = torch.randn(4, 10, generator=generator)
    keys = (z.T @ side.synthesis).view(1, 10, heads, dim).transpose(1, 2)
    queries = torch.randn(1, 2 * heads, 3, dim, generator=generator)
    absorbed = by_head(queries, GroupPlan(0, heads, side, side).absorbing)
    found, own_mean = absorbed[..., :-1], absorbed[..., -1:]
    assert found.shape == (1, 2 * heads, 3, 4)
    mean = side.mean.view(1, heads, 1, dim).repeat_interleave(2, dim=1)
    torch.testing.assert_close(own_mean, queries @ mean.mT)
    wanted = queries @ keys.repeat_interleave(2, dim=1).mT
    torch.testing.assert_close(found @ z, wanted, rtol=1e-4, atol=1e-4)
