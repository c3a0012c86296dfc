"""Pages of codes, byte by byte, against an unpacker that knows the words of the layout alone; codebooks and tables."""

import math

import numpy as np
import pytest
import torch
from resident_plans import codebook, layer_plan, side_plan, slow_unpack
from torch import Tensor

from kvalign.geometry import KINDS
from kvalign.resident.layout import PAGE_TOKENS, Codebook, PageLayout, coefficient_bytes, pack, planes, scale_of, unpack
from kvalign.resident.plan import ResidentPlan

WIDTHS = [*((width,) for width in range(1, 9)), (8, 7, 6, 5, 4, 3, 2, 1), (7, 7, 3, 3, 3, 1), (5, 2, 2), (4,) * 9]


def random_codes(widths: tuple[int, ...], *batch: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 1 << width, (*batch, PAGE_TOKENS), generator=generator) for width in widths]
    return torch.stack(rows, dim=-2).to(torch.uint8)


@pytest.mark.parametrize("widths", WIDTHS)
def test_codes_lie_where_the_layout_says(widths: tuple[int, ...]) -> None:
    codes = random_codes(widths)
    assert slow_unpack(pack(codes, PageLayout(widths)).tolist(), widths) == codes.tolist()


@pytest.mark.parametrize("widths", WIDTHS)
def test_any_bytes_are_a_page(widths: tuple[int, ...]) -> None:
    layout = PageLayout(widths)
    page = torch.randint(0, 256, (layout.page_bytes,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    codes = unpack(page, layout)
    assert codes.tolist() == slow_unpack(page.tolist(), widths)
    assert torch.equal(pack(codes, layout), page)


@pytest.mark.parametrize("batch", [(), (0,), (1,), (3,), (2, 0), (2, 3)])
def test_many_pages_are_packed_at_once(batch: tuple[int, ...]) -> None:
    layout = PageLayout((7, 4, 4, 1))
    codes = random_codes(layout.widths, *batch)
    pages = pack(codes, layout)
    assert pages.shape == (*batch, layout.page_bytes)
    assert pages.dtype == torch.uint8
    assert torch.equal(unpack(pages, layout), codes)


def test_a_token_has_a_byte_of_its_own_at_eight_bits() -> None:
    codes = torch.arange(PAGE_TOKENS, dtype=torch.uint8)[None]
    assert pack(codes, PageLayout((8,))).tolist() == list(range(PAGE_TOKENS))


def test_one_bit_of_one_token_is_one_bit_of_the_page() -> None:
    layout = PageLayout((5,))
    for token in (0, 15, 16, 63, 64, 127):
        for bit in range(5):
            codes = torch.zeros(1, PAGE_TOKENS, dtype=torch.uint8)
            codes[0, token] = 1 << bit
            page = pack(codes, layout).numpy()
            assert np.unpackbits(page).sum() == 1
            at = token % 64 if bit < 4 else 64 + token % 16
            assert page[at] == (1 << (bit + 4 * (token // 64)) if bit < 4 else 1 << token // 16)


@pytest.mark.parametrize("widths", WIDTHS)
def test_a_page_takes_the_sum_of_its_widths(widths: tuple[int, ...]) -> None:
    layout = PageLayout(widths)
    assert layout.page_bytes * 8 == sum(widths) * PAGE_TOKENS
    assert layout.offsets == tuple(16 * sum(widths[:index]) for index in range(len(widths)))


def test_runs_are_the_stretches_of_one_width() -> None:
    assert PageLayout((8, 4, 4, 4, 1, 1)).runs == ((8, 0, 1), (4, 1, 4), (1, 4, 6))
    assert PageLayout((3,)).runs == ((3, 0, 1),)
    assert PageLayout(()).runs == ()


def test_a_page_of_nothing_is_empty() -> None:
    layout = PageLayout(())
    assert (layout.page_bytes, layout.offsets) == (0, ())
    pages = pack(torch.zeros(3, 0, PAGE_TOKENS, dtype=torch.uint8), layout)
    assert pages.shape == (3, 0)
    assert unpack(pages, layout).shape == (3, 0, PAGE_TOKENS)


@pytest.mark.parametrize("widths", [(0,), (9,), (-1,), (4, 5), (8, 1, 2), (4, 0), (8, 8, 9)])
def test_widths_that_rise_or_are_out_of_bounds_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="fall"):
        PageLayout(widths)


@pytest.mark.parametrize("width", range(1, 9))
def test_planes_are_the_powers_of_two_in_a_width(width: int) -> None:
    found = planes(width)
    assert [bits for bits, _, _ in found] == [bits for bits in (8, 4, 2, 1) if width & bits]
    assert sum(bits for bits, _, _ in found) == width
    assert [first for _, first, _ in found] == [sum(b for b, _, _ in found[:i]) for i in range(len(found))]
    assert [at for _, _, at in found] == [coefficient_bytes(first) for _, first, _ in found]


# ---- codebooks


@pytest.mark.parametrize("width", range(1, 9))
def test_levels_are_the_polynomial_of_the_code(width: int) -> None:
    book = Codebook(width, 0.31, 0.7 / 4**width)
    c0, c1, c2, c3 = book.polynomial()
    wanted = [c0 + c1 * u + c2 * u**2 + c3 * u**3 for u in range(1 << width)]
    assert book.levels().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("width", range(1, 9))
def test_levels_are_a_bent_line_through_the_middle(width: int) -> None:
    book = Codebook(width, 0.5, 0.01)
    levels = book.levels()
    assert levels.shape == (1 << width,)
    assert levels.dtype == torch.float32
    for code, level in enumerate(levels.tolist()):
        z = code - (2**width - 1) / 2
        assert level == pytest.approx(0.5 * z * (1 + 0.01 * z * z))
    assert torch.equal(levels, -levels.flip(0))


def test_a_codebook_that_bends_back_does_not_rise() -> None:
    assert codebook(4).rises()
    assert not Codebook(4, 1.0, -0.1).rises()
    assert not Codebook(4, -1.0, 0.0).rises()
    assert not Codebook(4, 0.0, 0.0).rises()
    assert not Codebook(4, math.nan, 0.0).rises()


def test_scales_are_eighths_of_an_octave() -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert scale_of(codes).dtype == torch.float32
    assert scale_of(codes).tolist() == pytest.approx([2 ** ((code - 128) / 8) for code in range(256)])


# ---- what a plan says of its layout


def test_a_side_says_what_its_codes_stand_for() -> None:
    side = side_plan([8, 3, 3, 1], 6, torch.Generator().manual_seed(0))
    assert side.token_bits == 15 + 8
    assert side.page_bytes == (15 + 8) * PAGE_TOKENS // 8
    assert side.width_array.tolist() == [8, 3, 3, 1]
    assert side.offset_array.tolist() == [0, 128, 176, 224]
    for width in range(9):
        known = width in (8, 3, 1)
        assert bool(side.polynomials[width].any()) == known
        assert bool(side.levels[width].any()) == known
        if known:
            assert torch.equal(side.levels[width, : 1 << width], codebook(width).levels())
            assert not side.levels[width, 1 << width :].any()
    for width in (8, 3, 1):
        middle, gain, cubic = side.centred[width].tolist()
        z = torch.arange(1 << width) - middle
        torch.testing.assert_close((cubic * z * z + gain) * z, side.levels[width, : 1 << width])


@pytest.mark.parametrize("joint", [True, False])
def test_absorbing_and_releasing_are_the_bases_by_head(joint: bool) -> None:
    plan = layer_plan(3, 4, 5, widths=(4, 2), joint=joint)
    for group in plan.groups:
        keys, values = group.keys, group.values
        ranks = len(keys.widths)
        assert group.absorbing.shape == (group.heads, 4, ranks + 1)
        assert group.releasing.shape == (group.heads, len(values.widths) + 1, 5)
        for head in range(group.heads):
            own = slice(4 * head, 4 * head + 4)
            torch.testing.assert_close(group.absorbing[head, :, :ranks], keys.synthesis[:, own].T)
            torch.testing.assert_close(group.absorbing[head, :, ranks], keys.mean[own])
            own = slice(5 * head, 5 * head + 5)
            torch.testing.assert_close(group.releasing[head, :-1], values.synthesis[:, own])
            torch.testing.assert_close(group.releasing[head, -1], values.mean[own])


def test_bits_of_a_value_are_counted_with_scales() -> None:
    layer = layer_plan(2, 4, 6, widths=(4, 2), joint=False)
    assert [group.side(kind).token_bits for group in layer.groups for kind in KINDS] == [20, 26, 20, 26]
    assert layer.token_bits == 92
    assert layer.values_per_token == 20
    other = layer_plan(1, 4, 4, widths=(8,))
    plan = ResidentPlan(4.0, "head", {0: layer, 3: other}, 4, 16)
    assert plan.bits_per_value == pytest.approx((92 + 80) / 28)


def test_a_plan_on_the_same_device_is_the_same_plan() -> None:
    plan = layer_plan(2, 4, 4, widths=(3, 1), joint=False)
    moved = plan.to("cpu")
    assert (moved.kv_heads, moved.key_dim, moved.value_dim) == (2, 4, 4)
    for ours, theirs in zip(plan.groups, moved.groups, strict=True):
        assert (ours.first_head, ours.end_head) == (theirs.first_head, theirs.end_head)
        for kind in KINDS:
            for name in ("mean", "analysis", "synthesis", "energy"):
                assert torch.equal(getattr(ours.side(kind), name), getattr(theirs.side(kind), name))
            assert ours.side(kind).widths == theirs.side(kind).widths
            assert ours.side(kind).books == theirs.side(kind).books
