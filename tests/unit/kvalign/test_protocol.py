"""Protocol R on a tiny model: coders that change nothing cost nothing, those that do are seen."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from transformers import DynamicCache

from kvalign.accounting import PayloadSizes
from kvalign.capture import layer_tensors, run
from kvalign.evaluate.metrics import divergence
from kvalign.evaluate.protocol import FLOOR_LIMIT, PreparedWindow, continuation_logits, prepare, try_coder
from kvalign.text import Window

Models = Callable[[str], Any]
SIZES = PayloadSizes(coded=10, verbatim=0, side_info=0, body_tokens=1, verbatim_tokens=0)


def window(prefix: int = 60, continuation: int = 20, seed: int = 0) -> Window:
    tokens = torch.randint(256, (prefix + continuation,), generator=torch.Generator().manual_seed(seed))
    return Window("noise", tokens[:prefix], tokens[prefix:])


def copied(cache: DynamicCache, change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> DynamicCache:
    result = DynamicCache()
    for index, (keys, values) in enumerate(layer_tensors(cache)):
        result.update(change(keys), change(values), index)
    return result


def identity(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
    return copied(prepared.cache), SIZES


@pytest.fixture
def prepared(tiny_model: Models) -> PreparedWindow:
    (found,) = prepare(tiny_model("llama"), [window()])
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "cohere", "smollm3"])
def test_a_coder_that_changes_nothing_is_at_no_distance(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    (found,) = prepare(model, [window()])
    assert 0 <= found.floor_kl < FLOOR_LIMIT
    trial = try_coder(model, found, identity)
    assert (trial.domain, trial.sizes) == ("noise", SIZES)
    assert trial.divergence.kl.shape == (19,)
    assert trial.divergence.kl.max() < FLOOR_LIMIT
    assert trial.divergence.top1.min() == 1


@pytest.mark.parametrize("strength", [0.01, 0.1, 1.0])
def test_a_coder_that_perturbs_is_seen_in_proportion(
    tiny_model: Models, prepared: PreparedWindow, strength: float
) -> None:
    def perturbing(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        noise = torch.Generator().manual_seed(1)
        return copied(prepared.cache, lambda x: x + strength * x.std() * torch.randn(x.shape, generator=noise)), SIZES

    kl = float(try_coder(tiny_model("llama"), prepared, perturbing).divergence.kl.mean())
    assert 1e-3 * strength**2 < kl < 100 * strength**2


def test_only_the_prefix_is_coded_and_every_scored_token_sees_it(tiny_model: Models, prepared: PreparedWindow) -> None:
    seen: list[int] = []

    def blanking(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        seen.append(prepared.cache.get_seq_length())
        assert prepared.watched
        return copied(prepared.cache, torch.zeros_like), SIZES

    kl = try_coder(tiny_model("llama"), prepared, blanking).divergence.kl
    assert seen == [60]
    assert (kl > FLOOR_LIMIT).all()


def test_the_reference_is_the_model_on_the_whole_text(tiny_model: Models, prepared: PreparedWindow) -> None:
    text = torch.cat([prepared.window.prefix, prepared.window.continuation])
    with torch.no_grad():
        logits, _ = run(tiny_model("llama"), text[None])
    torch.testing.assert_close(prepared.reference, logits[0, 60:-1], rtol=1e-3, atol=1e-3)


def test_targets_are_the_tokens_that_followed(tiny_model: Models, prepared: PreparedWindow) -> None:
    def other(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        return copied(prepared.cache, lambda x: x * 1.05), SIZES

    model = tiny_model("llama")
    with torch.no_grad():
        measured = continuation_logits(model, other(prepared)[0], prepared.window)
    by_hand = divergence(prepared.reference, measured, prepared.window.continuation[1:])
    assert torch.equal(try_coder(model, prepared, other).divergence.nll_delta, by_hand.nll_delta)


def test_scoring_leaves_the_cache_as_it_was(tiny_model: Models, prepared: PreparedWindow) -> None:
    model = tiny_model("llama")
    before = copied(prepared.cache)
    kl = [float(try_coder(model, prepared, identity).divergence.kl.sum()) for _ in range(2)]
    assert kl[0] == kl[1]
    assert prepared.cache.get_seq_length() == 60
    for (a, b), (c, d) in zip(layer_tensors(before), layer_tensors(prepared.cache), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_a_model_that_is_not_the_same_twice_has_a_floor(tiny_model: Models) -> None:
    """Dropout left on: the run is void, and the floor says so."""
    model = tiny_models.build("gpt2").train()
    (found,) = prepare(model, [window()])
    assert found.floor_kl > FLOOR_LIMIT
