"""Payloads of every released format decode for ever to the symbols and tensors that were stored beside them.

The files are made once for each format version by tests/golden/make.py and never changed after its release.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvalign import container
from kvalign.artifact import CONFIG_NAME, load_artifact
from kvalign.codec import Codec
from kvalign.entropy.rans import BlockCoder

EVERY = 3
PAYLOADS = sorted(Path(__file__).parent.glob("format-*/*.kv"))


def decoded_tensors(codec: Codec, data: bytes) -> dict[str, Tensor]:
    """keys.LAYER and values.LAYER, [B, H, T / EVERY, D] in the cache's dtype: some of the tokens, for small files."""
    return {
        f"{kind}.{index}": getattr(layer, kind)[:, :, ::EVERY].contiguous()
        for index, layer in enumerate(codec.decode(data).layers)
        for kind in ("keys", "values")
    }


def stored_symbols(codec: Codec, data: bytes) -> dict[str, Tensor]:
    """symbols.ROW.BLOCK of each coded block, [T, components of all groups] in the narrowest type that holds them."""
    payload = container.unpack(data, values_per_token=codec.shape.geometry.values_per_token)
    coder = BlockCoder(codec.tables)
    found = {}
    for row_index, row in enumerate(payload.rows):
        held = payload.tokens - row.padding
        body = held - min(held, payload.sink_tokens + payload.recent_tokens)
        for index, block in enumerate(row.blocks):
            tokens = min(payload.block_tokens, body - index * payload.block_tokens)
            shifts = np.frombuffer(block.shifts, np.int8) if block.shifts else np.zeros(tokens, np.int8)
            classes = [transform.token_classes(payload.step, shifts) for transform in codec.transforms]
            if not block.raw:
                coded = coder.decode(block.data, np.concatenate(classes, axis=1))
                # kvalign leaves out the components of which no token is coded: zeros stand for them here.
                parts = np.split(coded, np.cumsum([part.shape[1] for part in classes])[:-1], axis=1)
                symbols = np.concatenate(
                    [
                        np.pad(part, ((0, 0), (0, transform.scales.size - part.shape[1])))
                        for part, transform in zip(parts, codec.transforms, strict=True)
                    ],
                    axis=1,
                )
                narrowest = np.promote_types(np.min_scalar_type(symbols.min()), np.min_scalar_type(-symbols.max()))
                found[f"symbols.{row_index}.{index}"] = torch.from_numpy(symbols.astype(narrowest))
    return found


def test_there_are_files_of_every_version() -> None:
    versions = {path.parent.name for path in PAYLOADS}
    assert versions == {f"format-{version}" for version in range(1, container.VERSION + 1)}


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_payloads_decode_as_they_always_did(path: Path) -> None:
    codec = load_artifact(path.parent).codec()
    data = path.read_bytes()
    wanted = load_file(path.with_suffix(".safetensors"))
    for name, symbols in stored_symbols(codec, data).items():
        assert torch.equal(symbols, wanted.pop(name)), name
    for name, tensor in decoded_tensors(codec, data).items():
        expected = wanted.pop(name)
        assert tensor.dtype == expected.dtype
        # Another machine may sum in another order: a few units in the last place of the largest number in the row.
        scale = float(expected.float().abs().max())
        precision = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-7}[tensor.dtype]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=scale * precision)
    assert not wanted


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_payloads_are_written_as_they_were(path: Path) -> None:
    geometry = load_artifact(path.parent).shape.geometry
    data = path.read_bytes()
    assert container.pack(container.unpack(data, values_per_token=geometry.values_per_token)) == data


def test_the_files_cover_what_a_payload_can_hold() -> None:
    """Shifted, raw, escaped and empty blocks, padding, and every dtype."""
    seen: set[str] = set()
    for path in PAYLOADS:
        geometry = load_artifact(path.parent).shape.geometry
        payload = container.unpack(path.read_bytes(), values_per_token=geometry.values_per_token)
        seen.add(f"dtype {payload.dtype_code}")
        for row in payload.rows:
            seen |= {"padding"} if row.padding else set()
            seen |= {"several blocks"} if len(row.blocks) > 1 else {"no block"} if not row.blocks else set()
            for block in row.blocks:
                seen |= {"raw"} if block.raw else {"shifted"} if block.shifts else {"coded"}
    assert seen == {f"dtype {code}" for code in range(3)} | {
        "padding",
        "several blocks",
        "no block",
        "raw",
        "shifted",
        "coded",
    }
    largest = max(
        int(symbols.int().abs().max())
        for path in PAYLOADS
        for symbols in stored_symbols(load_artifact(path.parent).codec(), path.read_bytes()).values()
    )
    assert largest > 10_000
    assert all((path.parent / CONFIG_NAME).is_file() for path in PAYLOADS)
