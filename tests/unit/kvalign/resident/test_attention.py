"""Attention straight on codes against attention on the same tokens uncompressed, at every length, shape and mask."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from resident_plans import filled, layer_plan, layer_tokens
from torch import Tensor

from kvalign.kernels import reference
from kvalign.resident.attention import Counters, Mask, attend
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.state import LayerState

# Sums in another order, exponentials within 1e-7: float32 of a few hundred terms.
CLOSE = 1e-4


@dataclass(frozen=True)
class Case:
    """Everything about a layer, its tokens and its queries."""

    kv_heads: int = 2
    shared: int = 3
    key_dim: int = 4
    value_dim: int = 4
    widths: tuple[int, ...] = (6, 4, 3, 2, 1)
    joint: bool = True
    tokens: int = 300
    rows: int = 1
    sink_tokens: int = 4
    recent_tokens: int = 16
    padding: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def state(self) -> LayerState:
        plan = layer_plan(
            self.kv_heads, self.key_dim, self.value_dim, widths=self.widths, joint=self.joint, seed=self.seed
        )
        return filled(
            plan,
            self.tokens,
            rows=self.rows,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            padding=self.padding,
            dtype=self.dtype,
            seed=self.seed + 1,
        )

    def queries(self, count: int = 1, size: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2)
        shape = (self.rows, self.kv_heads * self.shared, count, self.key_dim)
        return (torch.randn(shape, generator=generator) * size).to(self.dtype)


def truth(state: LayerState, queries: Tensor, mask: Mask, *, exact: torch.dtype = torch.float32, **kw: Any) -> Tensor:
    """Reference attention on the whole layer, uncompressed."""
    count = queries.shape[2]
    slots = torch.arange(state.slots)
    visible = (slots >= state.padding[:, None])[:, None, None]
    if mask.visible is not None:
        visible = visible & mask.visible
    elif mask.causal:
        visible = visible & (slots <= slots[state.slots - count :, None])
    keys, values = state.dense("keys", torch.float32), state.dense("values", torch.float32)
    return reference.attend(queries.float(), keys, values, visible, bias=mask.bias, **kw).to(exact)


def check(state: LayerState, queries: Tensor, mask: Mask | None = None, *, close: float = CLOSE, **kw: Any) -> Tensor:
    """What attention answers, once it is what the truth is."""
    mask = Mask() if mask is None else mask
    kw = {"scaling": queries.shape[3] ** -0.5} | kw
    found, wanted = attend(state, queries, mask, Counters({}), **kw), truth(state, queries, mask, **kw)
    assert found.dtype == queries.dtype
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    assert float((found.float() - wanted).abs().max()) <= close * float(wanted.abs().max()) + 1e-7
    return found


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


BASE = Case()
SHAPES = {
    "plain": BASE,
    "heads each on their own": replace(BASE, joint=False),
    "one query head a KV head": replace(BASE, shared=1),
    "one of one": replace(BASE, kv_heads=1, shared=1),
    "four a KV head": replace(BASE, shared=4),
    "five a KV head, apart": replace(BASE, shared=5, joint=False),
    "seven of one": replace(BASE, kv_heads=1, shared=7),
    "three KV heads": replace(BASE, kv_heads=3, shared=2),
    "wide values": replace(BASE, key_dim=4, value_dim=7),
    "wide keys, apart": replace(BASE, key_dim=9, value_dim=5, joint=False),
    "one channel": replace(BASE, kv_heads=1, key_dim=1, value_dim=1),
    "three channels": replace(BASE, kv_heads=1, key_dim=3, value_dim=2),
    "six coefficients": replace(BASE, kv_heads=3, key_dim=2, value_dim=2),
    "a batch": replace(BASE, rows=3),
    "a batch apart": replace(BASE, rows=3, joint=False, shared=2),
    "no sinks": replace(BASE, sink_tokens=0),
    "no recent tokens": replace(BASE, recent_tokens=0),
    "many sinks": replace(BASE, sink_tokens=140),
    "large layer": replace(BASE, kv_heads=4, shared=4, key_dim=16, value_dim=16, tokens=700),
}


@pytest.mark.parametrize("name", SHAPES)
def test_one_query_sees_what_the_dense_layer_holds(name: str) -> None:
    check(SHAPES[name].state(), SHAPES[name].queries())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [2, 5])
def test_several_queries_see_what_the_dense_layer_holds(name: str, count: int) -> None:
    check(SHAPES[name].state(), SHAPES[name].queries(count))


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("joint", [True, False])
def test_codes_of_every_width_are_read(width: int, joint: bool) -> None:
    case = replace(BASE, widths=(width,), joint=joint, key_dim=5, tokens=450)
    check(case.state(), case.queries())
    check(case.state(), case.queries(3))


LENGTHS = [1, 2, 3, 4, 5, 19, 20, 127, 128, 129, 143, 144, 145, 271, 272, 399, 400, 401, 555, 655, 656, 700, 1500]


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("rows", [1, 2])
def test_every_length_is_whole(tokens: int, rows: int) -> None:
    case = replace(BASE, tokens=tokens, rows=rows)
    state = case.state()
    assert len(state.counts) == max(0, tokens - 16) // PAGE_TOKENS
    check(state, case.queries())
    check(state, case.queries(min(tokens, 3)))


@pytest.mark.parametrize("pages", [1, 2, 3, 5])
@pytest.mark.parametrize("sink_tokens", [0, 4])
def test_pages_without_a_tail_are_enough(pages: int, sink_tokens: int) -> None:
    case = replace(BASE, tokens=pages * PAGE_TOKENS, recent_tokens=0, sink_tokens=sink_tokens)
    state = case.state()
    assert (len(state.counts), state.raw_tokens) == (pages, 0)
    check(state, case.queries())


def test_what_no_page_holds_is_enough() -> None:
    case = replace(BASE, tokens=100, recent_tokens=1000)
    state = case.state()
    assert not state.counts
    check(state, case.queries())


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_scores_are_capped(count: int, softcap: float) -> None:
    case = replace(BASE, rows=2, joint=count == 1)
    capped = check(case.state(), case.queries(count, size=3), softcap=softcap)
    assert not torch.allclose(capped, check(case.state(), case.queries(count, size=3)), atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("level", [-30.0, 0.0, 5.0, 30.0])
def test_a_learned_logit_takes_its_share(count: int, joint: bool, level: float) -> None:
    case = replace(BASE, rows=2, joint=joint)
    logits = torch.linspace(-2, 3, 6) + level
    check(case.state(), case.queries(count), sink_logits=logits)
    check(case.state(), case.queries(count), sink_logits=logits, softcap=2.0)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("joint", [True, False])
def test_padding_is_never_seen(count: int, joint: bool) -> None:
    case = replace(BASE, rows=6, padding=(0, 1, 130, 283, 296, 299), joint=joint)
    state = case.state()
    found = check(state, case.queries(count))
    raw, slots = state.raw("values"), state.raw_slots()
    torch.testing.assert_close(found[5, 0, -1], raw[5, 0, slots[5] == 299][0].float())


@pytest.mark.parametrize("count", [1, 4])
def test_what_stands_in_padding_changes_nothing(count: int) -> None:
    case = replace(BASE, rows=2, padding=(150, 7))
    plan = layer_plan(2, 4, 4, widths=BASE.widths)
    keys, values = layer_tokens(plan, 2, 300, torch.Generator().manual_seed(1))
    answers = []
    for rubbish in (0.0, 500.0):
        for row, padding in enumerate((150, 7)):
            keys[row, :, :padding] = values[row, :, :padding] = rubbish
        state = LayerState(plan, 4, 16)
        state.append(keys, values, torch.tensor([150, 7]))
        state.settle()
        answers.append(attend(state, case.queries(count), Mask(), Counters({}), scaling=0.5))
    assert torch.equal(*answers)


def test_not_a_number_in_padding_changes_nothing_for_one_query() -> None:
    case = replace(BASE, rows=2, padding=(290, 7))
    plan = layer_plan(2, 4, 4, widths=BASE.widths)
    keys, values = layer_tokens(plan, 2, 300, torch.Generator().manual_seed(1))
    keys[0, :, :290] = values[0, :, :290] = float("nan")
    state = LayerState(plan, 4, 16)
    state.append(keys.bfloat16(), values.bfloat16(), torch.tensor([290, 7]))
    state.settle()
    assert attend(state, case.queries(), Mask(), Counters({}), scaling=0.5).isfinite().all()


def random_mask(state: LayerState, heads: int, count: int, share: float, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(state.rows, heads, count, state.slots, generator=generator) < share


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.97])
@pytest.mark.parametrize("joint", [True, False])
def test_any_mask_is_honoured(count: int, share: float, joint: bool) -> None:
    case = replace(BASE, rows=3, padding=(0, 40, 290), tokens=560, joint=joint)
    state = case.state()
    check(state, case.queries(count), Mask(random_mask(state, 1, count, share)))


@pytest.mark.parametrize("count", [1, 4])
def test_heads_may_have_masks_of_their_own(count: int) -> None:
    case = replace(BASE, rows=2, joint=False)
    state = case.state()
    check(state, case.queries(count), Mask(random_mask(state, 6, count, 0.5)))


@pytest.mark.parametrize("count", [1, 4])
def test_one_mask_may_serve_all_rows(count: int) -> None:
    case = replace(BASE, rows=3)
    state = case.state()
    check(state, case.queries(count), Mask(random_mask(state, 1, count, 0.5)[:1]))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (2, 1), (2, 6)])
@pytest.mark.parametrize("hidden", [False, True])
def test_numbers_are_added_to_scores(count: int, shape: tuple[int, int], hidden: bool) -> None:
    case = replace(BASE, rows=2, joint=False)
    state = case.state()
    bias = torch.randn(*shape, count, state.slots, generator=torch.Generator().manual_seed(8)) * 2
    visible = random_mask(state, 1, count, 0.7) if hidden else None
    with_bias = check(state, case.queries(count), Mask(visible, bias))
    without = check(state, case.queries(count), Mask(visible))
    assert not torch.allclose(with_bias, without, atol=1e-3)


def test_queries_that_are_not_causal_see_what_comes_after_them() -> None:
    case = replace(BASE, rows=2)
    state = case.state()
    all_seen = check(state, case.queries(4), Mask(causal=False))
    assert not torch.allclose(all_seen, check(state, case.queries(4)), atol=1e-3)
    torch.testing.assert_close(all_seen[:, :, -1], check(state, case.queries(4))[:, :, -1])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("joint", [True, False])
def test_a_row_that_may_see_nothing_is_zeros(count: int, joint: bool) -> None:
    case = replace(BASE, rows=2, joint=joint)
    state = case.state()
    visible = torch.ones(2, 1, count, state.slots, dtype=torch.bool)
    visible[1, :, 0] = False
    found = check(state, case.queries(count), Mask(visible))
    assert not found[1, :, 0].any()
    assert found[0].any()
    found = check(state, case.queries(count), Mask(visible), sink_logits=torch.linspace(-1, 1, 6))
    assert not found[1, :, 0].any()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seen", [[0], [3], [4], [127], [128], [255], [256], [299], [0, 299], [5, 250], [100, 298]])
def test_single_tokens_are_found_wherever_they_are(count: int, seen: list[int]) -> None:
    case = replace(BASE, rows=2, padding=(0, 3))
    state = case.state()
    visible = torch.zeros(1, 1, count, state.slots, dtype=torch.bool)
    visible[..., seen] = True
    found = check(state, case.queries(count), Mask(visible))
    if len(seen) == 1:
        wanted = state.dense("values", torch.float32)[0, :, seen[0]].repeat_interleave(3, dim=0)
        torch.testing.assert_close(found[0, :, 0], wanted, rtol=1e-4, atol=1e-4)


CROPS = [1, 15, 30, 43, 44, 45, 100, 171, 172, 173, 250, 299]


@pytest.mark.parametrize("tokens", CROPS)
def test_cropped_layers_answer_as_what_is_left(tokens: int) -> None:
    case = replace(BASE, rows=2, padding=(0, 2))
    state = case.state()
    state.crop(tokens)
    assert state.slots == 300 - tokens
    check(state, case.queries())
    check(state, case.queries(min(3, state.slots)))


@pytest.mark.parametrize("tokens", CROPS)
@pytest.mark.parametrize("more", [1, 40, 200])
def test_cropped_layers_go_on(tokens: int, more: int) -> None:
    case = replace(BASE, rows=2, padding=(0, 2), joint=False)
    state = case.state()
    before = state.dense("values", torch.float32)[:, :, : 300 - tokens]
    state.crop(tokens)
    state.append(*layer_tokens(state.plan, 2, more, torch.Generator().manual_seed(5)), torch.tensor([0, 2]))
    state.settle()
    assert state.slots == 300 - tokens + more
    check(state, case.queries())
    check(state, case.queries(min(3, more)))
    kept = min(300 - tokens, 256)
    assert torch.equal(state.dense("values", torch.float32)[:, :, 4:kept], before[:, :, 4:kept])


def test_pages_cropped_in_the_middle_are_passed_over() -> None:
    case = replace(BASE, tokens=16 + 2 * PAGE_TOKENS)
    state = case.state()
    generator = torch.Generator().manual_seed(6)
    for crop, more in ((16 + 30, 150), (150, 300), (200, 129)):
        state.crop(crop)
        state.append(*layer_tokens(state.plan, 1, more, generator), torch.tensor([0]))
        state.settle()
    assert len([count for count in state.counts if count < PAGE_TOKENS]) >= 1
    assert len(state.counts) >= 2
    for count in (1, 3):
        check(state, case.queries(count))
        check(state, case.queries(count), Mask(random_mask(state, 1, count, 0.5)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("joint", [True, False])
def test_every_dtype_is_answered_in_kind(dtype: torch.dtype, count: int, joint: bool) -> None:
    case = replace(BASE, rows=2, dtype=dtype, joint=joint, value_dim=5)
    state = case.state()
    # A unit in the last place of the answer, and nothing else.
    check(state, case.queries(count), close={torch.bfloat16: 2**-7, torch.float16: 2**-9}.get(dtype, CLOSE))


@pytest.mark.parametrize("count", [1, 3])
def test_float32_queries_may_read_a_bfloat16_layer(count: int) -> None:
    case = replace(BASE, dtype=torch.bfloat16)
    check(case.state(), case.queries(count).float())


def spoiled(state: LayerState) -> LayerState:
    """Rubbish wherever the state holds nothing: behind the newest token, and on cropped pages behind their last."""
    generator = torch.Generator().manual_seed(12)
    for kind in ("keys", "values"):
        state.raw_buffer(kind)[:, :, state.sink_tokens + state.raw_tokens :] = float("nan")
    for group in state.pages:
        for pages in group.values():
            for page, count in enumerate(state.counts):
                pages.scales[:, page, count:] = 255
                if count < PAGE_TOKENS:
                    codes = torch.randint(0, 256, pages.codes[:, page].shape, generator=generator).to(torch.uint8)
                    keep = _lanes(count, pages.codes.shape[2])
                    pages.codes[:, page] = (pages.codes[:, page] & keep) | (codes & ~keep)
    return state


def _lanes(count: int, page_bytes: int) -> Tensor:
    """Bits of a page of one-bit codes that hold its first tokens."""
    keep = torch.zeros(page_bytes, dtype=torch.uint8)
    for token in range(count):
        keep.view(-1, 16)[:, token % 16] |= 1 << token // 16
    return keep


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("crop", [0, 10, 60, 100, 200])
@pytest.mark.parametrize("rows", [1, 2])
def test_memory_that_holds_nothing_changes_nothing(count: int, crop: int, rows: int) -> None:
    case = replace(BASE, widths=(1,), rows=rows)
    answers = []
    for change in (lambda state: state, spoiled):
        state = case.state()
        state.crop(crop)
        answers.append(attend(change(state), case.queries(count), Mask(), Counters({}), scaling=0.5, softcap=20.0))
    assert torch.equal(*answers)
    assert answers[0].isfinite().all()


def test_new_tokens_come_over_what_was_behind_the_newest() -> None:
    states = []
    for change in (lambda state: state, spoiled):
        state = change(BASE.state())
        for seed in range(3):
            state.append(*layer_tokens(state.plan, 1, 70, torch.Generator().manual_seed(seed)), torch.tensor([0]))
            state.settle()
        states.append(state)
    assert torch.equal(states[0].dense("keys", torch.float32), states[1].dense("keys", torch.float32))
    answers = [attend(state, BASE.queries(), Mask(), Counters({}), scaling=0.5) for state in states]
    assert torch.equal(*answers)


# ---- extreme scores


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 30.0])
def test_queries_of_any_size_are_answered(count: int, size: float) -> None:
    case = replace(BASE, rows=2)
    check(case.state(), case.queries(count, size), close=1e-3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tokens", [20, 300, 600])
@pytest.mark.parametrize("size", [1e3, 1e5, 1e8])
def test_enormous_scores_leave_the_largest_alone(count: int, tokens: int, size: float) -> None:
    """Scores of float32 differ by their last place, so that only a winner far ahead is told."""
    case = replace(BASE, rows=4, tokens=tokens)
    state, queries = case.state(), case.queries(count)
    found = attend(state, queries, Mask(causal=False), Counters({}), scaling=size)
    assert found.isfinite().all()
    keys, values = (state.dense(kind, torch.float32).repeat_interleave(3, dim=1) for kind in ("keys", "values"))
    scores, tops = (queries.double() @ keys.double().mT).topk(2, dim=-1)
    clear = (scores[..., 0] - scores[..., 1]) * size > 40 + 1e-4 * size
    assert clear.sum() > 5
    wanted = values.gather(2, tops[..., :1].flatten(2).unsqueeze(-1).expand(-1, -1, -1, values.shape[3]))
    torch.testing.assert_close(found[clear], wanted[clear], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("softcap", [None, 1e6])
@pytest.mark.parametrize("level", [-3e4, -200.0, 200.0, 3e4])
def test_scores_far_from_zero_weigh_as_their_differences(count: int, softcap: float | None, level: float) -> None:
    """All keys moved along the queries: every score moves by as much, and no weight does."""
    plan = layer_plan(1, 4, 4, widths=(8,))
    keys, values = layer_tokens(plan, 1, 300, torch.Generator().manual_seed(1))
    side = plan.groups[0].keys
    direction = torch.tensor([1.0, 0.0, 0.0, 0.0])
    object.__setattr__(side, "mean", side.mean + level * direction)
    moved = LayerState(plan, 0, 0)
    moved.append((keys[:, :, :256] + level * direction).bfloat16(), values[:, :, :256].bfloat16(), torch.tensor([0]))
    moved.settle()
    assert moved.coded_tokens == 256
    queries = torch.randn(1, 3, count, 4, generator=torch.Generator().manual_seed(2)) / 4
    queries[..., 0] = 1.0
    if count > 1:
        moved.append(keys[:, :, 256:] + level * direction, values[:, :, 256:], torch.tensor([0]))
    # Ten bits of float32's 24 are left at this level.
    check(moved, queries, close=3e-2, softcap=softcap, scaling=1.0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("part", ["sinks", "coded", "newest"])
@pytest.mark.parametrize("level", [50.0, 500.0, 3000.0])
def test_a_part_far_above_the_others_is_all_that_counts(count: int, part: str, level: float) -> None:
    plan = layer_plan(1, 4, 4, widths=(8,))
    keys, values = layer_tokens(plan, 1, 300, torch.Generator().manual_seed(1))
    own = {"sinks": slice(0, 4), "coded": slice(60, 70), "newest": slice(290, 297)}[part]
    keys[:, :, own, 0] += level
    state = LayerState(plan, 4, 16)
    state.append(keys.bfloat16(), values.bfloat16(), torch.tensor([0]))
    state.settle()
    queries = torch.zeros(1, 3, count, 4)
    queries[..., 0], queries[..., 1] = 1.0, 0.3
    found = check(state, queries, close=3e-2, scaling=1.0)
    inside = state.dense("values", torch.float32)[0, 0, own]
    assert (found <= inside.amax(0) + 0.02).all()
    assert (found >= inside.amin(0) - 0.02).all()


# ---- long chunks, counters, threads


def test_a_chunk_longer_than_a_tile_is_whole() -> None:
    case = replace(BASE, kv_heads=1, shared=2, tokens=1500, rows=2, padding=(0, 200))
    state = filled(
        layer_plan(1, 4, 4, widths=(4,)), 1500, rows=2, recent_tokens=700, padding=(0, 200), dtype=torch.bfloat16
    )
    queries = case.queries(600)
    found = check(state, queries)
    assert found.shape == (2, 2, 600, 4)
    check(state, queries, Mask(random_mask(state, 1, 600, 0.3)))
    bias = torch.randn(1, 2, 600, state.slots, generator=torch.Generator().manual_seed(3))
    check(state, queries, Mask(None, bias, causal=False))


def test_many_pages_come_a_few_at_a_time() -> None:
    case = replace(BASE, kv_heads=1, tokens=20 * PAGE_TOKENS + 16)
    state = case.state()
    counters = Counters({})
    attend(state, case.queries(2), Mask(), counters, scaling=1.0)
    assert counters == Counters({}, tiled=1, dense=0, widest_tokens=8 * PAGE_TOKENS)
    check(state, case.queries(2))
    check(state, case.queries(1))


def test_each_way_is_counted() -> None:
    case = replace(BASE, joint=False)
    state, counters = case.state(), Counters({})
    attend(state, case.queries(), Mask(), counters, scaling=1.0)
    attend(state, case.queries(), Mask(random_mask(state, 1, 1, 0.5)), counters, scaling=1.0)
    assert counters == Counters({"numba": 2})
    attend(state, case.queries(), Mask(random_mask(state, 6, 1, 0.5)), counters, scaling=1.0)
    attend(state, case.queries(), Mask(None, torch.zeros(1, 1, 1, 300)), counters, scaling=1.0)
    attend(state, case.queries(2), Mask(), counters, scaling=1.0)
    assert counters == Counters({"numba": 2}, tiled=3, widest_tokens=2 * PAGE_TOKENS)


def test_pages_that_no_query_sees_are_not_unpacked() -> None:
    case = replace(BASE, tokens=600)
    state, counters = case.state(), Counters({})
    visible = torch.zeros(1, 1, 2, 600, dtype=torch.bool)
    visible[..., 590:] = True
    attend(state, case.queries(2), Mask(visible), counters, scaling=1.0)
    assert counters == Counters({}, tiled=1)


def test_the_newest_are_taken_as_they_were_before_rounding() -> None:
    case = replace(BASE, rows=2, joint=False, dtype=torch.float32)
    state = case.state()
    generator = torch.Generator().manual_seed(4)
    new = tuple(torch.randn(2, 2, 3, 4, generator=generator) for _ in range(2))
    state.append(*new, torch.tensor([0, 0]))
    queries = case.queries(3)
    visible = torch.arange(state.slots) >= state.slots - 4
    kw: dict[str, Any] = {"scaling": 2.0}
    found = attend(state, queries, Mask(visible.expand(1, 1, 3, -1)), Counters({}), fresh=new, **kw)
    keys, values = state.dense("keys", torch.float32), state.dense("values", torch.float32)
    rounded = reference.attend(queries, keys, values, visible, **kw)
    keys[:, :, -3:], values[:, :, -3:] = new
    wanted = reference.attend(queries, keys, values, visible, **kw)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert float((rounded - wanted).abs().max()) > 1e-4
    assert torch.equal(state.raw("keys")[:, :, -3:], new[0].half())


@pytest.mark.parametrize("name", ["plain", "a batch apart", "large layer"])
def test_any_number_of_threads_gives_the_same(name: str, threads: None) -> None:
    case = replace(SHAPES[name], tokens=900)
    answers = []
    for count in (1, 2):
        torch.set_num_threads(count)
        answers.append(check(case.state(), case.queries()))
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def test_two_callers_at_once_get_their_own_answers(threads: None) -> None:
    cases = [replace(BASE, tokens=900, seed=seed, rows=seed) for seed in (1, 2)]
    states = [case.state() for case in cases]
    wanted = [check(state, case.queries()) for state, case in zip(states, cases, strict=True)]
    wrong: list[str] = []
    start = threading.Barrier(2)

    def call(index: int) -> None:
        torch.set_num_threads(2)
        start.wait()
        for _ in range(50):
            found = attend(states[index], cases[index].queries(), Mask(), Counters({}), scaling=0.5)
            if not torch.allclose(found, wanted[index], rtol=1e-5, atol=1e-5):
                wrong.append(f"caller {index}")

    callers = [threading.Thread(target=call, args=(index,)) for index in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_rows_do_not_mix() -> None:
    case = replace(BASE, rows=3, padding=(0, 5, 150))
    state = case.state()
    together = check(state, case.queries())
    for row in range(3):
        alone = case.state()
        alone.change_rows(lambda x, row=row: x[row : row + 1])
        torch.testing.assert_close(check(alone, case.queries()[row : row + 1]), together[row : row + 1])


# ---- masks as transformers hands them over


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowest", ["min", "-inf"])
def test_the_lowest_numbers_of_a_mask_hide(dtype: torch.dtype, lowest: str) -> None:
    given = torch.zeros(1, 1, 2, 3, dtype=dtype)
    given[0, 0, 0, 1] = torch.finfo(dtype).min if lowest == "min" else float("-inf")
    mask = Mask.of(given)
    assert mask.bias is None
    assert mask.visible is not None
    assert mask.visible.tolist() == [[[[True, False, True], [True, True, True]]]]


def test_other_numbers_of_a_mask_are_added() -> None:
    given = torch.tensor([[[[0.0, -1.5, torch.finfo(torch.float32).min, 2.0]]]])
    mask = Mask.of(given)
    assert mask.visible is not None
    assert mask.bias is not None
    assert mask.visible.tolist() == [[[[True, True, False, True]]]]
    assert mask.bias.tolist() == [[[[0.0, -1.5, 0.0, 2.0]]]]


def test_masks_of_booleans_and_no_masks_are_taken_as_they_are() -> None:
    visible = torch.rand(1, 1, 1, 5) < 0.5
    assert Mask.of(visible).visible is visible
    assert Mask.of(None) == Mask()
    assert Mask.of(None, causal=False) == Mask(causal=False)
