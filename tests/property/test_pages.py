"""Pages of codes: any codes at any widths come back, and a layer holds what a list of its tokens would."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_plans import layer_plan, layer_tokens, slow_unpack
from torch import Tensor

from kvalign.geometry import KINDS
from kvalign.kernels import cpu, reference
from kvalign.resident.attention import Counters, Mask, attend
from kvalign.resident.layout import PAGE_TOKENS, PageLayout, pack, unpack
from kvalign.resident.state import LayerState

widths_of_pages = st.lists(st.integers(1, 8), min_size=1, max_size=12).map(lambda w: tuple(sorted(w, reverse=True)))
seeds = st.integers(0, 2**31 - 1)


# ---- bytes


@given(widths_of_pages, st.lists(st.integers(0, 3), max_size=2), seeds)
def test_codes_come_back(widths: tuple[int, ...], batch: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 1 << width, (*batch, PAGE_TOKENS), generator=generator) for width in widths]
    codes = torch.stack(rows, dim=-2).to(torch.uint8)
    layout = PageLayout(widths)
    pages = pack(codes, layout)
    assert pages.shape == (*batch, layout.page_bytes)
    assert torch.equal(unpack(pages, layout), codes)


@given(widths_of_pages, seeds)
@settings(max_examples=30)
def test_any_bytes_are_codes(widths: tuple[int, ...], seed: int) -> None:
    layout = PageLayout(widths)
    page = torch.randint(0, 256, (layout.page_bytes,), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    codes = unpack(page, layout)
    assert codes.tolist() == slow_unpack(page.tolist(), widths)
    assert torch.equal(pack(codes, layout), page)


@given(widths_of_pages, st.integers(1, 3), seeds)
@settings(max_examples=30)
def test_kernels_read_the_same_pages(widths: tuple[int, ...], pages: int, seed: int) -> None:
    side = layer_plan(1, len(widths), 1, widths=widths, seed=seed % 100).groups[0].keys
    assert side.widths == widths
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (pages, side.layout.page_bytes), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 150, (pages, PAGE_TOKENS), generator=generator).to(torch.uint8)
    found, wanted = (kernel.coefficients(side, codes, scales) for kernel in (cpu, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# ---- a layer and a list

PLAN = layer_plan(2, 3, 4, widths=(8,), joint=True)


@dataclass
class Listed:
    """What a layer must hold: each slot's tokens as they came, and whether they are on a page."""

    keys: list[Tensor]
    values: list[Tensor]
    coded: list[bool]

    def take(self, keys: Tensor, values: Tensor) -> None:
        self.keys += keys.unbind(2)
        self.values += values.unbind(2)
        self.coded += [False] * keys.shape[2]

    def settle(self, recent: int) -> None:
        while self.coded.count(False) - recent >= PAGE_TOKENS:
            first = self.coded.index(False)
            self.coded[first : first + PAGE_TOKENS] = [True] * PAGE_TOKENS

    def crop(self, tokens: int) -> None:
        for part in (self.keys, self.values, self.coded):
            del part[max(0, len(part) - tokens) :]

    def pick(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys, self.values = ([change(x) for x in part] for part in (self.keys, self.values))


steps = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 300)),
    st.tuples(st.just("append"), st.integers(1, 5)),
    st.tuples(st.just("settle"), st.just(0)),
    st.tuples(st.just("crop"), st.integers(0, 200)),
    st.tuples(st.just("crop"), st.integers(0, 3)),
    st.tuples(st.just("pick"), st.permutations([0, 1, 2])),
)


@given(
    st.lists(steps, min_size=1, max_size=12),
    st.integers(0, 6),
    st.sampled_from([0, 1, 20, 128]),
    st.lists(st.sampled_from([0, 0, 1, 5, 130, 400]), min_size=3, max_size=3),
    seeds,
)
@settings(max_examples=100)
def test_a_layer_holds_what_a_list_would(
    taken: list[tuple[str, Any]], sink_tokens: int, recent: int, padding: list[int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    state, listed = LayerState(PLAN, sink_tokens, recent), Listed([], [], [])
    padded = torch.tensor(padding)
    for name, given_ in [("append", 1), *taken, ("append", 1)]:
        if name == "append":
            keys, values = layer_tokens(PLAN, 3, given_, generator)
            state.append(keys, values, padded.clamp_max(state.slots + given_))
            listed.take(keys, values)
        elif name == "settle":
            state.settle()
            listed.settle(recent)
        elif name == "crop":
            state.crop(given_)
            listed.crop(given_)
        else:
            order = torch.tensor(given_)
            state.change_rows(lambda x, order=order: x[order])
            listed.pick(lambda x, order=order: x[order])
            padded = padded[order]
        assert state.slots == len(listed.coded)
        assert state.coded_tokens == sum(listed.coded)
    _assert_same(state, listed, padded)
    _assert_attention(state, generator)


def _assert_same(state: LayerState, listed: Listed, padding: Tensor) -> None:
    for kind, part in zip(KINDS, (listed.keys, listed.values), strict=True):
        found, came = state.dense(kind, torch.float32), torch.stack(part, dim=2)
        for row, first in enumerate(padding.tolist()):
            exact = ~torch.tensor(listed.coded)
            exact[first : first + state.sink_tokens] = True
            # float16 cannot hold the smallest of them exactly.
            assert torch.allclose(found[row][:, exact], came[row][:, exact], rtol=0, atol=2**-25)
            # Eight bits: a token on a page is near itself, and far from any other.
            off = (found[row] - came[row]).transpose(0, 1).flatten(1).norm(dim=1)
            size = came[row].transpose(0, 1).flatten(1).norm(dim=1)
            assert (off <= 0.1 * size + 0.1).all()


def _assert_attention(state: LayerState, generator: torch.Generator) -> None:
    queries = torch.randn(3, 4, 1, 3, generator=generator)
    found = attend(state, queries, Mask(), Counters({}), scaling=0.5)
    visible = (torch.arange(state.slots) >= state.padding[:, None])[:, None, None]
    dense = (state.dense(kind, torch.float32) for kind in KINDS)
    wanted = reference.attend(queries, *dense, visible, scaling=0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 700),
    st.integers(1, 4),
    st.floats(0, 1),
    seeds,
)
@settings(max_examples=100)
def test_attention_of_any_shape_is_that_of_the_dense_layer(
    widths: list[int],
    joint: bool,
    kv_heads: int,
    shared: int,
    key_dim: int,
    value_dim: int,
    tokens: int,
    count: int,
    share: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    plan = layer_plan(kv_heads, key_dim, value_dim, widths=widths, joint=joint, seed=seed % 1000)
    state = LayerState(plan, seed % 7, seed % 40)
    state.append(*layer_tokens(plan, 2, tokens, generator), torch.tensor([0, seed % tokens]))
    state.settle()
    count = min(count, tokens)
    queries = torch.randn(2, kv_heads * shared, count, key_dim, generator=generator)
    visible = torch.rand(2, 1, count, tokens, generator=generator) < share
    if not state.sink_tokens + state.raw_tokens and count > 1:
        return
    found = attend(state, queries, Mask(visible), Counters({}), scaling=0.5)
    seen = visible & (torch.arange(tokens) >= state.padding[:, None])[:, None, None]
    dense = [state.dense(kind, torch.float32) for kind in KINDS]
    wanted = reference.attend(queries, *dense, seen, scaling=0.5)
    limit = 1e-4 * max(1.0, float(dense[1].abs().max()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=limit)
