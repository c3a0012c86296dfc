"""What generation asks of a resident cache: every way to generate, and every method of transformers' Cache."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from resident_models import attention, feed, fresh, model_of, plan_of, random_ids, relative, spread, twin
from torch import Tensor
from transformers import DynamicCache

from kvalign.capture import cache_argument
from kvalign.resident import interface
from kvalign.resident.cache import ResidentCache
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import ResidentPlan

PROMPT = 200
# Logits that were computed on 8-bit codes: at most this far from those on no codes, in deviations of the logits.
EIGHT_BITS_AT_MOST = 0.25
EIGHT_BITS = 0.01
EXACT = 1e-5
SIXTEEN_BITS_AT_MOST = 0.1  # bfloat16 has 8 bits, and logits are up to four deviations


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    interface.register()


def generate(model: Any, ids: Tensor, held: Any, **settings: Any) -> Any:
    """As users call it, without an end before its length is reached."""
    given = {"attention_mask": torch.ones_like(ids)} | settings
    return model.generate(
        ids, **{cache_argument(model): held}, pad_token_id=257, eos_token_id=None, **({"do_sample": False} | given)
    )


def both_modes(
    family: str, ids: Tensor, dtype: torch.dtype = torch.float32, plan: ResidentPlan | None = None, **settings: Any
) -> Tensor:
    """What fused attention generates, which is what dense attention on the same cache does."""
    model = model_of(family, dtype)
    plan = plan or plan_of(family, dtype)
    found = []
    for implementation in (model.config._attn_implementation, "kvalign"):
        held = ResidentCache(plan, model)
        with attention(model, implementation), torch.random.fork_rng():
            torch.manual_seed(11)
            found.append(generate(model, ids, held, **settings))
        if implementation == "kvalign":
            assert held.counters.dense == 0
            assert held.counters.fused.get("numba", 0) + held.counters.tiled > 0
        else:
            assert held.counters.dense > 0
    dense, fused = found
    if dtype == torch.float32:
        assert dense.tolist() == fused.tolist()
    else:
        assert_same_but_for_ties(model, dense, fused, ids.shape[1], settings["attention_mask"])
    return fused


def assert_same_but_for_ties(model: Any, a: Tensor, b: Tensor, prompt: int, mask: Tensor) -> None:
    """In 16 bit logits of two tokens are often equal or next to each other; from there on texts may differ."""
    same = (a == b).int().cumprod(1).sum(1)  # [B]
    assert (same[same < a.shape[1]] > prompt).all()
    assert (same - prompt).float().mean() > (a.shape[1] - prompt) / 3
    for row, at in enumerate(same.tolist()):
        if at == a.shape[1]:
            continue
        own = torch.cat([mask[row : row + 1], mask.new_ones(1, at - prompt)], dim=1)
        positions = (own.cumsum(1) - 1).clamp_min(0)
        logits = model(a[row : row + 1, :at], attention_mask=own, position_ids=positions).logits[0, -1].float()
        assert abs(logits[a[row, at]] - logits[b[row, at]]) < SIXTEEN_BITS_AT_MOST * logits.std()


def assert_greedy(model: Any, sequences: Tensor, prompt: int, mask: Tensor | None = None) -> None:
    """Each token chosen is the likeliest, or as likely as far as 8 bits tell, of the model without any cache."""
    with torch.no_grad():
        mask = torch.ones_like(sequences) if mask is None else mask
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        logits = model(sequences, attention_mask=mask, position_ids=positions).logits.float()[:, prompt - 1 : -1]
    chosen = logits.gather(2, sequences[:, prompt:, None])[..., 0]
    behind = (logits.amax(-1) - chosen) / logits.std()
    assert behind.max() < EIGHT_BITS_AT_MOST
    assert (behind == 0).float().mean() > 0.9


# ---- ways to generate


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_greedy(family: str) -> None:
    ids = random_ids(1, PROMPT)
    found = both_modes(family, ids, max_new_tokens=90)  # a page fills on the way
    assert found.shape == (1, PROMPT + 90)
    assert_greedy(model_of(family), found, PROMPT)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_batches(dtype: torch.dtype, rows: int) -> None:
    ids = random_ids(rows, PROMPT, seed=5)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 60 * row] = 0
    found = both_modes("llama", ids, dtype, max_new_tokens=24, attention_mask=mask)
    if dtype == torch.float32:
        new = torch.ones(rows, 24, dtype=torch.int64)
        assert_greedy(model_of("llama"), found, PROMPT, torch.cat([mask, new], dim=1))


def test_rows_of_a_padded_batch_are_generated_as_alone() -> None:
    """Padding is whole pages, so that the same tokens are on pages."""
    model, ids = model_of("llama"), random_ids(3, 420)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, PAGE_TOKENS, 2 * PAGE_TOKENS)):
        mask[row, :padding] = 0
    batch = both_modes("llama", ids, max_new_tokens=24, attention_mask=mask)
    with attention(model):
        for row, padding in enumerate((0, PAGE_TOKENS, 2 * PAGE_TOKENS)):
            own = ids[row : row + 1, padding:]
            alone = generate(model, own, ResidentCache(plan_of("llama"), model), max_new_tokens=24)
            assert alone[0, own.shape[1] :].tolist() == batch[row, 420:].tolist()


def test_sampling_with_a_seed_and_several_sequences() -> None:
    ids = random_ids(1, PROMPT)
    found = both_modes("llama", ids, do_sample=True, temperature=2.0, num_return_sequences=3, max_new_tokens=24)
    assert found.shape == (3, PROMPT + 24)
    assert len({tuple(row) for row in found.tolist()}) == 3


def test_beam_search(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []
    reorder = ResidentCache.reorder_cache
    monkeypatch.setattr(
        ResidentCache, "reorder_cache", lambda held, order: (orders.append(order.tolist()), reorder(held, order))[1]
    )
    model, ids = model_of("llama"), random_ids(2, PROMPT)
    settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 24}
    found = both_modes("llama", ids, **settings)
    assert found.shape == (4, PROMPT + 24)
    assert any(order != sorted(order) for order in orders)
    with attention(model):
        scored = generate(
            model,
            ids,
            ResidentCache(plan_of("llama"), model),
            **settings,
            output_scores=True,
            return_dict_in_generate=True,
        )
    assert scored.sequences.tolist() == found.tolist()
    with torch.no_grad():
        logits = model(found).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    true = logits.gather(2, found[:, PROMPT:, None])[..., 0].mean(1)
    # A beam that went on with another's cache is off by whole nats.
    torch.testing.assert_close(scored.sequences_scores, true, atol=0.02, rtol=0)


@pytest.fixture
def crops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that resident caches were told to forget, as they were told."""
    told: list[int] = []
    crop = ResidentCache.crop
    monkeypatch.setattr(ResidentCache, "crop", lambda held, count: (told.append(count), crop(held, count))[1])
    return told


def assistant() -> Any:
    """The model with some noise: right now and then."""
    model = fresh("llama")
    generator = torch.Generator().manual_seed(4)
    for weight in model.parameters():
        weight += 0.01 * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.parametrize("recent_tokens", [16, 0])
def test_assisted_by_another_model(recent_tokens: int, crops: list[int]) -> None:
    """Without recent tokens candidates are coded before they are refused: pages are cut."""
    plan = replace(plan_of("llama"), recent_tokens=recent_tokens)
    ids = random_ids(1, 250)
    found = both_modes("llama", ids, plan=plan, assistant_model=assistant(), max_new_tokens=40)
    assert min(crops) < 0
    assert sum(count == 0 for count in crops) < len(crops)
    assert_greedy(model_of("llama"), found, 250)
    assert found.tolist() == both_modes("llama", ids, plan=plan, max_new_tokens=40).tolist()


def test_assisted_by_looking_up_the_prompt(crops: list[int]) -> None:
    ids = random_ids(1, 20).repeat(1, 10)
    found = both_modes("llama", ids, prompt_lookup_num_tokens=5, max_new_tokens=40)
    assert min(crops) < 0
    assert found.tolist() == both_modes("llama", ids, max_new_tokens=40).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_conversation_goes_on_with_the_same_cache(family: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = model_of(family), []
    embed = model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda _, given, out: widths.append(given[0].shape[1]))
    held = ResidentCache(plan_of(family), model)
    with attention(model, "kvalign" if fused else model.config._attn_implementation):
        first = generate(model, random_ids(1, PROMPT), held, max_new_tokens=20)
        assert held.get_seq_length() == PROMPT + 19
        asked = torch.cat([first, random_ids(1, 150, seed=8)], dim=1)
        second = generate(model, asked, held, max_new_tokens=20)
    hook.remove()
    assert widths == [PROMPT] + [1] * 19 + [151] + [1] * 19
    assert held.get_seq_length() == second.shape[1] - 1
    assert second[:, : asked.shape[1]].tolist() == asked.tolist()
    assert_greedy(model, second, asked.shape[1])


def test_one_prompt_and_several_ends() -> None:
    """A prompt is filled in once, and each end goes on from a copy."""
    model, ids = model_of("llama"), random_ids(1, PROMPT)
    with attention(model):
        held = ResidentCache(plan_of("llama"), model)
        feed(model, held, ids, [PROMPT])
        for seed in (3, 4):
            asked = torch.cat([ids, random_ids(1, 10, seed=seed)], dim=1)
            own = generate(model, asked, copy.deepcopy(held), max_new_tokens=20)
            assert_greedy(model, own, PROMPT + 10)
        assert held.get_seq_length() == PROMPT


# ---- methods of a cache

TOKENS = 330


def filled(rows: int = 2, *, family: str = "llama", padding: Iterable[int] = (), fused: bool = True) -> Any:
    """(model, cache with TOKENS of 400 tokens, ids, mask)."""
    model, ids = model_of(family), random_ids(rows, 400)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    held = ResidentCache(plan_of(family), model)
    with attention(model, "kvalign" if fused else model.config._attn_implementation):
        feed(model, held, ids, (300, 1, 29), mask)
    return model, held, ids, mask


def whole(held: ResidentCache, layer: int = 0) -> Tensor:
    """[2, B, H, slots, D]: keys and values of a layer, uncompressed."""
    state = held.coded_layers()[layer].state
    return torch.stack([state.dense(kind, torch.float32) for kind in ("keys", "values")])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("gone", [1, 60, 100, 200, 328, 330, 9999])
def test_crop_forgets_the_newest_and_goes_on(gone: int, fused: bool) -> None:
    model, held, ids, mask = filled(padding=(0, 40), fused=fused)
    before, left = whole(held, 1), max(0, TOKENS - gone)
    held.crop(-gone)
    assert held.get_seq_length() == left
    assert {layer.get_seq_length() for layer in held.layers} == {left}
    assert torch.equal(whole(held, 1), before[..., :left, :])
    rest = [TOKENS - left, 1, 30, 1] if left < TOKENS else [1, 30, 1]
    exact = DynamicCache(config=model.config)
    true = feed(model, exact, ids, [*([left] if left else []), *rest], mask)[:, left:]
    with attention(model, "kvalign" if fused else model.config._attn_implementation):
        found = feed(model, held, ids, rest, mask)
    seen = mask[:, left : left + sum(rest)].bool()
    assert spread(found[seen], true[seen]) < EIGHT_BITS
    assert held.get_seq_length() == left + sum(rest)
    # What was on pages before is what it was: nothing is coded again. Sinks that went were made anew.
    kept = min(left, 2 * PAGE_TOKENS)
    assert torch.equal(whole(held, 1)[:, 0, :, 4:kept], before[:, 0, :, 4:kept])


def test_crop_twice_within_one_page() -> None:
    model, held, ids, mask = filled()
    with attention(model):
        for gone, rest in ((150, 40), (70, 180)):  # a cut page, more pages, cut again, and on
            held.crop(-gone)
            other = twin(held, model)
            fused = feed(model, held, ids, [rest], mask)
            with attention(model, "sdpa"):
                assert relative(fused, feed(model, other, ids, [rest], mask)) < 1e-4
    state = held.coded_layers()[0].state
    assert state.counts[1] < PAGE_TOKENS
    assert sum(state.counts) == state.coded_tokens
    slots = state.coded_slots()
    assert slots[slots >= 0].tolist() == list(range(state.coded_tokens))


def test_crop_takes_no_positive_number() -> None:
    _, held, _, _ = filled()
    with pytest.raises(ValueError, match="negative number, not 3"):
        held.crop(3)
    assert held.get_seq_length() == TOKENS
    held.crop(0)
    assert held.get_seq_length() == TOKENS


ROWS: list[tuple[str, Callable[[ResidentCache], Any], list[int]]] = [
    ("reorder", lambda held: held.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    ("select", lambda held: held.batch_select_indices(torch.tensor([1, 2])), [1, 2]),
    ("repeat", lambda held: held.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("change", "rows"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_are_picked_with_their_padding(
    family: str, change: Callable[[ResidentCache], Any], rows: list[int], fused: bool
) -> None:
    model, held, ids, mask = filled(3, family=family, padding=(0, 40, 170))
    other = twin(held, model)
    change(other)
    for index, layer in other.coded_layers().items():
        assert layer.state.padding.tolist() == [[0, 40, 170][row] for row in rows]
        assert torch.equal(whole(other, index), whole(held, index)[:, rows])
    with attention(model, "kvalign" if fused else model.config._attn_implementation):
        before = feed(model, held, ids, (1, 20, 1), mask)
        after = feed(model, other, ids[rows], (1, 20, 1), mask[rows])
    assert relative(after, before[rows]) < EXACT
    held.reset()  # the copy shares no memory with it
    assert other.get_seq_length() == TOKENS + 22


def test_linear_layers_are_reordered_too() -> None:
    """transformers gives them no other way to pick rows."""
    model, held, ids, mask = filled(3, family="qwen3_next")
    other = twin(held, model)
    other.reorder_cache(torch.tensor([2, 0, 0]))
    with attention(model):
        before, after = (
            feed(model, cache, ids[rows], (1, 20), mask) for cache, rows in ((held, [0, 1, 2]), (other, [2, 0, 0]))
        )
    assert relative(after, before[[2, 0, 0]]) < EXACT


@pytest.mark.parametrize("fused", [False, True])
def test_a_reset_cache_is_a_new_one(fused: bool) -> None:
    model, held, ids, _ = filled(3, padding=(0, 40, 170))
    held.reset()
    assert held.get_seq_length() == 0
    assert held.sizes().total == 0
    new = ResidentCache(plan_of("llama"), model)
    mask = torch.ones(2, 400, dtype=torch.int64)
    mask[0, :30] = 0
    with attention(model, "kvalign" if fused else "sdpa"):
        again = feed(model, held, ids[:2], (200, 1, 20), mask)
        assert torch.equal(again, feed(model, new, ids[:2], (200, 1, 20), mask))
    assert torch.equal(whole(held), whole(new))


def test_lengths_and_mask_sizes() -> None:
    model, held, ids, mask = filled()
    assert [held.get_seq_length(layer) for layer in range(2)] == [TOKENS, TOKENS]
    assert held.get_mask_sizes(7, 1) == (TOKENS + 7, 0)
    assert held.get_max_length() == -1
    assert len(held) == 2
    assert held.is_croppable
    assert not held.is_compileable
    new = ResidentCache(plan_of("llama"), model)
    assert (new.get_seq_length(), new.get_mask_sizes(5, 0)) == (0, (5, 0))
    with attention(model):
        feed(model, held, ids, [1], mask)
    assert held.get_seq_length() == TOKENS + 1


@pytest.mark.parametrize("fused", [False, True])
def test_a_deep_copy_goes_its_own_way(fused: bool) -> None:
    model, held, ids, mask = filled(padding=(0, 40), fused=fused)
    with attention(model, "kvalign" if fused else "sdpa"):
        other = copy.deepcopy(held)
        before = whole(held)
        ours = feed(model, other, ids, (1, 60, 1), mask)
        assert held.get_seq_length() == TOKENS
        assert torch.equal(whole(held), before)
        assert torch.equal(feed(model, held, ids, (1, 60, 1), mask), ours)
        other.crop(-50)
        assert held.get_seq_length() == TOKENS + 62


# ---- bytes


def bytes_by_walking(held: ResidentCache) -> int:
    """Memory behind every tensor and array that can be reached from a cache's layers, plans and configs aside."""
    skipped = {id(layer.state.plan) for layer in held.coded_layers().values()}
    skipped |= {id(group) for layer in held.coded_layers().values() for group in layer.state.plan.groups}
    skipped |= {id(layer._config) for layer in held.coded_layers().values()}
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = list(held.layers)
    while todo:
        thing = todo.pop()
        if id(thing) in seen or id(thing) in skipped:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, np.ndarray):
            while isinstance(thing.base, np.ndarray):
                thing = thing.base
            found.setdefault(thing.ctypes.data, thing.nbytes)
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple):
            todo += thing
        elif hasattr(thing, "__dict__"):
            todo += vars(thing).values()
    found.pop(0, None)
    for layer in held.coded_layers().values():
        for group in layer.state.plan.groups:
            for own in (group.absorbing, group.releasing, group.keys.levels, group.values.levels):
                found.pop(own.data_ptr(), None)
    return sum(found.values())


# Paddings, counts of tokens and tables of the kernel.
SMALL = 8000


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("fused", [False, True])
def test_sizes_are_what_tensors_take(family: str, fused: bool) -> None:
    model, held, ids, mask = filled(3, family=family, fused=fused)
    for step in (None, "step", "select", "repeat"):
        if step == "step":
            with attention(model, "kvalign" if fused else model.config._attn_implementation):
                feed(model, held, ids, (1, 60, 1), mask)
        elif step == "select":
            held.batch_select_indices(torch.tensor([0, 2]))
        elif step == "repeat":
            held.batch_repeat_interleave(3)
        sizes, walked = held.sizes(), bytes_by_walking(held)
        assert sizes.total == sizes.coded + sizes.verbatim + sizes.other
        assert sizes.total <= walked <= sizes.total + SMALL, step
    assert (sizes.other > 0) == (family != "llama")
    assert sizes.tokens == 6 * (TOKENS + 62)
    assert sizes.coded_tokens == 6 * 2 * PAGE_TOKENS


def test_pages_that_were_cut_off_take_no_memory() -> None:
    _, held, _, _ = filled(2)
    held.crop(-TOKENS + 10)
    assert held.sizes().coded == 2 * 2 * 2 * PAGE_TOKENS * (16 + 1)
    assert held.sizes().total <= bytes_by_walking(held) <= held.sizes().total + SMALL


def test_sizes_of_pages_by_hand() -> None:
    _, held, _, _ = filled(2)
    sizes = held.sizes()
    # Layers, kinds, rows, pages, tokens, and for each 2 heads of 8 channels in 8 bits and a scale.
    assert sizes.coded == 2 * 2 * 2 * 2 * PAGE_TOKENS * (16 + 1)
    assert sizes.coded_tokens == 2 * 2 * PAGE_TOKENS
    assert sizes.verbatim == 2 * 2 * 2 * (4 + 16 + PAGE_TOKENS) * 16 * 2
    assert sizes.other == 0


# ---- faults that are known


def test_a_deep_copy_follows_the_models_attention() -> None:
    model, held, ids, mask = filled(fused=True)
    with attention(model):
        other = copy.deepcopy(held)
    assert torch.equal(feed(model, other, ids, [1], mask), feed(model, held, ids, [1], mask))


def without_a_mask(model: Any, held: ResidentCache, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    with torch.no_grad(), attention(model):
        return model(ids, **{cache_argument(model): held}, position_ids=positions, use_cache=True).logits


def test_a_reset_cache_knows_nothing_of_the_padding_before() -> None:
    model, held, ids, _ = filled(padding=(0, 170))
    held.reset()
    new = ResidentCache(plan_of("llama"), model)
    for span in (slice(300), slice(300, 301)):
        again = without_a_mask(model, held, ids[:, span])
        assert relative(again, without_a_mask(model, new, ids[:, span])) < EXACT


def test_padding_follows_its_rows_where_no_mask_says_it_again() -> None:
    model, held, _, _ = filled(padding=(0, 170))
    held.reorder_cache(torch.tensor([1, 0]))
    without_a_mask(model, held, random_ids(2, 1), torch.tensor([[TOKENS - 170], [TOKENS]]))
    assert held.coded_layers()[0].state.padding.tolist() == [170, 0]


def test_a_step_outside_no_grad() -> None:
    model = fresh("llama").requires_grad_(True)
    held = ResidentCache(plan_of("llama"), model)
    ids = random_ids(1, 301)
    with attention(model):
        for span in (slice(300), slice(300, 301)):
            model(ids[:, span], **{cache_argument(model): held}, use_cache=True)
    assert held.get_seq_length() == 301


def test_a_cache_filled_in_inference_mode_goes_on_outside_it() -> None:
    model, ids = model_of("llama"), random_ids(1, 301)
    held = ResidentCache(plan_of("llama"), model)
    with attention(model):
        with torch.inference_mode():
            feed(model, held, ids, [300])
        feed(model, held, ids, [1])
    assert held.get_seq_length() == 301
