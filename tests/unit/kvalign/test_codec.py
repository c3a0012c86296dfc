"""encode and decode against a reference in float64 that shares no code with them, and everything they refuse."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import CURVE, SHAPE, CacheSource, fitted, with_other_id
from torch import Tensor
from transformers import DynamicCache

from kvalign import container
from kvalign.artifact import Artifact
from kvalign.codec import BLOCK_TOKENS, DTYPES, Codec
from kvalign.errors import ConfigInvalid, KvalignError, PayloadInvalid, SourceUnsupported
from kvalign.geometry import KINDS
from kvalign.rope import Rope
from kvalign.token_steps import COARSEST_SHIFT, FINEST_SHIFT
from kvalign.watch import KEPT_QUERIES, Watched

SINK, RECENT = 2, 3
SIXTEEN_BIT = {torch.float32: torch.float16, torch.float16: torch.float16, torch.bfloat16: torch.bfloat16}


def layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def flat(cache: Any, row: int = 0) -> Tensor:
    """[T, numbers of a token] float64."""
    return torch.cat([x[row].transpose(0, 1).flatten(1).double() for pair in layers(cache) for x in pair], dim=1)


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) for pairs in zip(layers(a), layers(b), strict=True) for x, y in zip(*pairs, strict=True)
    )


def parsed(data: bytes) -> container.Payload:
    return container.unpack(data, values_per_token=SHAPE.geometry.values_per_token)


def watched_of(cache: Any, seed: int = 0, strength: float = 3.0) -> Watched:
    """Queries that look along random directions, two query heads for each KV head."""
    generator = torch.Generator().manual_seed(seed)
    watched = Watched()
    for index, (keys, _) in enumerate(layers(cache)):
        batch, heads, _, dim = keys.shape
        watched.record(index, strength * torch.randn(batch, 2 * heads, KEPT_QUERIES, dim, generator=generator), None)
    return watched


# ---- the reference: complex rotations, dense float64 algebra, one token at a time


def rotated(x: Tensor, position: int, rope: Rope, turn: int) -> Tensor:
    """One head's [D] channels turned by +1 or -1 times the position's angles."""
    if rope.pairing == "none":
        return x
    count = rope.inv_freq.numel()
    y = x.clone()
    for pair in range(count):
        i, j = (pair, pair + count) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
        turned = complex(float(x[i]), float(x[j])) * np.exp(1j * turn * position * float(rope.inv_freq[pair]))
        turned *= rope.scaling**turn
        y[i], y[j] = turned.real, turned.imag
    return y


def reference(artifact: Artifact, cache: Any, step: int, token: int, position: int) -> Tensor:
    """What must come back for one coded token of row 0: all layers, keys then values in each, [numbers]."""
    parts: dict[str, list[Tensor]] = {}
    for kind_index, kind in enumerate(KINDS):
        x = []
        for pair, rope in zip(layers(cache), SHAPE.ropes, strict=True):
            for head in pair[kind_index][0, :, token].double():
                x.append(rotated(head, position, rope, -1) if kind == "keys" else head)
        coded = torch.zeros(0, dtype=torch.float64)
        features = torch.cat(x)
        for stored in (s for s in artifact.groups if s.group.kind == kind):
            basis = stored.directions.double() * stored.directions_scale.double()
            W = torch.block_diag(*[head.double() for weight in stored.weights for head in weight])
            centred = features[stored.group.start : stored.group.stop] - stored.intercept.double()
            y = basis.T @ (W @ centred)
            size = 2.0 ** (step / 16)
            # A component is coded when its mean magnitude is at least 2^-3.5 of a step, rounded to quarter octaves.
            kept = torch.tensor([(int(scale) - step + 2) // 4 >= -6 for scale in stored.scales])
            y = torch.where(kept, (y / size).round() * size, 0.0)
            coded = torch.cat([coded, torch.linalg.solve(W, basis @ y) + stored.intercept.double()])
        parts[kind] = []
        at = 0
        for layer, rope in zip(SHAPE.geometry.layers, SHAPE.ropes, strict=True):
            dim = layer.head_dim(kind)
            for _ in range(layer.kv_heads):
                head = coded[at : at + dim]
                at += dim
                parts[kind].append(rotated(head, position, rope, +1) if kind == "keys" else head)
    result, at = [], 0
    for layer in SHAPE.geometry.layers:
        for kind in KINDS:
            result += parts[kind][at : at + layer.kv_heads]
        at += layer.kv_heads
    return torch.cat(result)


@pytest.mark.parametrize("layer_group_size", [None, 1, 2])
@pytest.mark.parametrize("step", [-24, -10, 5])
def test_coded_tokens_are_what_the_reference_says(
    source: CacheSource, artifact: Artifact, step: int, layer_group_size: int | None
) -> None:
    if layer_group_size:
        artifact = fitted(source, layer_group_size=layer_group_size)
    codec = artifact.codec()
    cache = source.cache(40)
    decoded = flat(codec.decode_dense(codec.encode(cache, step=step)))
    for token in (SINK, 11, 36):
        wanted = reference(artifact, cache, step, token, token)
        # float32 against float64: a symbol at a rounding edge may differ by one step, nothing else by 1e-3.
        off = (decoded[token] - wanted).abs()
        assert off.median() < 1e-4
        assert off.max() < 1e-3


def test_the_reference_sees_a_transposed_basis(source: CacheSource, artifact: Artifact) -> None:
    """That the case above can fail."""
    cache = source.cache(40)
    codec = artifact.codec()
    codec.transforms = tuple(replace(t, analysis=t.analysis.T, synthesis=t.synthesis.T) for t in codec.transforms)
    decoded = flat(codec.decode_dense(codec.encode(cache, step=-10)))
    assert (decoded[11] - reference(artifact, cache, -10, 11, 11)).abs().max() > 0.1


# ---- round trips


@given(tokens=st.integers(1, 300), dtype=st.sampled_from(DTYPES), step=st.integers(-30, 20), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_round_trips_keep_shape_dtype_and_verbatim_tokens(
    source: CacheSource, codec: Codec, tokens: int, dtype: torch.dtype, step: int, seed: int
) -> None:
    cache = source.cache(tokens, seed=seed, dtype=dtype)
    data = codec.encode(cache, step=step)
    assert data == codec.encode(cache, step=step)
    assert codec.sizes(data).total == len(data)
    decoded = codec.decode_dense(data)
    assert same(decoded, codec.decode_dense(data))
    verbatim = [*range(min(SINK, tokens)), *range(max(SINK, tokens - RECENT), tokens)]
    for pair, found in zip(layers(cache), layers(decoded), strict=True):
        for x, y in zip(pair, found, strict=True):
            assert (y.shape, y.dtype) == (x.shape, dtype)
            assert torch.equal(y[:, :, verbatim], x[:, :, verbatim].to(SIXTEEN_BIT[dtype]).to(dtype))
            assert torch.isfinite(y).all()
    off = (flat(decoded) - flat(cache)).square().mean().sqrt()
    assert off < 0.5 * flat(cache).square().mean().sqrt()


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 127, 132, 133, 134, 261, 262])
def test_lengths_around_the_edges_of_sinks_and_blocks(source: CacheSource, codec: Codec, tokens: int) -> None:
    data = codec.encode(source.cache(tokens))
    body = max(0, tokens - SINK - RECENT)
    (row,) = parsed(data).rows
    assert len(row.blocks) == -(-body // BLOCK_TOKENS)
    sizes = codec.sizes(data)
    assert (sizes.body_tokens, sizes.verbatim_tokens) == (body, tokens - body)
    assert codec.decode_dense(data).get_seq_length() == tokens


def test_a_finer_step_costs_more_and_errs_less(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(150)
    found = []
    for step in range(-32, 49, 8):
        data = codec.encode(cache, step=step)
        found.append((len(data), float((flat(codec.decode_dense(data)) - flat(cache)).norm())))
    assert found == sorted(found, key=lambda pair: -pair[0])
    assert found == sorted(found, key=lambda pair: pair[1])
    assert len({size for size, _ in found}) == len(found)


def test_a_decoded_cache_goes_on_growing(source: CacheSource, codec: Codec) -> None:
    decoded = codec.decode_dense(codec.encode(source.cache(20)))
    for index, (keys, values) in enumerate(layers(source.cache(1, seed=5))):
        decoded.update(keys, values, index)
    assert decoded.get_seq_length() == 21


def test_float32_out_of_float16s_range_stays_finite(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(20)
    cache.layers[1].keys[0, 0, 0, 0] = 1e6
    decoded = codec.decode_dense(codec.encode(cache))
    assert decoded.layers[1].keys[0, 0, 0, 0] == torch.tensor(1e6).bfloat16().float()
    assert torch.isfinite(flat(decoded)).all()


def test_float16_near_its_largest_number_stays_finite() -> None:
    """Rounding to a step may carry a number past 65504."""
    source = CacheSource(scale=100.0)
    codec = fitted(source).codec()
    group = codec.transforms[-1].group
    leading = codec.transforms[-1].synthesis[0]
    assert (group.kind, group.start) == ("values", 0)
    cache = source.cache(40, dtype=torch.float16)
    for token in range(5, 35):
        at = 0
        for layer in cache.layers:
            heads, _, dim = layer.values[0].shape
            part = leading[at : at + heads * dim].view(heads, dim) / leading.abs().max()
            at += heads * dim
            layer.values[0, :, token] = ((65_000 + 20 * token) * part).clamp(-65504, 65504).half()
    largest = []
    for step in range(60, 160, 4):
        decoded = flat(codec.decode_dense(codec.encode(cache, step=step)))
        assert torch.isfinite(decoded).all()
        largest.append(float(decoded.abs().max()))
    assert max(largest) == 65504


# ---- batches and padding


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_of_a_padded_batch_is_the_row_alone(source: CacheSource, codec: Codec, dtype: torch.dtype) -> None:
    tokens, paddings = 150, (0, 7, 149, 146, 140, 150)
    batch = source.cache(tokens, dtype=dtype, paddings=paddings)
    mask = torch.tensor([[0] * padding + [1] * (tokens - padding) for padding in paddings])
    data = codec.encode(batch, attention_mask=mask)
    decoded = codec.decode_dense(data)
    assert codec.sizes(data).total == len(data)
    assert codec.sizes(data).body_tokens == 145 + 138 + 5
    for row, padding in enumerate(paddings):
        assert not flat(decoded, row)[:padding].any()
        if padding < tokens:
            alone = source.cache(tokens - padding, seed=row, dtype=dtype)
            assert torch.equal(flat(decoded, row)[padding:], flat(codec.decode_dense(codec.encode(alone))))


def test_a_batch_without_padding_needs_no_mask(source: CacheSource, codec: Codec) -> None:
    batch = source.cache(50, paddings=(0, 0))
    assert codec.encode(batch) == codec.encode(batch, attention_mask=torch.ones(2, 50, dtype=torch.bool))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 0]], "not left padding"),
        ([[1, 0, 1]], "not left padding"),
        ([[1, 1]], "the cache holds"),
        ([[1, 1, 1], [1, 1, 1]], "the cache holds"),
        ([1, 1, 1], "the cache holds"),
    ],
)
def test_other_masks_are_refused(source: CacheSource, codec: Codec, mask: list[Any], message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        codec.encode(source.cache(3), attention_mask=torch.tensor(mask))


# ---- steps of single tokens


def test_tokens_that_are_looked_at_get_a_finer_step(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(300)
    watched = watched_of(cache)
    # Every third layer judges: of three, the first.
    received = watched.attention(0, layers(cache)[0][0], 0, 0)
    assert received is not None
    level = received[SINK : 300 - RECENT].log2() / 2
    data = codec.encode(cache, watched=watched)
    shifts = np.concatenate([np.frombuffer(block.shifts, np.int8) for block in parsed(data).rows[0].blocks])
    wanted = (-4 * 0.4 * (level - level.mean())).round().clamp(FINEST_SHIFT, COARSEST_SHIFT)
    assert shifts.tolist() == wanted.tolist()
    assert len(set(shifts.tolist())) > 4

    def error(data: bytes) -> Tensor:
        return (flat(codec.decode_dense(data)) - flat(cache))[SINK : 300 - RECENT].square().sum(1)

    change = error(data).log() - error(codec.encode(cache)).log()
    assert change[torch.tensor(shifts) <= -3].mean() < -0.2
    assert change[torch.tensor(shifts) >= 3].mean() > 0.2


@given(seed=st.integers(0, 99), strength=st.sampled_from([0.1, 1.0, 30.0]), tokens=st.integers(6, 290))
@settings(max_examples=25)
def test_shifted_payloads_round_trip_and_add_up(
    source: CacheSource, codec: Codec, seed: int, strength: float, tokens: int
) -> None:
    cache = source.cache(tokens, seed=seed)
    data = codec.encode(cache, watched=watched_of(cache, seed, strength))
    assert codec.sizes(data).total == len(data)
    decoded = codec.decode_dense(data)
    assert (flat(decoded) - flat(cache)).norm() < 0.5 * flat(cache).norm()


def test_shifted_tokens_are_what_the_reference_says_at_their_own_step(
    source: CacheSource, codec: Codec, artifact: Artifact
) -> None:
    cache = source.cache(200)
    data = codec.encode(cache, watched=watched_of(cache))
    shifts = np.concatenate([np.frombuffer(block.shifts, np.int8) for block in parsed(data).rows[0].blocks])
    decoded = flat(codec.decode_dense(data))
    for index in (int(shifts.argmin()), int(shifts.argmax()), 150):
        wanted = reference(artifact, cache, -10 + 4 * int(shifts[index]), SINK + index, SINK + index)
        off = (decoded[SINK + index] - wanted).abs()
        assert off.max() < 1e-3


def test_a_block_decodes_alone(source: CacheSource, codec: Codec) -> None:
    """The first block's bytes are the same whatever follows it."""
    cache = source.cache(300)
    watched = watched_of(cache)
    long = parsed(codec.encode(cache, watched=watched)).rows[0].blocks
    blank = [container.Block(block.data, block.raw, block.shifts) for block in long]
    payload = parsed(codec.encode(cache, watched=watched))
    first = container.Payload(
        **{
            **{name: getattr(payload, name) for name in payload.__dataclass_fields__},
            "tokens": SINK + BLOCK_TOKENS + RECENT,
            "rows": (container.Row(0, 0, b"", payload.rows[0].verbatim, (blank[0],)),),
        }
    )
    alone = codec.decode_dense(container.pack(first))
    whole = codec.decode_dense(container.pack(payload))
    span = slice(SINK, SINK + BLOCK_TOKENS)
    assert torch.equal(flat(alone)[span], flat(whole)[span])


def test_without_beta_queries_change_nothing(source: CacheSource, artifact: Artifact) -> None:
    codec = Codec(
        artifact.shape,
        [stored.transform() for stored in artifact.groups],
        artifact.tables,
        sink_tokens=SINK,
        recent_tokens=RECENT,
        recommended=-10,
    )
    cache = source.cache(100)
    assert codec.encode(cache, watched=watched_of(cache)) == codec.encode(cache)


def test_shifts_out_of_bounds_are_refused(source: CacheSource, codec: Codec) -> None:
    payload = parsed(codec.encode(source.cache(20)))
    row = payload.rows[0]
    for shift in (FINEST_SHIFT - 1, COARSEST_SHIFT + 1, -128, 127):
        shifts = np.array([0] * 14 + [shift], np.int8).tobytes()
        blocks = (container.Block(row.blocks[0].data, shifts=shifts),)
        with pytest.raises(PayloadInvalid, match="shifted out of bounds"):
            codec.decode_dense(container.pack(_with(payload, rows=(_with(row, blocks=blocks),))))


def _with(item: Any, **changes: Any) -> Any:
    return type(item)(**{**{name: getattr(item, name) for name in item.__dataclass_fields__}, **changes})


# ---- raw blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_would_not_shrink_are_stored_raw(source: CacheSource, codec: Codec, dtype: torch.dtype) -> None:
    cache = source.cache(200, dtype=dtype)
    data = codec.encode(cache, step=-400)
    assert all(block.raw for block in parsed(data).rows[0].blocks)
    raw_bytes = 2 * SHAPE.geometry.values_per_token * 200
    assert raw_bytes < len(data) < raw_bytes + 100
    expected = torch.cat([x[0].transpose(0, 1).flatten(1) for pair in layers(cache) for x in pair], dim=1)
    assert torch.equal(flat(codec.decode_dense(data)), expected.to(SIXTEEN_BIT[dtype]).double())


def test_symbols_too_large_to_code_are_stored_raw_and_not_clipped(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(40)
    cache.layers[0].values[0, 0, 10, 0] = 1e30
    data = codec.encode(cache, step=0)
    (block,) = parsed(data).rows[0].blocks
    assert block.raw
    assert codec.decode_dense(data).layers[0].values[0, 0, 10, 0] == torch.tensor(1e30).bfloat16().float()


def test_raw_blocks_of_the_wrong_length_are_refused(source: CacheSource, codec: Codec) -> None:
    payload = parsed(codec.encode(source.cache(40), step=-400))
    row = payload.rows[0]
    for data in (b"", row.blocks[0].data[:-2], row.blocks[0].data + b"\0\0"):
        rows = (_with(row, blocks=(container.Block(data, raw=True),)),)
        with pytest.raises(PayloadInvalid, match="wrong length"):
            codec.decode_dense(container.pack(_with(payload, rows=rows)))


# ---- targets


def test_targets_take_their_step_from_the_curve(codec: Codec) -> None:
    def step(**target: float) -> int:
        return parsed(codec.encode(CacheSource().cache(10), **target)).step  # type: ignore[arg-type]

    assert step() == -10
    for point in CURVE:
        assert step(max_kl=point.kl_mean) == step(ratio=point.ratio) == point.step
    # Half way between two points on a logarithmic scale; rounded to the finer side for quality, the coarser for size.
    assert step(max_kl=0.002) == -15
    assert step(max_kl=0.00207) == -15
    assert step(max_kl=0.00195) == -16
    assert step(ratio=8 * 2**0.5) == -5
    assert step(ratio=8 * 2**0.48) == -5
    assert step(ratio=8 * 2**0.52) == -4


@pytest.mark.parametrize(
    "target",
    [
        *({"max_kl": 0.0009}, {"max_kl": 0.017}, {"max_kl": 0}, {"max_kl": -1}, {"max_kl": float("nan")}),
        *({"ratio": 3.9}, {"ratio": 16.1}, {"ratio": 0}, {"ratio": float("inf")}),
    ],
)
def test_targets_outside_the_curve_are_refused_with_its_ends(codec: Codec, target: dict[str, float]) -> None:
    ends = r"\(0.001 to 0.016\)" if "max_kl" in target else r"\(4 to 16\)"
    with pytest.raises(ConfigInvalid, match=ends):
        codec.encode(CacheSource().cache(10), **target)  # type: ignore[arg-type]


def test_without_a_curve_only_steps_are_taken(codec: Codec) -> None:
    bare = Codec(SHAPE, codec.transforms, codec.tables, sink_tokens=0, recent_tokens=0, recommended=0)
    with pytest.raises(ConfigInvalid, match="no point"):
        bare.encode(CacheSource().cache(10), ratio=8)
    assert bare.decode_dense(bare.encode(CacheSource().cache(10))).get_seq_length() == 10


@pytest.mark.parametrize(
    "target", [{"max_kl": 0.004, "ratio": 8}, {"step": 0, "ratio": 8}, {"step": 0, "max_kl": 0.004}]
)
def test_two_targets_are_refused(codec: Codec, target: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid, match="More than one"):
        codec.encode(CacheSource().cache(10), **target)


@pytest.mark.parametrize("step", [-1601, 1601, 10**9, -(10**9)])
def test_steps_beyond_float32_are_refused(codec: Codec, step: int) -> None:
    with pytest.raises(ConfigInvalid, match="is outside -1600 to 1600"):
        codec.encode(CacheSource().cache(10), step=step)


@pytest.mark.parametrize("step", [-1600, 1600])
def test_the_outermost_steps_work(codec: Codec, step: int) -> None:
    cache = CacheSource().cache(10)
    assert torch.isfinite(flat(codec.decode_dense(codec.encode(cache, step=step)))).all()


# ---- what is refused


def test_other_models_caches_are_refused(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(10)
    fewer = DynamicCache()
    for index, (keys, values) in enumerate(layers(cache)[:2]):
        fewer.update(keys, values, index)
    with pytest.raises(ConfigInvalid, match="has 2 layers, this codec was made for 3"):
        codec.encode(fewer)
    wider = source.cache(10)
    wider.layers[2].values = torch.zeros(1, 2, 10, 7)
    with pytest.raises(ConfigInvalid, match=r"layer 2 has \(2, 4, 7\) where the codec has \(2, 4, 6\)"):
        codec.encode(wider)
    shorter = source.cache(10)
    shorter.layers[1].keys = shorter.layers[1].keys[:, :, :9]
    with pytest.raises(ConfigInvalid, match=r"\(rows, tokens\) \[\(1, 9\), \(1, 10\)\]"):
        codec.encode(shorter)


def test_empty_caches_are_refused(source: CacheSource, codec: Codec) -> None:
    with pytest.raises(ConfigInvalid, match="has 0 layers"):
        codec.encode(DynamicCache())
    for cache in (source.cache(1), source.cache(1)):
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    with pytest.raises(ConfigInvalid, match=r"\[\(1, 0\)\]"):
        codec.encode(cache)
    cache = source.cache(3)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:0], layer.values[:0]
    with pytest.raises(ConfigInvalid, match=r"\[\(0, 3\)\]"):
        codec.encode(cache)


def test_layers_of_another_kind_are_refused(source: CacheSource, codec: Codec) -> None:
    cache = source.cache(3)
    cache.layers[1] = object()
    with pytest.raises(SourceUnsupported, match="Layer 1 of the cache"):
        codec.encode(cache)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused(source: CacheSource, codec: Codec, value: float) -> None:
    cache = source.cache(10)
    cache.layers[2].values[0, 1, 9, 5] = value
    with pytest.raises(ConfigInvalid, match="not finite"):
        codec.encode(cache)


def test_other_dtypes_are_refused(source: CacheSource, codec: Codec) -> None:
    with pytest.raises(ConfigInvalid, match=r"torch\.float64"):
        codec.encode(source.cache(10, dtype=torch.float64))


def test_payloads_of_another_codec_are_refused(source: CacheSource, codec: Codec, artifact: Artifact) -> None:
    other = with_other_id(artifact).codec()
    data = other.encode(source.cache(10))
    with pytest.raises(PayloadInvalid, match=f"made by codec {other.codec_id.hex()}; this is {codec.codec_id.hex()}"):
        codec.decode_dense(data)
    with pytest.raises(PayloadInvalid, match="made by codec"):
        codec.sizes(data)


@pytest.mark.parametrize(
    "changes",
    [
        *({"dtype_code": 3}, {"dtype_code": 255}, {"verbatim_dtype_code": 0}, {"verbatim_dtype_code": 3}),
        *({"step": 1601}, {"step": -32768}, {"step": 32767}),
    ],
)
def test_headers_that_this_version_never_writes_are_refused(
    source: CacheSource, codec: Codec, changes: dict[str, int]
) -> None:
    payload = _with(parsed(codec.encode(source.cache(20))), **changes)
    with pytest.raises(PayloadInvalid):
        codec.decode_dense(container.pack(payload))


@given(data=st.data())
@settings(max_examples=60)
def test_sound_containers_of_unsound_blocks_are_refused_or_decoded(
    source: CacheSource, codec: Codec, data: st.DataObject
) -> None:
    """An attacker can write checksums: nothing but PayloadInvalid may come of it."""
    payload = parsed(codec.encode(source.cache(20), step=data.draw(st.sampled_from([-400, -10]))))
    row = payload.rows[0]
    bytes_ = data.draw(st.binary(max_size=200).map(lambda x: x + row.blocks[0].data[: data.draw(st.integers(0, 400))]))
    block = container.Block(bytes_, raw=data.draw(st.booleans()), shifts=data.draw(st.sampled_from([b"", b"\0" * 15])))
    position = data.draw(st.sampled_from([0, 5, 2**32, 2**63, 2**64 - 1]))
    step = data.draw(st.integers(-32768, 32767))
    hostile = _with(payload, step=step, rows=(_with(row, blocks=(block,), position=position),))
    try:
        decoded = codec.decode_dense(container.pack(hostile))
    except PayloadInvalid:
        return
    assert decoded.get_seq_length() == 20


@given(st.binary(max_size=300))
def test_random_bytes_raise_payload_invalid(codec: Codec, data: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        codec.decode_dense(data)
    with pytest.raises(PayloadInvalid):
        codec.decode_dense(container.MAGIC + b"\x01\0" + data)


def test_refusals_are_errors_with_a_remedy(source: CacheSource, codec: Codec) -> None:
    with pytest.raises(KvalignError) as caught:
        codec.decode_dense(codec.encode(source.cache(10))[:-1])
    assert caught.value.remedy


def test_a_position_moves_the_rotation(source: CacheSource, codec: Codec, artifact: Artifact) -> None:
    """Payloads say where a row begins: the same symbols at another place are the same keys, turned."""
    payload = parsed(codec.encode(source.cache(20)))
    moved = _with(payload, rows=(_with(payload.rows[0], position=100),))
    here, there = codec.decode_dense(container.pack(payload)), codec.decode_dense(container.pack(moved))
    for index, rope in enumerate(SHAPE.ropes):
        assert torch.equal(here.layers[index].values, there.layers[index].values)
        key = here.layers[index].keys[0, 0, 10].double()
        turned = rotated(rotated(key, 10, rope, -1), 110, rope, +1)
        torch.testing.assert_close(there.layers[index].keys[0, 0, 10].double(), turned, rtol=1e-3, atol=1e-3)
