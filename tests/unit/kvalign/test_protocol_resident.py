"""Protocol C: teacher forcing through a compressed cache, and what it says of the kernel that ran."""

from dataclasses import replace
from typing import Any

import pytest
import tiny_models
import torch
from synthetic import fitted_to
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvalign.accounting import (
    ResidentSizes,
    merged,
    projected_resident_ratio,
    resident_cache_ratio,
    resident_coded_ratio,
)
from kvalign.capture import run
from kvalign.evaluate import resident as protocol
from kvalign.evaluate.resident import ResidentResult, first_scored, forced_logits, kernel_error, measure_resident
from kvalign.resident.interface import fused_attention
from kvalign.resident.plan import ResidentPlan
from kvalign.text import Window


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


def plan_of(model: Any, bits: float) -> ResidentPlan:
    plan = fitted_to(model, resident_bits=bits).resident_plan
    assert plan is not None
    return plan


def windows(count: int = 2, tokens: int = 240) -> list[Window]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(count):
        ids = torch.randint(256, (tokens,), generator=generator)
        found.append(Window("ab"[index % 2], ids[: tokens * 3 // 4], ids[tokens * 3 // 4 :]))
    return found


def test_chunks_and_single_tokens_give_the_logits_of_one_pass(model: Any) -> None:
    tokens = windows(1)[0].prefix
    with torch.no_grad():
        whole = run(model, tokens[None])[0][0, :-1]
    assert torch.allclose(forced_logits(model, DynamicCache(), tokens), whole, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "recent", "first"),
    [(1024, 64, 256), (1024, 0, 128), (1024, 200, 384), (240, 3, 207), (100, 64, 98), (1024, 2000, 128)],
)
def test_scores_begin_with_the_first_page_of_codes(tokens: int, recent: int, first: int) -> None:
    assert first_scored(tokens, recent) == first


def test_every_token_behind_the_first_page_is_scored(model: Any) -> None:
    plan = plan_of(model, 8.0)
    found = measure_resident(model, plan, windows(2, 240))
    first = first_scored(240, plan.recent_tokens)
    assert found.positions.first == first
    assert found.summary.tokens == 2 * (240 - 1 - first)
    assert min(found.positions.mean) > 0, "a token that saw nothing coded has no KL"
    assert set(found.domains) == {"a", "b"}
    assert found.floor_kl < 1e-6


def test_fewer_bits_are_smaller_and_further_off(model: Any) -> None:
    coarse, fine = (measure_resident(model, plan_of(model, bits), windows()) for bits in (3.0, 8.0))
    assert 5 * fine.summary.kl_mean < coarse.summary.kl_mean
    assert fine.coded_ratio < 3 < coarse.coded_ratio
    assert fine.coded_ratio == pytest.approx(16 / fine.bits_per_value)


def test_the_kernel_that_ran_is_named_and_held_to_plain_attention(model: Any) -> None:
    found = measure_resident(model, plan_of(model, 4.0), windows())
    assert found.kernels["numba"] > 0
    assert found.kernels["tiled"] > 0
    assert found.dense_layers == 0
    assert found.kernel_error is not None
    assert 0 < found.kernel_error < 1e-4
    assert found.kernel_holds
    assert not replace(found, kernel_error=2e-4).kernel_holds


def test_a_kernel_that_is_off_is_noticed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ids = plan_of(model, 4.0), windows()[0].prefix
    from kvalign.resident.cache import ResidentCache

    cache = ResidentCache(plan, model)
    with fused_attention(model):
        forced_logits(model, cache, ids)
    right = protocol.attend
    monkeypatch.setattr(protocol, "attend", lambda *args, **kwargs: right(*args, **kwargs) * 1.001)
    error = kernel_error(cache)
    assert error is not None
    assert error > 5e-4


def test_a_model_without_the_interface_is_measured_uncompressed_a_layer_at_a_time() -> None:
    settings = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("falcon", **settings, new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    config.max_position_embeddings = 256
    falcon = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    found = measure_resident(falcon, plan_of(falcon, 8.0), windows(1))
    assert found.dense_layers > 0
    assert "numba" not in found.kernels
    assert found.summary.kl_mean < 1e-3


def test_a_result_goes_through_json(model: Any) -> None:
    from dataclasses import asdict

    found = measure_resident(model, plan_of(model, 4.0), windows())
    assert ResidentResult.from_json(asdict(found)) == found


def test_resident_rates_count_what_they_say() -> None:
    sizes = ResidentSizes(coded=500, verbatim=300, other=1000, coded_tokens=10, tokens=16)
    assert sizes.total == 1800
    assert resident_coded_ratio(100, sizes) == pytest.approx(2 * 100 * 10 / 500)
    assert resident_cache_ratio(100, sizes) == pytest.approx(2 * 100 * 16 / 800)
    assert merged([sizes, sizes]) == ResidentSizes(1000, 600, 2000, 20, 32)
    assert projected_resident_ratio(100, 4.0, 1_000_000, 100) == pytest.approx(4, rel=1e-3)
    assert projected_resident_ratio(100, 4.0, 100, 200) == 1
