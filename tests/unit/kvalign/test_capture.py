"""What is read off a model's cache, against hooks on its own projections, for every kind of rotary position."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvalign.capture import (
    CacheShape,
    capture,
    capture_with_gradients,
    head_tensors,
    layer_tensors,
    load_model,
    load_tokenizer,
    measure_shape,
    run,
    token_matrix,
)
from kvalign.errors import SourceInvalid, SourceUnsupported
from kvalign.geometry import KINDS, Geometry, LayerGeometry
from kvalign.rope import NO_ROPE, Rope
from kvalign.watch import watch

Models = Callable[[str], Any]
Folders = Callable[[str], Path]

ROTARY = ["llama", "llama_linear", "llama_llama3", "llama_yarn", "qwen2", "phi", "cohere", "smollm3"]
FAMILIES = [*ROTARY, "gpt2"]


def some_tokens(count: int, seed: int = 3) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def projections(model: Any, cut: int = 0) -> Iterator[dict[str, list[Tensor]]]:
    """What the key and value projections of each layer put out, before any rotation: [T, H*D] each.

    cut   keep the first tokens' only, as leaves that attention goes on with: what the rest does with them is their grad
    """
    found: dict[str, list[Tensor]] = {"keys": [], "values": []}

    def keep(kind: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Tensor) -> Tensor | None:
            if cut:
                leaf = output[0, :cut].detach().requires_grad_()
                found[kind].append(leaf)
                return torch.cat([leaf[None], output[:, cut:]], dim=1)
            if kind == "fused":  # gpt2: queries, keys and values side by side
                parts = output[0].chunk(3, dim=-1)
                found["keys"].append(parts[1])
                found["values"].append(parts[2])
            else:
                found[kind].append(output[0])
            return None

        return hook

    names = {"k_proj": "keys", "v_proj": "values", "c_attn": "fused"}
    handles = [
        module.register_forward_hook(keep(names[name.split(".")[-1]]))
        for name, module in model.named_modules()
        if name.split(".")[-1] in names
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_unrotated_keys_are_what_the_projection_put_out(tiny_model: Models, family: str, offset: int) -> None:
    model, tokens = tiny_model(family), some_tokens(40)
    shape = measure_shape(model)
    positions = torch.arange(40) + offset
    with torch.no_grad(), projections(model) as plain:
        _, cache = run(model, tokens[None], position_ids=positions[None])
    for kind in KINDS:
        found = token_matrix(cache, kind, shape, 0, slice(0, 40), positions)
        wanted = torch.cat(plain[kind], dim=1)
        # Angles of a hundred radians leave 1e-5 of rounding in float32.
        assert (found - wanted).norm() < 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ROTARY)
def test_the_same_tokens_at_two_offsets_have_equal_keys_only_once_unrotated(tiny_model: Models, family: str) -> None:
    model, tokens = tiny_model(family), some_tokens(30)
    shape = measure_shape(model)
    keys = {}
    for offset in (0, 77):
        positions = torch.arange(30) + offset
        with torch.no_grad():
            _, cache = run(model, tokens[None], position_ids=positions[None])
        keys[offset] = token_matrix(cache, "keys", shape, 0, slice(0, 30), positions)
        keys[-offset - 1] = layer_tensors(cache)[0][0]
    assert (keys[0] - keys[77]).norm() < 1e-3 * keys[0].norm()
    assert (keys[-1] - keys[-78]).norm() > 0.01 * keys[-1].norm()


@pytest.mark.parametrize(
    ("family", "layers", "pairings", "rotary_dim"),
    [
        ("llama", (LayerGeometry(2, 8, 8),) * 2, ["half"] * 2, 8),
        ("llama_yarn", (LayerGeometry(2, 8, 8),) * 2, ["half"] * 2, 8),
        ("qwen2", (LayerGeometry(2, 8, 8),) * 2, ["half"] * 2, 8),
        ("gpt2", (LayerGeometry(4, 8, 8),) * 2, ["none"] * 2, 0),
        ("phi", (LayerGeometry(2, 8, 8),) * 2, ["half"] * 2, 4),
        ("cohere", (LayerGeometry(2, 8, 8),) * 2, ["interleaved"] * 2, 8),
        ("smollm3", (LayerGeometry(2, 8, 8),) * 4, ["half", "none"] * 2, 8),
    ],
)
def test_geometry_and_pairings_are_measured(
    tiny_model: Models, family: str, layers: tuple[LayerGeometry, ...], pairings: list[str], rotary_dim: int
) -> None:
    shape = measure_shape(tiny_model(family))
    assert shape.geometry.layers == layers
    assert [rope.pairing for rope in shape.ropes] == pairings
    assert {rope.rotary_dim for rope in shape.ropes if rope.pairing != "none"} <= {rotary_dim}


def test_yarn_scales_its_rotation(tiny_model: Models) -> None:
    (scaling,) = {rope.scaling for rope in measure_shape(tiny_model("llama_yarn")).ropes}
    assert scaling == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)  # YaRN's 0.1 ln(factor) + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "llama_yarn", "cohere", "phi"])
def test_sixteen_bit_models_are_measured_alike(
    tiny_folder: Folders, tiny_model: Models, family: str, dtype: torch.dtype
) -> None:
    shape = measure_shape(load_model(tiny_folder(family), dtype))
    full = measure_shape(tiny_model(family))
    assert shape.geometry == full.geometry
    assert [rope.pairing for rope in shape.ropes] == [rope.pairing for rope in full.ropes]


def test_recurrent_models_are_refused(tiny_model: Models) -> None:
    with pytest.raises(SourceUnsupported, match="KV cache"):
        measure_shape(tiny_model("mamba"))


def test_a_rotation_that_nothing_known_undoes_is_refused(tiny_model: Models) -> None:
    model = tiny_models.build("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def skewed(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = plain(x, position_ids)
        return cos, sin * (1 + 0.2 * position_ids[..., None])

    rotary.forward = skewed
    with pytest.raises(SourceUnsupported, match="keys of layer 0 are rotated by position in a way"):
        measure_shape(model)


def test_a_wrong_pairing_is_far_from_the_tolerance(tiny_model: Models) -> None:
    """That the choice between pairings is not a matter of rounding."""
    model = tiny_model("cohere")
    shape = measure_shape(model)
    wrong = CacheShape(shape.geometry, tuple(Rope("half", rope.inv_freq, rope.scaling) for rope in shape.ropes))
    none = CacheShape(shape.geometry, (NO_ROPE,) * 2)
    found = []
    for candidate in (shape, wrong, none):
        matrices = []
        for offset in (0, 5):
            positions = torch.arange(12) + offset
            with torch.no_grad():
                _, cache = run(model, some_tokens(12)[None], position_ids=positions[None])
            matrices.append(token_matrix(cache, "keys", candidate, 0, slice(0, 12), positions))
        found.append(float((matrices[0] - matrices[1]).norm() / matrices[0].norm()))
    assert found[0] < 1e-5
    assert min(found[1:]) > 0.05


# ---- matrices


def test_a_token_matrix_holds_layers_then_heads_then_channels(tiny_model: Models) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        _, cache = run(model, torch.stack([some_tokens(9), some_tokens(9, seed=4)]))
    shape = measure_shape(model)
    matrix = token_matrix(cache, "values", shape, 1, slice(2, 7), torch.arange(2, 7))
    assert matrix.shape == (5, 2 * 4 * 8)
    for layer in range(2):
        for head in range(4):
            for channel in (0, 7):
                column = layer * 32 + head * 8 + channel
                assert torch.equal(matrix[:, column], layer_tensors(cache)[layer][1][1, head, 2:7, channel])


def test_capture_gives_one_matrix_a_sequence(tiny_model: Models) -> None:
    model = tiny_model("llama")
    shape = measure_shape(model)
    sequences = [some_tokens(10), some_tokens(17, seed=5)]
    found = list(capture(model, shape, iter(sequences)))
    assert [captured.keys.shape for captured in found] == [(10, 32), (17, 32)]
    assert [captured.features.shape for captured in found] == [(10, 0), (17, 0)]
    with torch.no_grad():
        _, cache = run(model, sequences[1][None])
    for kind in KINDS:
        wanted = token_matrix(cache, kind, shape, 0, slice(0, 17), torch.arange(17))
        torch.testing.assert_close(found[1].of(kind), wanted)


@pytest.mark.parametrize("recomputed", [1, 2])
def test_features_are_what_enters_the_last_recomputed_attention(tiny_model: Models, recomputed: int) -> None:
    """Keys and values of that layer are the feature's projections."""
    model = tiny_model("llama")
    shape = replace(measure_shape(model), recomputed=recomputed)
    (found,) = capture(model, shape, iter([some_tokens(10)]))
    attention = model.model.layers[recomputed - 1].self_attn
    columns = slice(16 * (recomputed - 1), 16 * recomputed)
    with torch.no_grad():
        torch.testing.assert_close(attention.k_proj(found.features), found.keys[:, columns], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(attention.v_proj(found.features), found.values[:, columns], rtol=1e-4, atol=1e-4)


PREFIX = 14


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "phi", "cohere", "smollm3"])
def test_gradients_are_those_of_the_continuation_towards_the_prefixs_projections(
    tiny_model: Models, family: str
) -> None:
    """Cached keys are rotated projections: the gradient towards these is the unrotated gradient."""
    model, tokens = tiny_model(family), some_tokens(20)
    shape = replace(measure_shape(model), recomputed=1)
    captured, found = capture_with_gradients(model, shape, tokens, PREFIX, torch.Generator().manual_seed(1))
    with projections(model, cut=PREFIX) as leaves:
        logits = run(model, tokens[None])[0][0, PREFIX:]
    labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    for kind in KINDS:
        wanted = torch.cat([leaf.grad for leaf in leaves[kind] if leaf.grad is not None], dim=1)
        assert found.of(kind).shape == wanted.shape == (PREFIX, shape.geometry.width(kind))
        assert (found.of(kind) - wanted).norm() < 1e-4 * wanted.norm()
        assert wanted.norm() > 0
    (again,) = capture(model, shape, iter([tokens]))
    for whole, plain in ((captured.keys, again.keys), (captured.values, again.values)):
        torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(captured.features, again.features, rtol=1e-4, atol=1e-4)


def test_gradients_come_with_the_attention_of_the_prefixs_last_queries(tiny_model: Models) -> None:
    """Of every third stored layer, so that the first of smollm3's two judges is its second layer."""
    model, tokens = tiny_model("smollm3"), some_tokens(20)
    shape = replace(measure_shape(model), recomputed=1)
    _, found = capture_with_gradients(model, shape, tokens, PREFIX, torch.Generator())
    with torch.no_grad(), watch(model) as watched:
        _, cache = run(model, tokens[None, :PREFIX])
    assert [*shape.judging_layers] == [1]
    wanted = watched.attention(1, layer_tensors(cache)[1][0], 0, 0)
    assert wanted is not None
    (received,) = found.attention
    torch.testing.assert_close(received, wanted)


def test_gradients_follow_the_labels_drawn(tiny_model: Models) -> None:
    model, tokens = tiny_model("llama"), some_tokens(12)
    shape = measure_shape(model)

    def drawn(seed: int) -> Tensor:
        return capture_with_gradients(model, shape, tokens, 8, torch.Generator().manual_seed(seed))[1].keys

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not any(parameter.requires_grad for parameter in model.parameters())


# ---- the way back


@pytest.mark.parametrize("offset", [0, 100])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_head_tensors_inverts_token_matrix(tiny_model: Models, family: str, first: int, offset: int) -> None:
    model, positions = tiny_model(family), torch.arange(9) + offset
    with torch.no_grad():
        _, cache = run(model, torch.stack([some_tokens(9), some_tokens(9, seed=4)]), position_ids=positions[None])
    shape, pairs = measure_shape(model), layer_tensors(cache)
    for part, kind in enumerate(KINDS):
        matrix = token_matrix(cache, kind, shape, 1, slice(2, 7), positions[2:7], (first, len(pairs)))
        found = head_tensors(matrix, kind, shape, first, positions[2:7], torch.float32)
        for heads, pair in zip(found, pairs[first:], strict=True):
            torch.testing.assert_close(heads, pair[part][1, :, 2:7], rtol=1e-4, atol=1e-4)


def test_runs_are_layers_of_equal_shape_and_rotation() -> None:
    rope, near = Rope("half", torch.tensor([0.5])), Rope("half", torch.tensor([0.4]))
    ropes = (rope, rope, near, near, replace(near, scaling=1.1), NO_ROPE, NO_ROPE)
    layers = (*(LayerGeometry(2, 4, 4),) * 6, LayerGeometry(1, 4, 4))
    shape = CacheShape(Geometry(layers), ropes)
    assert shape.runs(0, 7) == [range(2), range(2, 4), range(4, 5), range(5, 6), range(6, 7)]
    assert shape.runs(1, 3) == [range(1, 2), range(2, 3)]
    assert shape.runs(3, 3) == []


def test_recomputed_layers_are_not_stored(tiny_model: Models) -> None:
    shape = measure_shape(tiny_model("smollm3"))
    assert shape.recomputed == 0
    assert shape.stored == shape.geometry
    assert replace(shape, recomputed=3).stored.layers == shape.geometry.layers[3:]


# ---- loading


@pytest.fixture
def folder(tiny_folder: Folders, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder("llama"), tmp_path / "llama"))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_model_is_loaded_for_inference(folder: Path) -> None:
    model = load_model(folder)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    plain = AutoModelForCausalLM.from_pretrained(folder)
    tokens = some_tokens(10)[None]
    torch.testing.assert_close(run(model, tokens)[0], plain(tokens).logits)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_weights_are_refused_by_name(folder: Path, name: str) -> None:
    change_weights(folder, lambda weights: weights.pop(name))
    with pytest.raises(SourceInvalid, match=f"missing keys: {name}"):
        load_model(folder)


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, lambda weights: weights.update({name: torch.zeros(7, 32)}))
    with pytest.raises(SourceInvalid, match=r"mismatched keys: .*layers\.0\.mlp\.up_proj"):
        load_model(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(folder: Path, value: float) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    change_weights(folder, lambda weights: weights[name][3].fill_(value))
    with pytest.raises(SourceInvalid, match=f"weight {name} holds values that are not finite"):
        load_model(folder)


def test_damaged_folders_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(SourceInvalid, match="cannot load the model"):
        load_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceInvalid, match="cannot load the model"):
        load_model(folder)


def test_pickles_are_never_read(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceInvalid, match="cannot load the model"):
        load_model(folder)


@pytest.mark.parametrize(
    "change", [{"model_type": "no_such_type"}, {"hidden_act": "no_such_act"}, {"hidden_size": "x"}]
)
def test_configs_that_transformers_refuses_are_refused(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SourceInvalid, match="cannot load the model"):
        load_model(folder)


def test_code_of_the_repo_is_never_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "unheard_of",
        "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    marker = folder / "it_ran"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    with pytest.raises(SourceInvalid):
        load_model(folder)
    assert not marker.exists()


def test_tokenizers(folder: Path) -> None:
    assert load_tokenizer(folder)("ab")["input_ids"][0] == tiny_models.BOS
    for content in ("{}", "not json"):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(SourceInvalid, match="cannot load the tokenizer"):
            load_tokenizer(folder)
