"""The last queries of a model, and the attention they give, against the model's own eager attention."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from transformers import AttentionInterface

from kvalign.capture import layer_tensors, run
from kvalign.watch import KEPT_QUERIES, Watched, watch

Models = Callable[[str], Any]


def some_tokens(rows: int, count: int) -> Tensor:
    return torch.randint(256, (rows, count), generator=torch.Generator().manual_seed(0))


def attention_of(family: str, tokens: Tensor) -> tuple[Tensor, ...]:
    """[B, QH, T, T] of each layer, as the model's eager attention gives it."""
    model = tiny_models.build(family)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return tuple(model(tokens, output_attentions=True).attentions)


@pytest.mark.parametrize("count", [1, 20, KEPT_QUERIES, KEPT_QUERIES + 1, 150])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "phi"])
def test_received_attention_is_the_models_own(tiny_model: Models, family: str, count: int) -> None:
    model, tokens = tiny_model(family), some_tokens(2, count)
    with torch.no_grad(), watch(model) as watched:
        _, cache = run(model, tokens)
    for layer, wanted in enumerate(attention_of(family, tokens)):
        keys = layer_tensors(cache)[layer][0]
        for row in (0, 1):
            found = watched.attention(layer, keys, row, 0)
            assert found is not None
            last = wanted[row, :, -KEPT_QUERIES:]
            torch.testing.assert_close(found, last.square().mean(dim=(0, 1)), rtol=1e-3, atol=1e-6)


def test_logits_are_those_of_the_model_unwatched(tiny_model: Models) -> None:
    model, tokens = tiny_model("llama"), some_tokens(1, 30)
    with torch.no_grad():
        plain, _ = run(model, tokens)
        with watch(model):
            watched, _ = run(model, tokens)
    assert torch.equal(plain, watched)


def test_queries_of_several_passes_join(tiny_model: Models) -> None:
    model, tokens = tiny_model("llama"), some_tokens(1, 100)
    found = []
    for cuts in ([100], [70, 30], [5, 90, 5], [99, 1]):
        with torch.no_grad(), watch(model) as watched:
            cache = None
            for part in tokens.split(cuts, dim=1):
                _, cache = run(model, part, cache)
        found.append(watched.attention(1, layer_tensors(cache)[1][0], 0, 0))
    for other in found[1:]:
        assert found[0] is not None
        assert other is not None
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-7)


def test_padding_receives_nothing_and_changes_nothing(tiny_model: Models) -> None:
    model, tokens = tiny_model("llama"), some_tokens(1, 80)
    padded = torch.cat([torch.zeros(1, 9, dtype=torch.int64), tokens], dim=1)
    mask = torch.tensor([[0] * 9 + [1] * 80])
    with torch.no_grad(), watch(model) as watched:
        _, cache = run(model, tokens)
    with torch.no_grad(), watch(model) as padded_watched:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        _, padded_cache = run(model, padded, attention_mask=mask, position_ids=positions)
    wanted = watched.attention(0, layer_tensors(cache)[0][0], 0, 0)
    found = padded_watched.attention(0, layer_tensors(padded_cache)[0][0], 0, 9)
    assert found is not None
    assert wanted is not None
    assert not found[:9].any()
    torch.testing.assert_close(found[9:], wanted, rtol=1e-3, atol=1e-6)


def test_nothing_is_left_behind(tiny_model: Models) -> None:
    model = tiny_model("llama")
    before = set(AttentionInterface._global_mapping)

    def fail() -> None:
        with watch(model):
            raise RuntimeError("stopped inside")

    with pytest.raises(RuntimeError, match="stopped inside"):
        fail()
    assert set(AttentionInterface._global_mapping) == before
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_inputs_are_what_enters_one_layers_attention(tiny_model: Models, family: str, layer: int) -> None:
    model, tokens = tiny_model(family), some_tokens(2, 30)
    entered: list[Tensor] = []
    norms = [model.model.layers[layer].input_layernorm] if family != "gpt2" else [model.transformer.h[layer].ln_1]
    handles = [norm.register_forward_hook(lambda module, args, out: entered.append(out)) for norm in norms]
    with torch.no_grad(), watch(model, layer) as watched:
        _, cache = run(model, tokens[:, :20])
        run(model, tokens[:, 20:], cache)
    for handle in handles:
        handle.remove()
    assert [found.shape for found in watched.inputs] == [(2, 20, 32), (2, 10, 32)]
    for row in (0, 1):
        features = watched.features(row, 3, tokens[row, 3:])
        assert features is not None
        assert torch.equal(features, torch.cat(entered, dim=1)[row, 3:])


def test_inputs_are_kept_only_where_they_are_asked_for(tiny_model: Models) -> None:
    model = tiny_model("llama")
    for layer in (-1, 2, 99):
        with torch.no_grad(), watch(model, layer) as watched:
            run(model, some_tokens(1, 5))
        assert watched.inputs == []
        assert watched.features(0, 0, some_tokens(1, 5)[0]) is None
        assert watched
    before = [len(module._forward_pre_hooks) for module in model.modules()]
    with watch(model, 1):
        assert [len(module._forward_pre_hooks) for module in model.modules()] != before
    assert [len(module._forward_pre_hooks) for module in model.modules()] == before


def test_other_implementations_are_left_alone() -> None:
    model = tiny_models.build("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad(), watch(model) as watched:
        run(model, some_tokens(1, 5))
    assert not watched
    assert model.config._attn_implementation == "eager"


def test_layers_that_were_not_watched_are_told_apart() -> None:
    watched = Watched()
    assert not watched
    watched.record(1, torch.randn(1, 2, 5, 4), None)
    assert watched
    assert watched.attention(0, torch.randn(1, 1, 5, 4), 0, 0) is None
    assert watched.attention(1, torch.randn(1, 1, 5, 4), 0, 0) is not None
