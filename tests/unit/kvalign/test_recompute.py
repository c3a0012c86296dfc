"""A model's first layers, run alone on token ids, against whole passes of the model; and what they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign import recompute
from kvalign.capture import CacheShape, layer_tensors, measure_shape, run
from kvalign.geometry import Geometry, LayerGeometry
from kvalign.recompute import FirstLayers, Recomputed, default_count, disagreement, same_tokens, works
from kvalign.rope import NO_ROPE

Models = Callable[[str], Any]

FAMILIES = [family for family in tiny_models.FAMILIES if family != "mamba"]


def some_tokens(count: int, seed: int = 3) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


def whole_pass(model: Any, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return layer_tensors(run(model, tokens[None])[1])


def hooks(model: Any) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("tokens", [1, 30, 200])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_alone_give_what_a_whole_pass_gives(
    tiny_model: Models, family: str, count: int, tokens: int
) -> None:
    model, ids = tiny_model(family), some_tokens(tokens)
    found = FirstLayers(model, count).run(ids)
    assert len(found.layers) == count
    assert found.features.shape == (tokens, 32)
    assert found.features.dtype == torch.float32
    for ours, theirs in zip(found.layers, whole_pass(model, ids), strict=False):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2])
def test_features_are_what_the_last_layers_keys_and_values_come_from(tiny_model: Models, count: int) -> None:
    """gpt2 keeps its values as projected, and its projection shows which input it had."""
    found = FirstLayers(tiny_model("gpt2"), count).run(some_tokens(20))
    with torch.no_grad():
        _, _, values = tiny_model("gpt2").transformer.h[count - 1].attn.c_attn(found.features).chunk(3, dim=-1)
    torch.testing.assert_close(found.layers[-1][1][0].transpose(0, 1).flatten(1), values, rtol=1e-4, atol=1e-5)


def test_no_layer_behind_the_last_wanted_one_is_run(tiny_model: Models) -> None:
    model, seen = tiny_model("smollm3"), []
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.append(module.self_attn.layer_idx))
        for layer in model.model.layers
    ]
    try:
        FirstLayers(model, 2).run(some_tokens(9))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [0, 1]


def test_none_of_the_layers_is_no_work(tiny_model: Models) -> None:
    found = FirstLayers(None, 0).run(some_tokens(7))
    assert found.layers == []
    assert found.features.shape == (7, 0)


def test_nothing_is_left_behind(tiny_model: Models) -> None:
    model = tiny_model("llama")
    before = hooks(model)
    FirstLayers(model, 1).run(some_tokens(5))
    assert hooks(model) == before
    with pytest.raises(IndexError):
        FirstLayers(model, 1).run(torch.tensor([10**6]))
    assert hooks(model) == before
    torch.testing.assert_close(
        whole_pass(model, some_tokens(5))[1], whole_pass(tiny_models.build("llama"), some_tokens(5))[1]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_work_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    assert works(tiny_models.build(family).to(dtype), 1)


def test_vocabulary_is_the_embeddings(tiny_model: Models) -> None:
    assert FirstLayers(tiny_model("llama"), 1).vocabulary == 258


# ---- models that cannot


def test_a_model_whose_attention_is_not_found_cannot(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values would come back, and nothing to predict later layers from."""
    model = tiny_model("llama")
    monkeypatch.setattr("kvalign.watch.attention_module", lambda model, layer: None)
    assert len(FirstLayers(model, 1).run(some_tokens(5)).layers) == 1
    assert not works(model, 1)


def test_a_model_whose_first_layer_does_otherwise_alone_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("llama")
    projection = model.model.layers[0].self_attn.v_proj
    plain, calls = projection.forward, []

    def forward(x: Tensor) -> Tensor:
        calls.append(x)
        return plain(x) * (1.0 if len(calls) == 1 else 1.01)  # type: ignore[no-any-return]

    monkeypatch.setattr(projection, "forward", forward)
    assert not works(model, 1)
    assert len(calls) == 2


def test_a_cache_that_comes_short_of_layers_cannot(tiny_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    assert not works(model, 3)
    monkeypatch.setattr(FirstLayers, "run", lambda self, tokens: Recomputed([], torch.zeros(tokens.numel(), 32)))
    assert not works(model, 1)


# ---- how many


@pytest.mark.parametrize(
    ("layers", "count"), [(1, 0), (2, 1), (4, 1), (14, 1), (16, 2), (30, 3), (32, 3), (64, 6), (126, 13)]
)
def test_one_layer_in_ten_is_recomputed_and_never_all(monkeypatch: pytest.MonkeyPatch, layers: int, count: int) -> None:
    shape = CacheShape(Geometry((LayerGeometry(1, 4, 4),) * layers), (NO_ROPE,) * layers)
    monkeypatch.setattr(recompute, "works", lambda model, wanted: True)
    assert default_count(None, shape) == count
    monkeypatch.setattr(recompute, "works", lambda model, wanted: False)
    assert default_count(None, shape) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_recomputes_its_first_layer_by_default(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    assert default_count(model, measure_shape(model)) == 1


# ---- the same tokens, or others


def test_disagreement_is_the_largest_over_layers_and_kinds() -> None:
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    cached = [(x, x), (x, x), (x, -x)]
    assert disagreement([], cached) == 0
    assert disagreement([(x, x)], cached) == 0
    assert disagreement([(x, x), (x * 1.5, x * 0.9)], cached) == pytest.approx(0.5)
    assert disagreement([(x.half(), x)], cached) == pytest.approx(0, abs=1e-3)
    # A layer of zeros is at a distance from everything but itself.
    assert disagreement([(x, x)], [(x * 0, x)]) > 1
    assert disagreement([(x * 0, x)], [(x * 0, x)]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_other_tokens_are_told_from_rounding(tiny_model: Models, family: str) -> None:
    """A model in bfloat16 has its own ids' cache still, and no other's, nor the same ids in another order."""
    model, ids = tiny_models.build(family).bfloat16(), some_tokens(40)
    cached = whole_pass(tiny_model(family), ids)
    first = FirstLayers(model, 1)
    assert same_tokens(first.run(ids).layers, cached)
    assert not same_tokens(first.run(some_tokens(40, seed=4)).layers, cached)
    assert not same_tokens(first.run(ids.flip(0)).layers, cached)


@pytest.mark.parametrize("at", [0, 1, 120, 199])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_other_token_is_seen_among_many(tiny_model: Models, family: str, at: int) -> None:
    model, ids = tiny_model(family), some_tokens(200)
    cached, other = whole_pass(model, ids), ids.clone()
    other[at] = (other[at] + 1) % 256
    first = FirstLayers(model, 1)
    assert disagreement(first.run(other).layers, cached) < 0.2, "over all tokens it would drown"
    assert not same_tokens(first.run(other).layers, cached)


def test_a_cache_that_grew_by_parts_is_of_the_same_tokens(tiny_model: Models) -> None:
    model, ids, cache = tiny_model("llama"), some_tokens(40), DynamicCache()
    with torch.no_grad():
        for part in ids.split([25, 1, 14]):
            run(model, part[None], cache)
    assert same_tokens(FirstLayers(model, 2).run(ids).layers, layer_tensors(cache))
