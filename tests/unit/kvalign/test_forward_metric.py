"""The stand-in for gradients, against errors put into a tiny model's keys and values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvalign.calibrate import calibrate
from kvalign.capture import capture_with_queries, layer_tensors, measure_shape, run
from kvalign.errors import SourceUnsupported
from kvalign.geometry import KINDS
from kvalign.watch import output_projection

Models = Callable[[str], Any]
FAMILIES = ["llama", "qwen2", "phi", "cohere", "gpt2"]
TOKENS = torch.randint(256, (48,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_in_a_value_moves_the_attention_output_as_told(tiny_model: Models, family: str) -> None:
    """One token, so that every attention weight is 1 and the formula exact: the stream moves by W dv."""
    model = tiny_model(family)
    shape = measure_shape(model)
    _, found = capture_with_queries(model, shape, TOKENS)
    projection = output_projection(model, 0)
    assert projection is not None
    layer = shape.geometry.layers[0]
    group = projection.shape[1] // (layer.kv_heads * layer.value_dim)
    error = torch.randn(layer.value_dim, generator=torch.Generator().manual_seed(1))
    for head in range(layer.kv_heads):
        columns = projection.float().unflatten(1, (-1, layer.value_dim))[:, head * group : (head + 1) * group]
        alone = sum(float((columns[:, query] @ error).square().sum()) for query in range(group))
        told = float(error @ found.values[0][head] @ error)
        others = float(error @ found.values[0][0] @ error) if head else told
        assert told > 0
        ratio = told / others
        first = projection.float().unflatten(1, (-1, layer.value_dim))[:, :group]
        assert ratio == pytest.approx(
            alone / sum(float((first[:, query] @ error).square().sum()) for query in range(group)), rel=1e-3
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_are_symmetric_and_not_negative(tiny_model: Models, family: str) -> None:
    model = tiny_model(family)
    shape = measure_shape(model)
    captured, found = capture_with_queries(model, shape, TOKENS)
    for kind in KINDS:
        for layer, matrix in zip(shape.geometry.layers, found.of(kind), strict=True):
            assert matrix.shape == (layer.kv_heads, layer.head_dim(kind), layer.head_dim(kind))
            torch.testing.assert_close(matrix, matrix.mT)
            assert torch.linalg.eigvalsh(matrix.double()).min() > -1e-6 * matrix.abs().max()
    assert captured.keys.shape == (48, shape.geometry.width("keys"))


def test_the_output_projection_is_the_one_behind_the_heads(tiny_model: Models) -> None:
    """Heads' outputs by hand, times it, are what the attention module returns."""
    model = tiny_model("llama")
    returned: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    handle = attention.register_forward_hook(lambda module, args, output: returned.append(output[0]))
    with torch.no_grad():
        _, cache = run(model, TOKENS[None, :1])
    handle.remove()
    values = layer_tensors(cache)[0][1][0, :, 0]
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    projection = output_projection(model, 0)
    assert projection is not None
    torch.testing.assert_close(returned[0][0, 0], values.repeat_interleave(group, dim=0).flatten() @ projection.T)


def test_a_model_without_sdpa_is_refused_by_name(tiny_model: Models) -> None:
    model = tiny_model("llama")
    shape = measure_shape(model)
    model.set_attn_implementation("eager")
    try:
        with pytest.raises(SourceUnsupported, match="layer 0 cannot be seen"):
            capture_with_queries(model, shape, TOKENS)
    finally:
        model.set_attn_implementation("sdpa")


def test_calibration_by_forward_passes_weighs_every_head(tiny_model: Models, tmp_path: Any) -> None:
    model = tiny_model("llama")
    shape = measure_shape(model)
    statistics = calibrate(
        model,
        shape,
        [TOKENS, TOKENS.flip(0)],
        seed=0,
        checkpoint=tmp_path / "sums.safetensors",
        on_progress=lambda done, total: None,
        metric="forward",
    )
    assert statistics.gradient_weight == 96
    assert len(statistics.sensitivity) == 2 * len(shape.geometry.layers)
