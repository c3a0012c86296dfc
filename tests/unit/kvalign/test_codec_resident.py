"""The codec's resident form: caches for a model, from bytes and to bytes, and what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from synthetic import fitted_to, made_up_resident
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvalign.artifact import CONFIG_NAME, TENSORS_NAME, Artifact, load_artifact
from kvalign.capture import cache_argument, layer_tensors, run
from kvalign.errors import ArtifactInvalid, ConfigInvalid
from kvalign.resident.cache import ResidentCache, same_weights, uncompressed
from kvalign.resident.interface import fused_attention
from kvalign.watch import watch

Models = Callable[[str], Any]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.build("llama")


@pytest.fixture(scope="module")
def fine(model: Any) -> Artifact:
    """Eight bits a number: what is lost is rounding."""
    return fitted_to(model, resident_bits=8.0)


def some_ids(rows: int, tokens: int, seed: int = 3) -> Tensor:
    return torch.randint(256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    """Logits of the last token."""
    own = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return run(model, ids, cache, attention_mask=mask, position_ids=own, logits_to_keep=1)[0][:, -1]


def kl(exact: Tensor, measured: Tensor) -> float:
    """Largest of the rows'."""
    p, q = exact.log_softmax(-1), measured.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).max())


def test_a_model_generates_from_a_resident_cache(model: Any, fine: Artifact) -> None:
    ids, cache = some_ids(1, 180), fine.codec(model).cache()
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 257}
    with fused_attention(model):
        found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **{cache_argument(model): cache})
    assert found.shape[1] == 192
    assert cache.get_seq_length() == 191
    exact, measured = DynamicCache(), fine.codec(model).cache()
    for start, end in [(0, 180), *((at, at + 1) for at in range(180, 191))]:
        wanted = read(model, found[:, start:end], exact)
        with fused_attention(model):
            assert kl(wanted, read(model, found[:, start:end], measured)) < 2e-3
    assert cache.counters.fused["numba"] > 0
    assert cache.counters.dense == 0


def test_bytes_become_a_resident_cache_that_goes_on(model: Any, fine: Artifact) -> None:
    ids, codec = some_ids(1, 200), fine.codec(model)
    cache = DynamicCache()
    exact = read(model, ids, cache)
    assert exact.shape == (1, 258)
    data = codec.encode(cache, input_ids=ids, step=-400)
    restored = codec.decode(data)
    assert isinstance(restored, ResidentCache)
    assert restored.get_seq_length() == 200
    assert restored.coded_layers()[0].state.coded_tokens == 128
    more = some_ids(1, 5, seed=4)
    with fused_attention(model):
        measured = read(model, more, restored)
    assert kl(read(model, more, cache), measured) < 1e-3


def test_padding_comes_back_from_bytes(model: Any, fine: Artifact) -> None:
    ids, codec = some_ids(2, 200), fine.codec(model)
    mask = torch.ones_like(ids)
    mask[1, :150] = 0
    cache = DynamicCache()
    read(model, ids, cache, mask)
    restored = codec.decode(codec.encode(cache, input_ids=ids, attention_mask=mask, step=-400))
    assert restored.coded_layers()[0].state.padding.tolist() == [0, 150]
    more = some_ids(2, 1, seed=4)
    grown = torch.cat([mask, torch.ones_like(more)], dim=1)
    with fused_attention(model):
        measured = read(model, more, restored, grown)
    assert kl(read(model, more, cache, grown), measured) < 1e-3


def test_a_resident_cache_becomes_bytes(model: Any, fine: Artifact) -> None:
    ids, codec = some_ids(1, 200), fine.codec(model)
    plain, coded = DynamicCache(), codec.cache()
    read(model, ids, plain)
    with fused_attention(model):
        read(model, ids, coded)
    from_plain, from_coded = (codec.decode_dense(codec.encode(c, input_ids=ids, step=-300)) for c in (plain, coded))
    for a, b in zip(layer_tensors(from_plain), layer_tensors(from_coded), strict=True):
        for x, y in zip(a, b, strict=True):
            assert float((x - y).norm() / x.norm()) < 0.05


def test_ids_that_a_resident_cache_does_not_come_from_are_refused(model: Any, fine: Artifact) -> None:
    ids, codec = some_ids(1, 200), fine.codec(model)
    cache = codec.cache()
    read(model, ids, cache)
    other = ids.clone()
    other[0, 150] = (other[0, 150] + 1) % 256
    with pytest.raises(ConfigInvalid, match="was not made from these input_ids"):
        codec.encode(cache, input_ids=other)


def test_a_wrong_token_shows_even_at_few_bits(model: Any) -> None:
    codec = fitted_to(model, resident_bits=3.0).codec(model)
    ids = some_ids(1, 200)
    cache = codec.cache()
    read(model, ids, cache)
    assert codec.encode(cache, input_ids=ids)
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 128) % 256
    with pytest.raises(ConfigInvalid, match="was not made from these input_ids"):
        codec.encode(cache, input_ids=other)


def test_queries_are_watched_while_attention_reads_codes(model: Any, fine: Artifact) -> None:
    ids = some_ids(1, 160)
    cache = fine.codec(model).cache()
    with fused_attention(model):
        with watch(model) as coded:
            read(model, ids, cache)
        assert cache.counters.dense == 0
        with watch(model) as bare:
            read(model, ids, DynamicCache())
    found, wanted = coded.queries(1), bare.queries(1)
    assert found is not None
    assert wanted is not None
    assert torch.allclose(found[0], wanted[0], atol=1e-5)


def test_sliding_layers_are_left_as_they_are(fine: Artifact) -> None:
    settings = tiny_models.FAMILIES["llama"][1] | {
        "head_dim": 8,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    torch.manual_seed(0)
    hybrid = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **settings)).eval()
    hybrid.requires_grad_(False)
    artifact = fitted_to(hybrid, resident_bits=8.0)
    assert artifact.resident is not None
    assert list(artifact.resident.layers) == [1]
    codec, ids = artifact.codec(hybrid), some_ids(1, 200)
    every, own = DynamicCache(), DynamicCache(config=hybrid.config)
    read(hybrid, ids, every)
    read(hybrid, ids, own)
    restored = codec.decode(codec.encode(every, input_ids=ids, step=-400))
    assert restored.get_seq_length() == own.get_seq_length() == 200
    more = some_ids(1, 3, seed=5)
    with fused_attention(hybrid):
        measured = read(hybrid, more, restored)
    assert kl(read(hybrid, more, own), measured) < 1e-3
    with pytest.raises(ConfigInvalid, match=r"Layer 0 .* does not hold all 203 tokens"):
        codec.encode(restored, input_ids=torch.cat([ids, more], dim=1))


def test_what_is_uncompressed_is_in_the_dtype_that_was_read(model: Any, fine: Artifact) -> None:
    cache = fine.codec(model).cache()
    read(model, some_ids(1, 150), cache)
    plain = uncompressed(cache)
    assert {x.dtype for pair in layer_tensors(plain) for x in pair} == {torch.float32}
    assert plain.get_seq_length() == 150


# ---- refusals


def test_a_codec_without_a_resident_form_says_so(model: Any, fine: Artifact) -> None:
    with pytest.raises(ConfigInvalid, match="no resident form"):
        replace(fine, resident=None).codec(model).cache()


def test_a_codec_without_a_model_says_so(fine: Artifact) -> None:
    with pytest.raises(ConfigInvalid, match="given no model"):
        fine.codec().cache()


def test_another_revision_of_the_model_is_refused(model: Any, fine: Artifact) -> None:
    tuned = tiny_models.build("llama")
    assert same_weights(tuned, model)
    assert fine.codec(model).cache(tuned).get_seq_length() == 0
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight += 0.05
    assert not same_weights(tuned, model)
    with pytest.raises(ConfigInvalid, match="holds other weights"):
        fine.codec(model).cache(tuned)


def test_a_model_of_other_shape_is_refused(model: Any, fine: Artifact) -> None:
    with pytest.raises(ConfigInvalid, match="other weights"):
        fine.codec(model).cache(tiny_models.build("qwen2"))


def test_a_cache_that_read_nothing_is_not_encoded(model: Any, fine: Artifact) -> None:
    codec = fine.codec(model)
    with pytest.raises(ConfigInvalid, match="does not hold"):
        codec.encode(codec.cache(), input_ids=some_ids(1, 0))


# ---- the artifact


def test_the_resident_form_is_stored_and_loaded(artifact: Artifact, tmp_path: Path) -> None:
    whole = replace(artifact, resident=made_up_resident(artifact.shape.geometry))
    whole.save(tmp_path)
    loaded = load_artifact(tmp_path)
    assert loaded.codec_id == whole.codec_id != artifact.codec_id
    ours, theirs = whole.resident_plan, loaded.resident_plan
    assert ours is not None
    assert theirs is not None
    assert theirs.bits_per_value == ours.bits_per_value
    for index, layer in ours.layers.items():
        for a, b in zip(layer.groups, theirs.layers[index].groups, strict=True):
            assert torch.equal(a.keys.analysis, b.keys.analysis)
            assert a.values.widths == b.values.widths


def test_a_codebook_that_was_changed_is_noticed(artifact: Artifact, tmp_path: Path) -> None:
    replace(artifact, resident=made_up_resident(artifact.shape.geometry)).save(tmp_path)
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    config["resident"]["books"]["keys"][0][1] *= 1.01
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ArtifactInvalid, match="codec_id"):
        load_artifact(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"basis": "other"},
        {"layers": [99]},
        {"layers": [0.5, "x"]},
        {"books": {"keys": [], "values": []}},
        {"books": {"keys": [[4, -1.0, 0.0]], "values": [[4, 0.3, 0.0]]}},
        {"bits": None},
    ],
)
def test_a_damaged_resident_form_is_refused(artifact: Artifact, tmp_path: Path, damage: dict[str, Any]) -> None:
    replace(artifact, resident=made_up_resident(artifact.shape.geometry)).save(tmp_path)
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    config["resident"] |= damage
    (tmp_path / CONFIG_NAME).write_text(json.dumps(config))
    with pytest.raises(ArtifactInvalid):
        load_artifact(tmp_path)


def test_a_basis_without_an_inverse_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    resident = made_up_resident(artifact.shape.geometry)
    side = resident.layers[0][0].sides["keys"]
    side.rows[1] = side.rows[0]
    replace(artifact, resident=resident).save(tmp_path)
    assert (tmp_path / TENSORS_NAME).exists()
    with pytest.raises(ArtifactInvalid, match="no inverse"):
        load_artifact(tmp_path)
