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
from kvalign.capture import load_model
from kvalign.codec import Codec
from kvalign.entropy.rans import BlockCoder
from kvalign.transform import token_classes

EVERY = 3
MODEL_FOLDER = "model"
PAYLOADS = sorted(Path(__file__).parent.glob("format-*/*.kv"))


def codec_of(folder: Path) -> Codec:
    """The codec of a folder of golden files, with its model where it needs one."""
    model = load_model(folder / MODEL_FOLDER) if (folder / MODEL_FOLDER).is_dir() else None
    return load_artifact(folder).codec(model)


def decoded_tensors(codec: Codec, data: bytes) -> dict[str, Tensor]:
    """keys.LAYER and values.LAYER, [B, H, T / EVERY, D] in the cache's dtype: some of the tokens, for small files."""
    return {
        f"{kind}.{index}": getattr(layer, kind)[:, :, ::EVERY].contiguous()
        for index, layer in enumerate(codec.decode_dense(data).layers)
        for kind in ("keys", "values")
    }


def stored_symbols(codec: Codec, data: bytes) -> dict[str, Tensor]:
    """symbols.ROW.BLOCK of each coded block, [T, components of all groups] in the narrowest type that holds them."""
    payload = container.unpack(data, values_per_token=codec.shape.stored.values_per_token)
    coder = BlockCoder(codec.tables)
    found = {}
    for row_index, row in enumerate(payload.rows):
        held = payload.tokens - row.padding
        body = held - min(held, payload.sink_tokens + payload.recent_tokens)
        for index, block in enumerate(row.blocks):
            tokens = min(payload.block_tokens, body - index * payload.block_tokens)
            shifts = np.frombuffer(block.shifts, np.int8) if block.shifts else np.zeros(tokens, np.int8)
            classes, counts = token_classes(codec.transforms, payload.step, shifts)
            if not block.raw:
                coded = coder.decode(block.data, classes)
                # kvalign leaves out the components of which no token is coded: zeros stand for them here.
                parts = np.split(coded, np.cumsum(counts)[:-1], axis=1)
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
    names = {path.parent.name for path in PAYLOADS}
    versions = range(1, container.VERSION + 1)
    assert names == {f"format-{version}{kind}" for version in versions for kind in ("", "-recomputed")}


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_payloads_decode_as_they_always_did(path: Path) -> None:
    codec = codec_of(path.parent)
    data = path.read_bytes()
    wanted = load_file(path.with_suffix(".safetensors"))
    for name, symbols in stored_symbols(codec, data).items():
        assert torch.equal(symbols, wanted.pop(name)), name
    for name, tensor in decoded_tensors(codec, data).items():
        expected = wanted.pop(name)
        assert tensor.dtype == expected.dtype
        # Another machine may sum in another order: a few units in the last place of the largest number in the row.
        scale = float(expected.float().abs().max())
        precision = {torch.float32: 2**-20, torch.float16: 2**-9, torch.bfloat16: 2**-6}[tensor.dtype]
        torch.testing.assert_close(tensor, expected, rtol=0, atol=scale * precision)
    assert not wanted


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_stored_payloads_are_written_as_they_were(path: Path) -> None:
    stored = load_artifact(path.parent).shape.stored
    data = path.read_bytes()
    assert container.pack(container.unpack(data, values_per_token=stored.values_per_token)) == data


def test_the_files_cover_what_a_payload_can_hold() -> None:
    """Shifted, raw, escaped and empty blocks, padding, every dtype, and payloads with token ids and without."""
    seen: set[str] = set()
    for path in PAYLOADS:
        stored = load_artifact(path.parent).shape.stored
        payload = container.unpack(path.read_bytes(), values_per_token=stored.values_per_token)
        seen |= {f"dtype {payload.dtype_code}", f"ids of {payload.id_bytes}"}
        for row in payload.rows:
            seen |= {"padding"} if row.padding else set()
            seen |= {"several blocks"} if len(row.blocks) > 1 else {"no block"} if not row.blocks else set()
            for block in row.blocks:
                seen |= {"raw"} if block.raw else {"shifted"} if block.shifts else {"coded"}
    assert seen == {f"dtype {code}" for code in range(3)} | {"ids of 0", "ids of 2"} | {
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
        for symbols in stored_symbols(codec_of(path.parent), path.read_bytes()).values()
    )
    assert largest > 10_000
    assert all((path.parent / CONFIG_NAME).is_file() for path in PAYLOADS)
