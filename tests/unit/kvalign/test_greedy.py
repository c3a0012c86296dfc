"""Greedy continuations of tiny models: what changes nothing agrees to the end, what loses the prefix does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import resident_models
import torch
from synthetic import blank, lossless

from kvalign.capture import layer_tensors, run
from kvalign.evaluate import greedy as module
from kvalign.evaluate.greedy import GreedyResult, attention_for, greedy, measure_greedy
from kvalign.evaluate.protocol import Coder, PreparedWindow, copied, prepare
from kvalign.resident.cache import ResidentCache
from kvalign.text import Window

Models = Callable[[str], Any]


def agreed(model: Any, prepared: list[PreparedWindow], coder: Coder, **settings: int) -> GreedyResult:
    return measure_greedy(model, prepared, {"it": coder}, **settings)["it"]


def windows(count: int, prefix: int = 60) -> list[Window]:
    ids = resident_models.random_ids(count, prefix + 8, seed=5)
    return [Window("noise", row[:prefix], row[prefix:]) for row in ids]


def prepared_for(model: Any, count: int = 3, prefix: int = 60) -> list[PreparedWindow]:
    return list(prepare(model, windows(count, prefix)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "cohere"])
def test_a_lossless_coder_agrees_to_the_end_and_a_blank_one_does_not(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    prepared = prepared_for(model)
    found = agreed(model, prepared, lossless, new_tokens=24)
    assert found == GreedyResult(24, (24, 24, 24))
    assert (found.mean, found.identical) == (24.0, 1.0)
    lost = agreed(model, prepared, blank, new_tokens=24)
    assert lost.mean < 12
    assert lost.identical < 1


def test_tokens_are_those_of_reading_the_whole_text_again(tiny_model: Models) -> None:
    model = tiny_model("llama")
    (prepared,) = prepared_for(model, 1)
    first = prepared.window.continuation[:1]
    found = greedy(model, copied(prepared.cache), first[None], 12)
    assert found.shape == (1, 12)
    assert found.dtype == torch.int64
    text = torch.cat([prepared.window.prefix, first])
    for token in found[0]:
        with torch.no_grad():
            assert run(model, text[None])[0][0, -1].argmax() == token
        text = torch.cat([text, token[None]])


def test_windows_read_on_together_and_one_by_one_say_the_same(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    prepared = prepared_for(model)
    firsts = torch.stack([window.window.continuation[:1] for window in prepared])
    rows: list[int] = []

    def counted(model: Any, cache: Any, first: torch.Tensor, new_tokens: int) -> torch.Tensor:
        rows.append(first.shape[0])
        return greedy(model, cache, first, new_tokens)

    monkeypatch.setattr(module, "greedy", counted)
    together = module._continued(model, [copied(window.cache) for window in prepared], firsts, 20)
    assert rows == [3]
    single = [module._continued(model, [copied(w.cache)], firsts[i : i + 1], 20) for i, w in enumerate(prepared)]
    assert torch.equal(together, torch.cat(single))
    assert len({tuple(row) for row in together.tolist()}) == 3


def test_caches_of_another_length_are_read_on_one_by_one(tiny_model: Models) -> None:
    model = tiny_model("llama")
    lengths = (60, 50)
    prepared = [prepared_for(model, 1, length)[0] for length in lengths]
    assert agreed(model, prepared, lossless, new_tokens=8).agreeing == (8, 8)


def test_what_agrees_ends_at_the_first_difference() -> None:
    plain = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    coded = torch.tensor([[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 9, 4]])
    result = GreedyResult(4, module._agreeing(plain, coded))
    assert result.agreeing == (4, 0, 2)
    assert result.mean == 2.0
    assert result.identical == pytest.approx(1 / 3)


def test_measuring_leaves_the_windows_as_they_were(tiny_model: Models) -> None:
    """Even by a coder that hands over the very cache it was given."""
    model = tiny_model("llama")
    prepared = prepared_for(model, 2)
    before = [copied(window.cache) for window in prepared]
    for _ in range(2):
        assert agreed(model, prepared, lambda window: window.cache, new_tokens=8).identical == 1
    for cache, window in zip(before, prepared, strict=True):
        for (a, b), (c, d) in zip(layer_tensors(cache), layer_tensors(window.cache), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)


def test_a_model_is_not_led_beyond_its_positions(tiny_model: Models) -> None:
    """gpt2 has no embedding for the position behind its last."""
    model = tiny_model("gpt2")
    found = agreed(model, prepared_for(model, 2, prefix=240), lossless, new_tokens=64)
    assert found == GreedyResult(16, (16, 16))


def test_a_resident_cache_is_read_as_codes_one_window_at_a_time() -> None:
    model, plan = resident_models.model_of("llama"), resident_models.plan_of("llama")
    prepared = prepared_for(model, 2, prefix=150)
    usual = model.config._attn_implementation
    left: list[ResidentCache] = []

    def resident(prepared: PreparedWindow) -> ResidentCache:
        cache = ResidentCache(plan, model)
        with torch.no_grad(), attention_for(model, cache):
            run(model, prepared.window.prefix[None], cache, logits_to_keep=1)
        left.append(cache)
        return cache

    found = agreed(model, prepared, resident, new_tokens=12)
    assert model.config._attn_implementation == usual
    assert len(left) == 2
    assert all(sum(cache.counters.fused.values()) >= 12 * len(cache.coded_layers()) for cache in left)
    assert all(cache.get_seq_length() == 150 + 12 for cache in left)
    assert found.mean > agreed(model, prepared, blank, new_tokens=12).mean


def test_the_token_read_first_is_the_continuations(tiny_model: Models) -> None:
    model = tiny_model("llama")
    (window,) = prepared_for(model, 1)
    other = replace(window, window=replace(window.window, continuation=window.window.continuation.flip(0)))
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(int(args[0][0, 0])))
    try:
        for each in (window, other):
            seen.clear()
            agreed(model, [each], lossless, new_tokens=3)
            assert seen[0] == seen[3] == each.window.continuation[0]
            assert len(seen) == 6
    finally:
        handle.remove()
