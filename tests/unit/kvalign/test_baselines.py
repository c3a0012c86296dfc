"""KIVI and fp8 against their formulas, and what all baselines promise: real bytes, all counted, decoded from alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import window_of
from torch import Tensor
from transformers import DynamicCache

from kvalign import accounting
from kvalign.capture import CacheShape, layer_tensors
from kvalign.errors import ConfigInvalid, PayloadInvalid
from kvalign.evaluate.baselines import Baseline, Fp8, Kivi
from kvalign.evaluate.baselines.packing import pack_bits, packed_bytes, unpack_bits
from kvalign.geometry import Geometry, LayerGeometry
from kvalign.rope import NO_ROPE

# Two layers that differ in everything; 40 value channels leave a group of 8 behind one of 32.
SHAPE = CacheShape(Geometry((LayerGeometry(2, 16, 40), LayerGeometry(3, 8, 32))), (NO_ROPE, NO_ROPE))
LENGTHS = [1, 4, 5, 36, 37, 70, 100]
SINK = 4
HEADER_BYTES = 8


def a_cache(tokens: int, dtype: torch.dtype = torch.float32, rows: int = 1) -> DynamicCache:
    generator = torch.Generator().manual_seed(tokens)
    cache = DynamicCache()
    for index, layer in enumerate(SHAPE.geometry.layers):
        keys = torch.randn(rows, layer.kv_heads, tokens, layer.key_dim, generator=generator) * 3 + 5
        values = torch.randn(rows, layer.kv_heads, tokens, layer.value_dim, generator=generator)
        cache.update(keys.to(dtype), values.to(dtype), index)
    return cache


CODERS: dict[str, Callable[[], Baseline]] = {
    "fp8": lambda: Baseline(SHAPE, Fp8(SHAPE), SINK),
    "kivi4": lambda: Baseline(SHAPE, Kivi(SHAPE, 4), SINK),
    "kivi3": lambda: Baseline(SHAPE, Kivi(SHAPE, 3), SINK),
    "kivi2": lambda: Baseline(SHAPE, Kivi(SHAPE, 2), SINK),
}


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_baseline_decodes_from_its_bytes_alone_and_counts_all_of_them(name: str, tokens: int) -> None:
    cache = a_cache(tokens)
    data = CODERS[name]().encode(cache)
    other = CODERS[name]()
    sizes = other.sizes(data)
    assert sizes.total == len(data)
    assert sizes.body_tokens + sizes.verbatim_tokens == tokens
    decoded = layer_tensors(other.decode(data))
    for original, restored in zip(layer_tensors(cache), decoded, strict=True):
        for x, y in zip(original, restored, strict=True):
            assert x.shape == y.shape
            assert torch.isfinite(y).all()
            # Sinks are kept in float16: 11 bits of the largest number here, about 20.
            assert (x - y)[..., :SINK, :].abs().max() <= 20 * 2**-11


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_of_the_cache_comes_back(name: str, dtype: torch.dtype) -> None:
    cache = a_cache(50, dtype)
    decoded, _ = CODERS[name]()(window_of(cache))
    for original, restored in zip(layer_tensors(cache), layer_tensors(decoded), strict=True):
        for x, y in zip(original, restored, strict=True):
            assert y.dtype == dtype
            if dtype != torch.float32:
                assert torch.equal(x[..., :SINK, :], y[..., :SINK, :])


@pytest.mark.parametrize(("bits", "ratio"), [(4, 3.2), (3, 4.0), (2, 16 / 3)])
def test_whole_groups_reach_the_published_ratio_of_kivi(bits: int, ratio: float) -> None:
    """bits a number and 32 bits for each group of 32: 16 / (bits + 1)."""
    shape = CacheShape(Geometry((LayerGeometry(3, 64, 64),) * 2), (NO_ROPE, NO_ROPE))
    cache = DynamicCache()
    for index in range(2):
        cache.update(torch.randn(1, 3, SINK + 768, 64), torch.randn(1, 3, SINK + 768, 64), index)
    _, sizes = Baseline(shape, Kivi(shape, bits), SINK)(window_of(cache))
    assert accounting.coded_ratio(shape.geometry, sizes) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tokens", [3, 32, 69])
def test_kivi_follows_its_formula(bits: int, tokens: int) -> None:
    cache = a_cache(SINK + tokens)
    decoded, _ = Baseline(SHAPE, Kivi(SHAPE, bits), SINK)(window_of(cache))
    for (keys, values), (coded_keys, coded_values) in zip(layer_tensors(cache), layer_tensors(decoded), strict=True):
        assert torch.equal(coded_keys[0, :, SINK:], keys_by_formula(keys[0, :, SINK:], bits))
        assert torch.equal(coded_values[0, :, SINK:], values_by_formula(values[0, :, SINK:], bits))


def keys_by_formula(keys: Tensor, bits: int) -> Tensor:
    """Each channel of each head, 32 tokens at a time; what does not fill a group in float16."""
    result = keys.half().float()
    for head in range(keys.shape[0]):
        for channel in range(keys.shape[2]):
            for start in range(0, keys.shape[1] - 31, 32):
                part = slice(start, start + 32)
                result[head, part, channel] = by_formula(keys[head, part, channel], bits)
    return result


def values_by_formula(values: Tensor, bits: int) -> Tensor:
    """Each token of each head, 32 channels at a time."""
    result = torch.empty_like(values)
    for head in range(values.shape[0]):
        for token in range(values.shape[1]):
            for start in range(0, values.shape[2], 32):
                part = slice(start, start + 32)
                result[head, token, part] = by_formula(values[head, token, part], bits)
    return result


def by_formula(x: Tensor, bits: int) -> Tensor:
    zero = x.min().half().float()
    scale = ((x.max() - x.min()) / (2**bits - 1)).half().float()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


@pytest.mark.parametrize("name", CODERS)
def test_numbers_that_are_all_alike_come_back(name: str) -> None:
    cache = DynamicCache()
    for index, layer in enumerate(SHAPE.geometry.layers):
        keys = torch.full((1, layer.kv_heads, 40, layer.key_dim), -1.5)
        cache.update(keys, torch.zeros(1, layer.kv_heads, 40, layer.value_dim), index)
    decoded, _ = CODERS[name]()(window_of(cache))
    for keys, values in layer_tensors(decoded):
        assert torch.allclose(keys, torch.tensor(-1.5), rtol=1e-6)
        assert not values.any()


def test_fp8_rounds_to_three_bits_of_mantissa_under_one_scale_a_layer() -> None:
    cache = a_cache(60)
    decoded, sizes = Baseline(SHAPE, Fp8(SHAPE), SINK)(window_of(cache))
    layers = SHAPE.geometry.layers
    assert sizes.coded == SHAPE.geometry.values_per_token * 56 + 4 * 2 * len(layers)
    for original, restored in zip(layer_tensors(cache), layer_tensors(decoded), strict=True):
        for x, y in zip(original, restored, strict=True):
            body, coded = x[:, :, SINK:], y[:, :, SINK:]
            # Normal numbers are off by at most half of 2^-3; subnormal ones by half of 2^-9 of the scale.
            bound = body.abs() * 2**-4 + body.abs().max() / 448 * 2**-10
            assert ((body - coded).abs() <= bound * (1 + 1e-5)).all()
            assert float(coded.abs().max()) == pytest.approx(float(body.abs().max()), rel=1e-6)


@pytest.mark.parametrize("name", CODERS)
def test_a_payload_cut_short_is_refused(name: str) -> None:
    data = CODERS[name]().encode(a_cache(40))
    for size in (0, 3, HEADER_BYTES, HEADER_BYTES + 10, len(data) - 1):
        with pytest.raises(PayloadInvalid, match="cut short"):
            CODERS[name]().decode(data[:size])


def test_a_batch_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="2 sequences"):
        CODERS["fp8"]().encode(a_cache(10, rows=2))


@given(st.integers(1, 8), st.data())
def test_packed_bits_come_back(bits: int, data: Any) -> None:
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    codes = np.array(numbers, dtype=np.uint8)
    packed = pack_bits(codes, bits)
    assert len(packed) == packed_bytes(bits, len(numbers))
    assert unpack_bits(packed, bits, len(numbers)).tolist() == numbers
