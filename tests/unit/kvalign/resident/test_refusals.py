"""What a resident cache and its attention cannot do is refused by name, before anything is produced."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from resident_models import attention, feed, fresh, model_of, plan_of, random_ids, relative
from resident_plans import layer_plan
from transformers import DynamicCache

from kvalign.capture import cache_argument
from kvalign.errors import ConfigInvalid, SourceUnsupported
from kvalign.resident import interface
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import attention as attend


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    interface.register()


@pytest.fixture
def llama() -> Any:
    return model_of("llama")


@pytest.fixture
def held(llama: Any) -> ResidentCache:
    return ResidentCache(plan_of("llama"), llama)


def one_pass(model: Any, held: ResidentCache, tokens: int = 30, **given: Any) -> Any:
    with torch.no_grad():
        return model(random_ids(2, tokens), **{cache_argument(model): held}, use_cache=True, **given).logits


# ---- of another model


@pytest.mark.parametrize("implementation", ["sdpa", "kvalign"])
def test_a_model_that_has_a_cache_of_its_own(llama: Any, held: ResidentCache, implementation: str) -> None:
    other = fresh("llama", seed=3)
    ResidentCache(plan_of("llama"), other)
    with attention(other, implementation), attention(llama, implementation):
        with pytest.raises(ConfigInvalid, match="made for another model than this LlamaModel"):
            one_pass(other, held)
        assert [layer.get_seq_length() for layer in held.layers] == [0, 0]
        one_pass(llama, held)  # its own is still welcome
        with pytest.raises(ConfigInvalid, match="made for another model"):
            one_pass(other, held, 1)
    assert held.get_seq_length() == 30


@pytest.mark.parametrize("implementation", ["sdpa", "kvalign"])
def test_a_model_that_has_none(llama: Any, held: ResidentCache, implementation: str) -> None:
    other = fresh("llama", seed=3)
    with attention(other, implementation), attention(llama, implementation):
        with pytest.raises(ConfigInvalid, match="a model that it was not made for"):
            one_pass(other, held)
        assert [layer.get_seq_length() for layer in held.layers] == [0, 0]
        one_pass(llama, held)
        with pytest.raises(ConfigInvalid, match="a model that it was not made for"):
            one_pass(other, held, 1)
    assert held.get_seq_length() == 30


def test_generation_with_another_model(held: ResidentCache) -> None:
    other = fresh("llama", seed=3)
    with attention(other), pytest.raises(ConfigInvalid, match="not made for"):
        other.generate(random_ids(1, 20), **{cache_argument(other): held}, max_new_tokens=2)


def test_a_model_of_another_kind(held: ResidentCache) -> None:
    other = fresh("gpt2")
    with attention(other), pytest.raises(ConfigInvalid, match="not made for"):
        one_pass(other, held)


def test_a_copy_of_the_model_is_another_model(held: ResidentCache, llama: Any) -> None:
    other = copy.deepcopy(llama)
    with attention(other):
        with pytest.raises(ConfigInvalid, match="another model"):
            one_pass(other, held)
        own = one_pass(other, ResidentCache(plan_of("llama"), other))
    with attention(llama):
        assert relative(one_pass(llama, held), own) < 1e-5


def test_a_model_that_is_gone(llama: Any) -> None:
    first = fresh("llama", seed=3)
    held = ResidentCache(plan_of("llama"), first)
    del first
    with attention(llama), pytest.raises(ConfigInvalid):
        one_pass(llama, held)


def test_passes_without_our_cache_are_nobodys_business(llama: Any, held: ResidentCache) -> None:
    ids = random_ids(2, 200)
    plain = feed(llama, DynamicCache(config=llama.config), ids, (150, 1, 40))
    with attention(llama):
        ours = feed(llama, DynamicCache(config=llama.config), ids, (150, 1, 40))
        with torch.no_grad():
            without = llama(ids[:, :191], use_cache=False).logits
    assert relative(ours, plain) < 1e-4
    assert relative(without, plain) < 1e-4
    assert held.counters.fused == {}


# ---- plans


def test_a_plan_that_lacks_a_layer(llama: Any) -> None:
    whole = plan_of("llama")
    with pytest.raises(ConfigInvalid, match=r"resident form for layers \[0\].*full attention in \[0, 1\]"):
        ResidentCache(replace(whole, layers={0: whole.layers[0]}), llama)


def test_a_plan_of_more_layers_than_are_coded_will_do() -> None:
    model, plan = model_of("gemma3"), plan_of("gemma3")
    held = ResidentCache(replace(plan, layers={**plan.layers, 0: plan.layers[1]}), model)
    assert sorted(held.coded_layers()) == [1, 3]


@pytest.mark.parametrize(
    ("shape", "found"),
    [((4, 8, 8), "(4, 8) and (4, 8)"), ((2, 16, 8), "(2, 16) and (2, 8)"), ((2, 8, 4), "(2, 8) and (2, 4)")],
)
def test_a_plan_of_other_heads(llama: Any, shape: tuple[int, int, int], found: str) -> None:
    plan = replace(plan_of("llama"), layers={index: layer_plan(*shape) for index in range(2)})
    held = ResidentCache(plan, llama)
    with attention(llama), pytest.raises(ConfigInvalid, match="KV heads, width") as refused:
        one_pass(llama, held)
    assert found in str(refused.value)
    assert held.get_seq_length() == 0


def test_an_unknown_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "crystal_ball"], raising=False)
    with pytest.raises(SourceUnsupported, match="Layer 1 is of type 'crystal_ball'"):
        ResidentCache(plan_of("llama"), model)


# ---- latent keys


def test_latent_keys_with_our_attention() -> None:
    model = fresh("deepseek_v3")
    with attention(model), pytest.raises(SourceUnsupported, match="latent keys \\(MLA\\)"):
        ResidentCache(plan_of("deepseek_v3"), model)
    assert len(ResidentCache(plan_of("deepseek_v3"), model)) == 2  # with its own attention it is welcome


def test_latent_keys_with_our_attention_chosen_later() -> None:
    model = fresh("deepseek_v3")
    held = ResidentCache(plan_of("deepseek_v3"), model)
    one_pass(model, held)
    with attention(model), pytest.raises(SourceUnsupported, match="latent keys \\(MLA\\)"):
        one_pass(model, held, 1)
    assert [layer.get_seq_length() for layer in held.layers] == [30, 30]


# ---- what attention is given


def test_arguments_of_unknown_meaning(llama: Any, held: ResidentCache) -> None:
    with attention(llama), pytest.raises(SourceUnsupported, match="'position_bias'"):
        one_pass(llama, held, position_bias=torch.zeros(1))
    with attention(llama), pytest.raises(SourceUnsupported, match="'some_new_thing'"):
        one_pass(llama, DynamicCache(config=llama.config), some_new_thing=1.5)  # on tensors too


def test_arguments_that_say_nothing_are_let_through(llama: Any, held: ResidentCache) -> None:
    with attention(llama):
        plain = one_pass(llama, held)
        held.reset()
        assert torch.equal(one_pass(llama, held, position_bias=None, output_hidden_states=True), plain)


@pytest.mark.parametrize("tokens", [30, 1])
def test_attention_weights(llama: Any, held: ResidentCache, tokens: int) -> None:
    with attention(llama):
        one_pass(llama, held)
        with pytest.raises(ConfigInvalid, match="Attention weights were asked for"):
            one_pass(llama, held, tokens, output_attentions=True)


def test_attention_weights_of_generation(llama: Any, held: ResidentCache) -> None:
    with attention(llama), pytest.raises(ConfigInvalid, match="Attention weights were asked for"):
        llama.generate(
            random_ids(1, 20),
            **{cache_argument(llama): held},
            max_new_tokens=2,
            output_attentions=True,
            return_dict_in_generate=True,
        )


def test_attention_weights_are_there_with_eager_attention(llama: Any, held: ResidentCache) -> None:
    with attention(llama, "eager"), torch.no_grad():
        given = {cache_argument(llama): held, "output_attentions": True, "use_cache": True}
        found = llama(random_ids(2, 30), **given).attentions
    assert [tuple(weights.shape) for weights in found] == [(2, 4, 30, 30)] * 2


@pytest.mark.parametrize("tokens", [30, 1])
def test_dropout_in_training(tokens: int) -> None:
    model = fresh("llama", attention_dropout=0.1)
    held = ResidentCache(plan_of("llama"), model)
    with attention(model):
        one_pass(model, held)  # in eval mode it is none
        model.train()
        with pytest.raises(ConfigInvalid, match=r"dropout 0\.1"):
            one_pass(model, held, tokens)
    still = fresh("llama").train()  # none to drop
    with attention(still):
        one_pass(still, ResidentCache(plan_of("llama"), still))


def test_a_window_where_attention_is_full(llama: Any, held: ResidentCache) -> None:
    layer = held.coded_layers()[0]
    held.begin(llama.model, None)
    with attention(llama):
        keys, values = layer.update(torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8))
        with pytest.raises(SourceUnsupported, match="a sliding window of 64"):
            attend(llama.model.layers[0].self_attn, torch.randn(2, 4, 5, 8), keys, values, None, sliding_window=64)


# ---- batches


@pytest.mark.parametrize("implementation", ["sdpa", "kvalign"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_of_other_rows(llama: Any, held: ResidentCache, rows: int, implementation: str) -> None:
    with attention(llama, implementation):
        feed(llama, held, random_ids(2, 40), [30])
        with pytest.raises(ConfigInvalid, match=f"holds 2 rows; the new tokens have {rows}"):
            feed(llama, held, random_ids(rows, 40), [1])
        assert [layer.get_seq_length() for layer in held.layers] == [30, 30]
        feed(llama, held, random_ids(2, 40), [1])
    assert held.get_seq_length() == 31


# ---- after a refusal


@pytest.mark.parametrize("given", [{"position_bias": torch.zeros(1)}, {"output_attentions": True}])
def test_a_pass_refused_midway_bars_the_cache_until_it_is_reset(llama: Any, held: ResidentCache, given: Any) -> None:
    with attention(llama):
        one_pass(llama, held)
        with pytest.raises((ConfigInvalid, SourceUnsupported)):
            one_pass(llama, held, 5, **given)
        with pytest.raises(ConfigInvalid, match="ended midway"):
            one_pass(llama, held)
        held.reset()
        one_pass(llama, held)
    assert [layer.get_seq_length() for layer in held.layers] == [30, 30]


def test_a_model_refused_midway_bars_the_cache_until_it_is_reset() -> None:
    held, other = ResidentCache(plan_of("gemma3"), model_of("gemma3")), fresh("gemma3", seed=3)
    with attention(other), pytest.raises(ConfigInvalid, match="not made for"):
        one_pass(other, held)
    with pytest.raises(ConfigInvalid, match="ended midway"):
        one_pass(model_of("gemma3"), held)
    held.reset()
    one_pass(model_of("gemma3"), held)
    assert [layer.get_seq_length() for layer in held.layers] == [30] * 4
