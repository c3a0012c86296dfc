"""What a layer keeps: which tokens in 16 bit and which as codes, whose, and how many bytes that takes."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from resident_plans import filled, layer_plan, layer_tokens
from torch import Tensor

from kvalign.errors import ConfigInvalid
from kvalign.geometry import KINDS
from kvalign.kernels import reference
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import LayerPlan
from kvalign.resident.state import LayerState

PLAN = layer_plan(2, 4, 5, widths=(8, 4, 2), joint=True)
APART = layer_plan(2, 4, 5, widths=(8, 4, 2), joint=False)


def tokens_of(count: int, rows: int = 1, seed: int = 1, plan: LayerPlan = PLAN) -> tuple[Tensor, Tensor]:
    return layer_tokens(plan, rows, count, torch.Generator().manual_seed(seed))


def read(
    state: LayerState, keys: Tensor, values: Tensor, cuts: Sequence[int], padding: Sequence[int], *, settle: bool = True
) -> None:
    """Tokens in chunks that end at cuts; of padding as much is known as was read."""
    for start, end in pairwise([0, *cuts, keys.shape[2]]):
        known = torch.tensor(padding).clamp_max(end)
        state.append(keys[:, :, start:end], values[:, :, start:end], known)
        if settle:
            state.settle()


def codes_of(state: LayerState) -> list[Tensor]:
    return [x.clone() for group in state.pages for pages in group.values() for x in (pages.codes, pages.scales)]


def coded(plan: LayerPlan, kind: str, x: Tensor) -> Tensor:
    """Tokens [B, H, N x PAGE_TOKENS, D] coded and decoded, by the reference."""
    parts = []
    for group in plan.groups:
        heads = x[:, group.first_head : group.end_head].transpose(1, 2).flatten(2)
        side = group.keys if kind == "keys" else group.values
        parts.append(reference.dense(side, *reference.encode(side, heads)).unflatten(2, (group.heads, -1)))
    return torch.cat(parts, dim=2).transpose(1, 2)


# ---- what is held, and where


def test_a_new_state_is_empty() -> None:
    state = LayerState(PLAN, 4, 16)
    assert state.is_empty
    assert (state.slots, state.coded_tokens, state.raw_tokens, state.rows) == (0, 0, 0, 0)
    assert state.held_bytes() == {"coded": 0, "verbatim": 0}


@pytest.mark.parametrize("recent", [0, 1, 16, 128, 200])
@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 143, 144, 145, 255, 256, 272, 328, 600])
def test_whole_pages_beyond_the_recent_tokens_are_coded(tokens: int, recent: int) -> None:
    state = filled(PLAN, tokens, recent_tokens=recent)
    pages = max(0, tokens - recent) // PAGE_TOKENS
    assert state.counts == [PAGE_TOKENS] * pages
    assert state.coded_tokens == PAGE_TOKENS * pages
    assert state.raw_tokens == tokens - PAGE_TOKENS * pages
    assert state.slots == tokens
    assert not state.is_empty
    assert state.rows == 1


def test_nothing_is_coded_before_it_settles() -> None:
    state = LayerState(PLAN, 4, 16)
    state.append(*tokens_of(600), torch.tensor([0]))
    assert (state.counts, state.raw_tokens) == ([], 600)
    state.settle()
    assert (state.counts, state.raw_tokens) == ([PAGE_TOKENS] * 4, 88)
    before = codes_of(state)
    state.settle()
    assert all(torch.equal(a, b) for a, b in zip(before, codes_of(state), strict=True))


@pytest.mark.parametrize("plan", [PLAN, APART])
def test_codes_are_of_the_oldest_tokens_and_the_newest_stay_exact(plan: LayerPlan) -> None:
    keys, values = tokens_of(300, rows=2, plan=plan)
    state = LayerState(plan, 4, 16)
    read(state, keys, values, [], [0, 0])
    for kind, x in zip(KINDS, (keys, values), strict=True):
        found = state.dense(kind, torch.float32)
        assert found.shape == x.shape
        assert torch.equal(found[:, :, :4], x[:, :, :4])
        assert torch.equal(found[:, :, 256:], x[:, :, 256:])
        wanted = coded(plan, kind, x[:, :, :256])
        torch.testing.assert_close(found[:, :, 4:256], wanted[:, :, 4:], rtol=1e-4, atol=1e-4)
        assert not torch.equal(found[:, :, 4:256], x[:, :, 4:256])


@pytest.mark.parametrize("cuts", [[1], [128], [5, 6, 7], list(range(1, 300, 13)), list(range(260, 300)), [299]])
@pytest.mark.parametrize("settle", [True, False])
def test_the_chunks_that_tokens_came_in_make_no_difference(cuts: list[int], settle: bool) -> None:
    keys, values = tokens_of(300, rows=2)
    states = []
    for chunks, settled in (([], True), (cuts, settle)):
        state = LayerState(PLAN, 4, 16)
        read(state, keys, values, chunks, [0, 0], settle=settled)
        state.settle()
        states.append(state)
    for kind in KINDS:
        assert torch.equal(*(state.dense(kind, torch.float32) for state in states))
        assert torch.equal(*(state.raw(kind) for state in states))


def test_a_token_is_coded_once() -> None:
    state = LayerState(PLAN, 4, 16)
    keys, values = tokens_of(900)
    before = None
    for start in range(0, 900, 30):
        state.append(keys[:, :, start : start + 30], values[:, :, start : start + 30], torch.tensor([0]))
        state.settle()
        after = codes_of(state)
        for old, new in zip(before or after, after, strict=True):
            assert torch.equal(new[:, : old.shape[1]], old)
        before = after


def test_tokens_of_no_number_are_nothing_new() -> None:
    state = filled(PLAN, 300)
    before = state.dense("keys", torch.float32)
    state.append(*tokens_of(0), torch.tensor([0]))
    state.settle()
    assert state.slots == 300
    assert torch.equal(state.dense("keys", torch.float32), before)


# ---- slots


def test_slots_of_pages_follow_one_another() -> None:
    state = filled(PLAN, 600)
    assert state.coded_slots().tolist() == list(range(512))
    assert state.coded_slots(1, 3).tolist() == list(range(128, 384))
    assert state.coded_slots(3).tolist() == list(range(384, 512))
    assert state.coded_slots(4).tolist() == []


def test_slots_pass_over_what_a_cropped_page_does_not_hold() -> None:
    state = filled(PLAN, 300)
    state.crop(100)
    assert state.counts == [128, 72]
    state.append(*tokens_of(150, seed=3), torch.tensor([0]))
    state.settle()
    assert state.counts == [128, 72, 128]
    wanted = [*range(200), *[-1] * 56, *range(200, 328)]
    assert state.coded_slots().tolist() == wanted
    assert state.coded_slots(1).tolist() == wanted[128:]
    assert state.coded_slots(2, 3).tolist() == wanted[256:]


def test_raw_slots_are_the_sinks_and_then_the_newest() -> None:
    state = filled(PLAN, 300, rows=2, padding=[0, 10])
    assert state.first_coded.tolist() == [4, 14]
    assert state.raw_slots().tolist() == [[*range(4), *range(256, 300)], [*range(10, 14), *range(256, 300)]]


def test_a_token_is_never_raw_twice() -> None:
    state = filled(PLAN, 20, rows=4, padding=[0, 3, 18, 20])
    assert state.raw_slots().tolist() == [
        [*range(4), *[-1] * 4, *range(4, 20)],
        [*range(3, 7), *[-1] * 7, *range(7, 20)],
        [18, 19, -1, -1, *[-1] * 20],
        [*[-1] * 24],
    ]


def test_every_token_behind_the_padding_has_one_place() -> None:
    for tokens in (1, 3, 130, 300):
        state = filled(PLAN, tokens, rows=3, padding=[0, min(tokens, 2), min(tokens, 140)])
        pages = state.coded_slots()
        for row in range(3):
            seen = [*state.raw_slots()[row].tolist(), *pages[pages >= state.first_coded[row]].tolist()]
            assert sorted(slot for slot in seen if slot >= 0) == list(range(int(state.padding[row]), tokens))


# ---- sinks


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [9], [10], [11], [12, 13], list(range(1, 40)), [150]])
@pytest.mark.parametrize("sink_tokens", [0, 1, 4, 30])
def test_sinks_are_the_first_tokens_behind_padding_that_comes_in_parts(cuts: list[int], sink_tokens: int) -> None:
    padding = [0, 10, 1, 25, 160]
    keys, values = tokens_of(200, rows=5)
    state = LayerState(PLAN, sink_tokens, 16)
    read(state, keys, values, cuts, padding)
    for kind, x in zip(KINDS, (keys, values), strict=True):
        for row, first in enumerate(padding):
            own = x[row, :, first : first + sink_tokens]
            assert torch.equal(state.raw(kind)[row, :, : own.shape[1]].float(), own)
            found = state.dense(kind, torch.float32)[row, :, first : first + sink_tokens]
            assert torch.equal(found, own)


def test_sinks_are_those_of_the_new_text_after_a_crop() -> None:
    keys, values = tokens_of(300)
    for left in (0, 2, 4, 10):
        state = filled(PLAN, 300, seed=2)
        first = state.raw("keys")[:, :, : min(left, 4)].clone()
        state.crop(300 - left)
        state.append(keys, values, torch.tensor([0]))
        state.settle()
        wanted = torch.cat([first.float(), keys[:, :, : 4 - first.shape[2]]], dim=2)
        assert torch.equal(state.raw("keys")[:, :, :4].float(), wanted)


# ---- crop, rows, reset


@pytest.mark.parametrize("tokens", [0, 1, 43, 44, 45, 100, 172, 173, 299, 300, 1000])
def test_a_crop_forgets_the_newest(tokens: int) -> None:
    state = filled(PLAN, 300, rows=2)
    before = state.dense("values", torch.float32)
    state.crop(tokens)
    left = max(0, 300 - tokens)
    assert state.slots == left
    assert state.raw_tokens == max(0, 44 - tokens)
    assert sum(state.counts) == min(256, left)
    assert len(state.counts) == -(-min(256, left) // 128)
    for group in state.pages:
        for pages in group.values():
            assert pages.codes.shape[1] == pages.scales.shape[1] == len(state.counts)
    assert torch.equal(state.dense("values", torch.float32), before[:, :, :left])


def test_the_last_page_forgets_before_the_one_before_it() -> None:
    state = filled(PLAN, 300)
    state.crop(44 + 20)
    assert state.counts == [128, 108]
    state.crop(100)
    assert state.counts == [128, 8]
    state.crop(20)
    assert state.counts == [116]


def test_rows_are_picked_repeated_and_reordered() -> None:
    state = filled(PLAN, 300, rows=3, padding=[0, 5, 10])
    before = {kind: state.dense(kind, torch.float32) for kind in KINDS}
    order = torch.tensor([2, 0, 2, 1])
    state.change_rows(lambda x: x[order])
    assert state.rows == 4
    assert state.padding.tolist() == [10, 0, 10, 5]
    for kind in KINDS:
        assert torch.equal(state.dense(kind, torch.float32), before[kind][order])
    state.change_rows(lambda x: x.repeat_interleave(2, dim=0))
    assert state.rows == 8
    for kind in KINDS:
        assert torch.equal(state.dense(kind, torch.float32), before[kind][order].repeat_interleave(2, dim=0))


def test_repeated_rows_go_their_own_ways() -> None:
    state = filled(PLAN, 300)
    state.change_rows(lambda x: x.repeat_interleave(2, dim=0))
    keys, values = tokens_of(200, rows=2, seed=7)
    state.append(keys, values, torch.tensor([0, 0]))
    state.settle()
    found = state.dense("keys", torch.float32)
    assert torch.equal(found[0, :, :256], found[1, :, :256])
    assert torch.equal(found[:, :, 400:], keys[:, :, 100:])


def test_a_reset_state_is_a_new_one() -> None:
    state = filled(PLAN, 300, rows=3, seed=5)
    state.reset()
    assert state.is_empty
    assert (state.slots, state.rows, state.counts, state.held_bytes()["verbatim"]) == (0, 0, [], 0)
    keys, values = tokens_of(300)
    read(state, keys, values, [], [0])
    for kind in KINDS:
        assert torch.equal(state.dense(kind, torch.float32), filled(PLAN, 300).dense(kind, torch.float32))


def test_pages_as_the_kernel_reads_them_follow_every_change() -> None:
    state = filled(PLAN, 300, rows=2)
    assert (state.gathered(0).pages, state.gathered(0).counts.tolist()) == (2, [128, 128])
    assert state.gathered(0) is state.gathered(0)
    state.append(*tokens_of(128, rows=2), torch.tensor([0, 0]))
    state.settle()
    assert state.gathered(0).pages == 3
    state.crop(44 + 28)
    assert state.gathered(0).counts.tolist() == [128, 128, 100]
    of_two_rows = state.gathered(0).keys[0].size
    state.change_rows(lambda x: x[:1])
    assert state.gathered(0).keys[0].size == of_two_rows // 2
    state.crop(1000)
    assert state.gathered(0).pages == 0


# ---- 16 bit


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_is_kept_as_it_came(dtype: torch.dtype) -> None:
    state = filled(PLAN, 50, dtype=dtype)
    assert state.raw("keys").dtype == state.raw("values").dtype == dtype
    assert torch.equal(state.raw("keys")[:, :, 4:], tokens_of(50)[0].to(dtype))


@pytest.mark.parametrize(("peak", "dtype"), [(1.0, torch.float16), (59_000.0, torch.float16), (1e6, torch.bfloat16)])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_kept_in_the_sixteen_bit_that_holds_it(peak: float, dtype: torch.dtype, kind: str) -> None:
    new = dict(zip(KINDS, tokens_of(50), strict=True))
    new[kind][0, 1, 7, 2] = -peak
    state = LayerState(PLAN, 4, 16)
    state.append(new["keys"], new["values"], torch.tensor([0]))
    assert state.raw("keys").dtype == state.raw("values").dtype == dtype
    assert torch.equal(state.raw(kind)[:, :, 4:].float(), new[kind].to(dtype).float())
    assert state.raw(kind).isfinite().all()


def test_numbers_beyond_a_dtype_are_its_largest() -> None:
    keys, values = tokens_of(50)
    keys[0, 0, 10, 0], keys[0, 0, 11, 0] = 1e6, -1e6
    state = LayerState(PLAN, 4, 16)
    state.append(keys, values, torch.tensor([0]))
    found = state.dense("keys", torch.float16)
    assert (found[0, 0, 10, 0], found[0, 0, 11, 0]) == (65504, -65504)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dense_layer_comes_in_any_dtype(dtype: torch.dtype) -> None:
    state = filled(PLAN, 300)
    assert torch.equal(state.dense("keys", dtype), state.dense("keys", torch.float32).to(dtype))


# ---- bytes


@pytest.mark.parametrize("plan", [PLAN, APART])
@pytest.mark.parametrize("rows", [1, 3])
def test_bytes_are_what_the_tensors_take(plan: LayerPlan, rows: int) -> None:
    state = filled(plan, 600, rows=rows)
    token_bits = sum(group.side(kind).token_bits for group in plan.groups for kind in KINDS)
    held = state.held_bytes()
    assert held["coded"] == rows * 512 * token_bits // 8 == sum(x.nbytes for x in codes_of(state))
    assert held["verbatim"] == sum(state.raw_buffer(kind).untyped_storage().nbytes() for kind in KINDS)
    room = 4 + 16 + PAGE_TOKENS
    assert held["verbatim"] == rows * room * 2 * (4 + 5) * 2


def test_a_long_text_leaves_no_long_buffer() -> None:
    state = LayerState(PLAN, 4, 16)
    state.append(*tokens_of(2000), torch.tensor([0]))
    assert state.raw_buffer("keys").shape[2] == 2004
    state.settle()
    assert state.raw_buffer("keys").shape[2] == 4 + 16 + PAGE_TOKENS
    for _ in range(300):
        state.append(*tokens_of(1), torch.tensor([0]))
        state.settle()
        assert state.raw_buffer("keys").shape[2] == 4 + 16 + PAGE_TOKENS
    assert state.raw_buffer("keys").is_contiguous()


# ---- what is refused


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((1, 3, 10, 4), (1, 3, 10, 5)),
        ((1, 2, 10, 3), (1, 2, 10, 5)),
        ((1, 2, 10, 4), (1, 2, 10, 4)),
        ((1, 1, 10, 4), (1, 1, 10, 5)),
    ],
)
def test_tokens_of_another_model_are_refused(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    state = LayerState(PLAN, 4, 16)
    with pytest.raises(ConfigInvalid, match="was made for"):
        state.append(torch.zeros(keys), torch.zeros(values), torch.tensor([0]))
    assert state.is_empty


def test_another_batch_is_refused() -> None:
    state = filled(PLAN, 300, rows=2)
    with pytest.raises(ConfigInvalid, match="holds 2 rows; the new tokens have 3"):
        state.append(*tokens_of(1, rows=3), torch.tensor([0, 0, 0]))
    assert state.slots == 300
