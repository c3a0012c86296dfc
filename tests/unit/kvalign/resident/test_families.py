"""The resident cache in many families: attention on codes says what the same cache says when it is uncompressed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from resident_models import DENSE_ONLY, FAMILIES, attention, feed, model_of, plan_of, random_ids, relative, spread, twin
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from kvalign.capture import cache_argument
from kvalign.resident import attention as attention_on_codes
from kvalign.resident import interface
from kvalign.resident.cache import ResidentCache
from kvalign.resident.layout import PAGE_TOKENS, unpack
from kvalign.resident.state import LayerState

FUSED = [family for family in FAMILIES if family not in DENSE_ONLY]
# A prompt, a second part of it, single tokens, candidates; two pages are full after the first, three at the end.
CHUNKS = (300, 60, 1, 1, 1, 20, 1, 1, 15)
TOKENS = sum(CHUNKS)
SINGLE = CHUNKS.count(1)
# Float32 sums in another order, over two layers; logits' own deviation is the unit.
ROUNDING = 1e-4
# Alone among queries, a query sees its own token in 16 bit (2^-11), where dense attention has it in 32.
OWN_TOKEN_ROUNDED = 5e-4
# 8-bit coefficients are off by about 0.7 % of their deviation each; of that a layer's output gets less.
EIGHT_BITS = 0.01


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    interface.register()


def ids_and_mask() -> tuple[Tensor, Tensor]:
    """Two rows, the second behind padding that ends within a page."""
    ids = random_ids(2, TOKENS)
    mask = torch.ones_like(ids)
    mask[1, :150] = 0
    return ids, mask


def run(family: str, fused: bool, ids: Tensor, chunks: Any, mask: Tensor, **plan: Any) -> tuple[Tensor, ResidentCache]:
    model = model_of(family)
    held = ResidentCache(plan_of(family, **plan), model)
    if not fused:
        return feed(model, held, ids, chunks, mask), held
    with attention(model):
        return feed(model, held, ids, chunks, mask), held


# ---- the same, whoever computes it


@pytest.mark.parametrize("family", FUSED)
def test_fused_attention_says_what_dense_attention_on_the_same_cache_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_on_codes, "_TILE_PAGES", 1)  # so that parts of it are merged
    monkeypatch.setattr(attention_on_codes, "_TILE_QUERIES", 32)
    model, (ids, mask) = model_of(family), ids_and_mask()
    held = ResidentCache(plan_of(family), model)
    for count in CHUNKS:
        seen = held.get_seq_length()
        other = twin(held, model)
        dense = feed(model, held, ids, [count], mask)
        with attention(model):
            fused = feed(model, other, ids, [count], mask)
        limit = OWN_TOKEN_ROUNDED if count == 1 else ROUNDING
        assert relative(fused, dense, mask[:, seen : seen + count]) < limit, (seen, count)
        assert other.get_seq_length() == held.get_seq_length() == seen + count


@pytest.mark.parametrize("family", FUSED)
def test_the_fused_kernel_runs_and_nothing_is_uncompressed_whole(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_on_codes, "_TILE_PAGES", 1)
    monkeypatch.setattr(LayerState, "dense", None)
    _, held = run(family, True, *_with_chunks())
    layers = len(held.coded_layers())
    assert layers > 0
    assert held.counters.fused == {"numba": layers * SINGLE}
    assert held.counters.tiled == layers * (len(CHUNKS) - SINGLE - 1)  # the first had nothing before it
    assert held.counters.dense == 0
    assert held.counters.widest_tokens == PAGE_TOKENS
    assert {layer.state.coded_tokens for layer in held.coded_layers().values()} == {3 * PAGE_TOKENS}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_implementations_get_dense_tensors_and_that_is_counted(family: str) -> None:
    _, held = run(family, False, *_with_chunks())
    assert held.counters.dense == len(held.coded_layers()) * len(CHUNKS)
    assert held.counters.fused == {}
    assert held.counters.widest_tokens == TOKENS


def test_falcon_stays_with_its_own_attention_when_asked_for_ours() -> None:
    model, (ids, mask) = model_of("falcon"), ids_and_mask()
    plain, _ = run("falcon", False, ids, CHUNKS, mask)
    asked, held = run("falcon", True, ids, CHUNKS, mask)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(plain, asked)
    assert held.counters.dense > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_heads_with_a_basis_each_and_few_bits(family: str) -> None:
    model, (ids, mask) = model_of(family), ids_and_mask()
    held = ResidentCache(plan_of(family, width=3, joint=False), model)
    feed(model, held, ids, [340], mask)
    for count in (1, 20):
        other = twin(held, model)
        seen = held.get_seq_length()
        dense = feed(model, held, ids, [count], mask)
        with attention(model):
            fused = feed(model, other, ids, [count], mask)
        assert relative(fused, dense, mask[:, seen : seen + count]) < OWN_TOKEN_ROUNDED


# ---- near what was never compressed


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_are_near_no_compression(family: str, fused: bool) -> None:
    ids, mask = ids_and_mask()
    model, seen = model_of(family), mask.bool()
    exact = feed(model, DynamicCache(config=model.config), ids, CHUNKS, mask)[seen]
    eight, _ = run(family, fused and family in FUSED, ids, CHUNKS, mask)
    two, _ = run(family, fused and family in FUSED, ids, CHUNKS, mask, width=2)
    assert spread(eight[seen], exact) < EIGHT_BITS
    assert spread(two[seen], exact) > 10 * spread(eight[seen], exact)  # so it is the codes that were read


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_a_prompt_in_chunks_is_near_the_prompt_at_once(family: str) -> None:
    ids, mask = ids_and_mask()
    at_once, one = run(family, True, ids, (380, 1), mask)
    chunked, other = run(family, True, ids, (170, 1, 129, 80, 1), mask)
    assert one.get_seq_length() == other.get_seq_length() == 381
    assert spread(chunked[mask[:, :381].bool()], at_once[mask[:, :381].bool()]) < EIGHT_BITS
    if family == "llama":  # whose first layer sees no attention before it makes keys
        assert torch.equal(codes(one, 0, "keys"), codes(other, 0, "keys"))
        assert torch.equal(codes(one, 0, "values"), codes(other, 0, "values"))


# ---- what is made on the way


class LargestFloat(TorchDispatchMode):
    """Remembers how many numbers the largest floating tensor that any operation returned has."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("count", [1, 4])
def test_no_operation_of_a_step_makes_keys_of_full_length(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_on_codes, "_TILE_PAGES", 2)
    model, ids = model_of("llama"), random_ids(1, 1000)
    held = ResidentCache(plan_of("llama"), model)
    feed(model, held, ids, [1000 - count])
    keys = 2 * 1000 * 8
    with LargestFloat() as dense:
        feed(model, twin(held, model), ids, [count])
    with attention(model), LargestFloat() as fused:
        feed(model, held, ids, [count])
    assert dense.largest >= keys
    assert fused.largest < keys * 0.6  # the vocabulary's weights are half of it


# ---- left padding

ONE_PAGE = (PAGE_TOKENS, (300, 60, 1, 1, 20))
# The first chunks are padding alone, in this row.
LONGER_THAN_A_CHUNK = (PAGE_TOKENS, (100, 200, 60, 1, 1, 20))
LONGER_THAN_THREE = (2 * PAGE_TOKENS, (100, 1, 99, 220, 1, 1, 20))
PADDED = [
    ("llama", *ONE_PAGE),
    ("llama", *LONGER_THAN_A_CHUNK),
    ("llama", *LONGER_THAN_THREE),
    ("gpt2", *LONGER_THAN_A_CHUNK),
    ("opt", *LONGER_THAN_THREE),  # whose positions come from the mask
    ("gemma3", *LONGER_THAN_A_CHUNK),
    ("gpt_oss", *LONGER_THAN_THREE),
    ("smollm3", *LONGER_THAN_A_CHUNK),
    ("qwen3_next", *ONE_PAGE),  # transformers masks padding of the first chunk alone in linear layers
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("family", "padding", "chunks"), PADDED)
def test_a_row_behind_whole_pages_of_padding_is_the_row_alone(
    family: str, padding: int, chunks: tuple[int, ...], fused: bool
) -> None:
    """Pages of both then hold the same tokens: nothing differs but the order of sums, and the rounding of sinks."""
    ids = random_ids(2, sum(chunks))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    both, batch = run(family, fused, ids, chunks, mask)
    alone, row = run(family, fused, ids[1:, padding:], behind(chunks, padding), mask[1:, padding:])
    first, _ = run(family, fused, ids[:1], chunks, mask[:1])
    assert spread(both[1:, padding:], alone) < OWN_TOKEN_ROUNDED
    assert relative(both[:1], first) < OWN_TOKEN_ROUNDED
    assert batch.get_seq_length() == sum(chunks)
    for index in batch.coded_layers():
        for kind in ("keys", "values"):
            if index == 0:  # no attention came before
                assert len(codes(row, 0, kind)[0]) == PAGE_TOKENS
                assert torch.equal(codes(batch, 0, kind)[1, padding:], codes(row, 0, kind)[0])
            else:  # where a level's edge may lie within rounding
                padded, plain = (held.coded_layers()[index].state.dense(kind, torch.float32) for held in (batch, row))
                assert spread(padded[1, :, padding:], plain[0]) < EIGHT_BITS


def test_sinks_in_a_later_chunk_are_seen_as_they_were_computed() -> None:
    padding, chunks = LONGER_THAN_A_CHUNK
    ids = random_ids(2, sum(chunks))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    both, _ = run("llama", True, ids, chunks[:2], mask)
    alone, _ = run("llama", True, ids[1:, padding:], behind(chunks, padding)[:1], mask[1:, padding:])
    assert relative(both[1:, padding:], alone) < ROUNDING


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("padding", "chunks"), [(150, CHUNKS), (217, (90, 210, 1, 80, 1, 1)), (3, (2, 300, 1, 60))])
def test_the_same_tokens_have_the_same_codes_behind_any_padding(
    padding: int, chunks: tuple[int, ...], fused: bool
) -> None:
    """Other tokens are on pages than in the row alone, so that logits agree as far as 8 bits go."""
    ids = random_ids(3, sum(chunks))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    mask[2, : padding // 2] = 0
    both, batch = run("llama", fused, ids, chunks, mask)
    for index, skipped in enumerate((0, padding, padding // 2)):
        rows = slice(index, index + 1)
        alone, row = run("llama", fused, ids[rows, skipped:], behind(chunks, skipped), mask[rows, skipped:])
        assert spread(both[rows, skipped:], alone) < EIGHT_BITS
        for kind in ("keys", "values"):
            padded, plain = codes(batch, 0, kind)[index, skipped:], codes(row, 0, kind)[0]
            shared = min(len(padded), len(plain))
            assert shared > 0
            assert torch.equal(padded[:shared], plain[:shared])


@pytest.mark.parametrize("fused", [False, True])
def test_sinks_are_the_first_tokens_behind_the_padding(fused: bool) -> None:
    ids = random_ids(2, 330)
    mask = torch.ones_like(ids)
    mask[1, :205] = 0
    _, batch = run("llama", fused, ids, (200, 6, 1, 123), mask)  # the sinks come in two chunks
    _, row = run("llama", fused, ids[1:, 205:], (125,), mask[1:, 205:])
    state, alone = batch.coded_layers()[0].state, row.coded_layers()[0].state
    assert state.padding.tolist() == [0, 205]
    assert state.raw_slots()[1, :4].tolist() == [205, 206, 207, 208]
    for kind in ("keys", "values"):
        assert torch.equal(state.raw(kind)[1, :, :4], alone.raw(kind)[0, :, :4])
        assert alone.raw(kind)[0, :, :4].abs().min() > 0


@pytest.mark.parametrize("fused", [False, True])
def test_padding_is_never_looked_at(fused: bool) -> None:
    """Other tokens in the place of padding change nothing at all."""
    ids, mask = ids_and_mask()
    other = ids.clone()
    other[1, :150] = random_ids(1, 150, seed=7)[0]
    one, _ = run("llama", fused, ids, CHUNKS, mask)
    two, _ = run("llama", fused, other, CHUNKS, mask)
    assert torch.equal(one[mask.bool()], two[mask.bool()])


# ---- masks of one's own


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("count", [1, 20])
def test_tokens_in_the_middle_may_be_hidden(family: str, count: int) -> None:
    """On pages, among sinks and among the newest; a page and a half in a row, and single ones."""
    model, ids = model_of(family), random_ids(2, 400)
    mask = torch.ones_like(ids)
    mask[0, 20:200] = 0
    mask[1, 2:340:3] = 0
    held = ResidentCache(plan_of(family), model)
    feed(model, held, ids, [340])  # all were seen while they were filled in
    other, unmasked = twin(held, model), twin(held, model)
    dense = feed(model, held, ids, [count], mask)
    with attention(model):
        assert relative(feed(model, other, ids, [count], mask), dense) < OWN_TOKEN_ROUNDED
    assert relative(feed(model, unmasked, ids, [count]), dense) > 0.1


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["seen", "added"])
def test_masks_with_four_dimensions(kind: str, heads: int, count: int) -> None:
    model, ids = model_of("llama"), random_ids(2, 400)
    held = ResidentCache(plan_of("llama", joint=False), model)
    feed(model, held, ids, [340])
    generator = torch.Generator().manual_seed(2)
    slots = torch.arange(340 + count)
    seen = (slots <= slots[340:, None]) & (torch.rand(2, heads, count, 340 + count, generator=generator) < 0.7)
    mask = seen
    if kind == "added":
        added = torch.randn(2, heads, count, 340 + count, generator=generator)
        mask = added.masked_fill(~seen, torch.finfo(torch.float32).min)
    found = []
    for implementation, own in (("sdpa", twin(held, model)), ("kvalign", held)):
        given = {cache_argument(model): own, "attention_mask": mask, "position_ids": slots[None, 340:]}
        with attention(model, implementation), torch.no_grad():
            found.append(model(ids[:, 340 : 340 + count], **given, use_cache=True).logits)
    assert relative(found[1], found[0]) < OWN_TOKEN_ROUNDED
    assert held.counters.dense == 2  # of the prompt; none more


def test_more_sinks_than_tokens_so_far() -> None:
    model, ids = model_of("llama"), random_ids(2, 300)
    held = ResidentCache(replace(plan_of("llama"), sink_tokens=24), model)
    exact = feed(model, DynamicCache(config=model.config), ids, (3, 1, 290, 1, 1))
    with attention(model):
        assert spread(feed(model, held, ids, (3, 1, 290, 1, 1)), exact) < EIGHT_BITS
    assert held.coded_layers()[0].state.raw_slots()[:, :24].tolist() == [list(range(24))] * 2


def _with_chunks() -> tuple[Tensor, tuple[int, ...], Tensor]:
    ids, mask = ids_and_mask()
    return ids, CHUNKS, mask


def behind(chunks: tuple[int, ...], padding: int) -> list[int]:
    """Lengths of chunks once their first `padding` tokens are gone."""
    found = []
    for count in chunks:
        gone = min(padding, count)
        padding -= gone
        if count > gone:
            found.append(count - gone)
    return found


def codes(held: ResidentCache, layer: int, kind: Any) -> Tensor:
    """[B, T, R + 1]: codes of the coded tokens of a layer, and their scales."""
    state = held.coded_layers()[layer].state
    pages, group = state.pages[0][kind], state.plan.groups[0]
    taken = unpack(pages.codes, group.side(kind).layout).transpose(-1, -2)  # [B, N, T, R]
    return torch.cat([taken, pages.scales[..., None]], dim=-1).flatten(1, 2)[:, state.coded_slots() >= 0]
