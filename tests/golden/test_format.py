"""A decoder written from docs/format.md alone, in plain Python and NumPy: it makes of payloads what kvalign does.

It shares no code with kvalign but the loading of a model, and takes its time.
"""

import hashlib
import json
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from test_golden import MODEL_FOLDER, PAYLOADS, codec_of, stored_symbols

from kvalign.capture import load_model

Array = NDArray[Any]

DTYPES = {0: torch.float32, 1: torch.float16, 2: torch.bfloat16}  # NumPy has no bfloat16
LOWEST, HIGHEST, LIMIT, ESCAPE, LARGEST = -6, 11, 91, 127, 63


class Folder:
    """The numbers of a codec, from its two files."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "kvalign_config.json").read_text())
        self.geometry, self.ropes, self.groups = config["geometry"], config["ropes"], config["groups"]
        self.recomputed = config["recomputed_layers"]
        self.model = load_model(path / MODEL_FOLDER) if self.recomputed else None
        self.tensors = {name: x.numpy() for name, x in load_file(path / "kvalign_codec.safetensors").items()}
        self.starts = np.cumsum(self.tensors["tables"], axis=1) - self.tensors["tables"]
        self.stored = range(self.recomputed, len(self.geometry))
        self.values_per_token = sum(
            self.geometry[index]["kv_heads"] * (self.geometry[index]["key_dim"] + self.geometry[index]["value_dim"])
            for index in self.stored
        )

    def name(self, group: dict[str, Any]) -> str:
        return f"{group['kind']}.{group['first_layer']}-{group['end_layer'] - 1}"


class Words:
    """Four states that take operations in turn."""

    def __init__(self, data: bytes) -> None:
        words = list(struct.unpack(f"<{len(data) // 2}H", data))
        self.states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in range(4)]
        self.rest = words[8:]
        self.done = 0

    def column(self, frequencies: Array, starts: Array) -> int:
        x = self.states[self.done % 4]
        slot = x % 4096
        column = int(np.searchsorted(starts, slot, side="right")) - 1
        self._next(int(frequencies[column]) * (x >> 12) + slot - int(starts[column]))
        return column

    def raw(self, bits: int) -> int:
        x = self.states[self.done % 4]
        self._next(((x >> 12) << (12 - bits)) + x % 2 ** (12 - bits))
        return (x % 4096) >> (12 - bits)

    def _next(self, state: int) -> None:
        if state < 2**16:
            state = (state << 16) + self.rest.pop(0)
        self.states[self.done % 4] = state
        self.done += 1


def symbol(words: Words, codec: Folder, cls: int) -> int:
    if cls < LOWEST:
        return 0
    low = max(0, math.ceil((cls - HIGHEST) / 4))
    row = cls - 4 * low - LOWEST
    column = words.column(codec.tensors["tables"][row], codec.starts[row])
    high = column - LARGEST
    if column == ESCAPE:
        u = sum(words.raw(8) << shift for shift in range(0, 32, 8))
        high = (u >> 1) ^ -(u & 1)
    value, at = 0, 0
    while at < low:
        take = min(8, low - at)
        value |= words.raw(take) << at
        at += take
    return (high << low) + value


def rounded(x: Array, dtype: torch.dtype) -> Array:
    return np.asarray(torch.from_numpy(x).to(dtype).float().numpy())


def read(data: bytes, codec: Folder) -> tuple[dict[str, Array], dict[str, Array]]:
    """Tensors by keys.LAYER and values.LAYER, in float32; symbols by ROW.BLOCK."""
    magic, version, dtype, dtype16, id_bytes, zero, step, block_tokens, tokens, sinks, recents, count, _ = (
        struct.unpack_from("<4sHBBBBhHIIII16s", data)
    )
    assert (magic, version, zero) == (b"KVAL", 1, 0)
    rows = [struct.unpack_from("<IIQI", data, 46 + 20 * row) for row in range(count)]
    at = 46 + 20 * count
    entries = [struct.unpack_from("<II", data, at + 8 * block) for block in range(sum(row[1] for row in rows))]
    at += 8 * len(entries)
    assert struct.unpack_from("<I", data, at) == (zlib.crc32(data[:at]),)
    at += 4
    ids, verbatim = [], []
    for padding, _, _, crc in rows:
        ids_size = id_bytes * (tokens - padding)
        size = ids_size + 2 * codec.values_per_token * min(tokens - padding, sinks + recents)
        assert zlib.crc32(data[at : at + size]) == crc
        ids.append(np.frombuffer(data[at : at + ids_size], f"<u{id_bytes}") if id_bytes else None)
        verbatim.append(data[at + ids_size : at + size])
        at += size
    found, symbols = [], {}
    for index, (padding, blocks, position, _) in enumerate(rows):
        held = tokens - padding
        sink = min(held, sinks)
        recent = min(held - sink, recents)
        kept = verbatim_tokens(verbatim[index], codec, sink + recent, DTYPES[dtype16])
        again, f = recomputed(codec, ids[index], held)
        parts = [{name: x[:, :sink] for name, x in kept.items()}]
        for block in range(blocks):
            size, crc = entries.pop(0)
            stored = data[at : at + (size & 2**30 - 1)]
            at += len(stored)
            assert zlib.crc32(stored) == crc
            n = min(block_tokens, held - sink - recent - block * block_tokens)
            shifts = list(struct.unpack_from(f"<{n}b", stored)) if size >> 30 & 1 else [0] * n
            stored = stored[n:] if size >> 30 & 1 else stored
            if size >> 31:
                parts.append(verbatim_tokens(stored, codec, n, DTYPES[dtype16]))
            else:
                coded = block_symbols(stored, codec, step, shifts)
                symbols[f"{index}.{block}"] = coded
                first = position + sink + block * block_tokens
                seen = f[first - position : first - position + n]
                parts.append(block_tensors(coded, codec, step, shifts, seen, first, DTYPES[dtype]))
        parts.append({name: x[:, sink:] for name, x in kept.items()})
        joined = again | {name: np.concatenate([part[name] for part in parts], axis=1) for name in kept}
        found.append({name: np.pad(x, ((0, 0), (padding, 0), (0, 0))) for name, x in joined.items()})
    assert at == len(data)
    limit = torch.finfo(DTYPES[dtype]).max
    tensors = {name: np.stack([row[name] for row in found]).clip(-limit, limit) for name in found[0]}
    return {name: rounded(x, DTYPES[dtype]) for name, x in tensors.items()}, symbols


def recomputed(codec: Folder, ids: Array | None, tokens: int) -> tuple[dict[str, Array], Array]:
    """Keys and values of the first layers, [H, T, D] each, and the features, [T, F]: what transformers makes of ids."""
    if ids is None:
        return {}, np.zeros((tokens, 0), np.float32)
    with torch.no_grad():
        found = codec.model(torch.from_numpy(ids.astype(np.int64))[None], use_cache=True, output_hidden_states=True)
        last = codec.recomputed - 1
        f = codec.model.model.layers[last].input_layernorm(found.hidden_states[last])[0]
    layers = found.past_key_values.layers[: codec.recomputed]
    tensors = {f"keys.{index}": layer.keys[0].numpy() for index, layer in enumerate(layers)}
    return tensors | {f"values.{index}": layer.values[0].numpy() for index, layer in enumerate(layers)}, f.numpy()


def verbatim_tokens(data: bytes, codec: Folder, tokens: int, dtype: torch.dtype) -> dict[str, Array]:
    numbers = torch.frombuffer(bytearray(data), dtype=dtype).float().numpy() if data else np.zeros(0, np.float32)
    at, found = 0, {}
    for index in codec.stored:
        layer = codec.geometry[index]
        for kind, dim in (("keys", layer["key_dim"]), ("values", layer["value_dim"])):
            size = layer["kv_heads"] * tokens * dim
            found[f"{kind}.{index}"] = numbers[at : at + size].reshape(layer["kv_heads"], tokens, dim)
            at += size
    assert at == len(numbers)
    return found


def block_symbols(data: bytes, codec: Folder, step: int, shifts: list[int]) -> Array:
    """[tokens, components of all groups]."""
    words = Words(data)
    scales = np.concatenate([codec.tensors[f"scales.{codec.name(group)}"] for group in codec.groups]).tolist()
    found = [
        [symbol(words, codec, min((scale - step + 2) // 4 - shift, LIMIT)) for scale in scales] for shift in shifts
    ]
    assert words.states == [2**16] * 4
    assert not words.rest
    return np.array(found)


def block_tensors(
    symbols: Array, codec: Folder, step: int, shifts: list[int], f: Array, first: int, dtype: torch.dtype
) -> dict[str, Array]:
    sizes = np.array([[2.0 ** ((step + 4 * shift) / 16)] for shift in shifts], np.float32)
    found, column = {}, 0
    for group in codec.groups:
        name, kind = codec.name(group), group["kind"]
        y = symbols[:, column : column + group["rank"]].astype(np.float32) * sizes
        column += group["rank"]
        scaled = codec.tensors[f"predictor.{name}"] * codec.tensors[f"feature_scale.{name}"][:, None]
        expected = codec.tensors[f"intercept.{name}"] + f @ (scaled * codec.tensors[f"predictor_scale.{name}"])
        U = codec.tensors[f"directions.{name}"].astype(np.float32) * codec.tensors[f"directions_scale.{name}"]
        at = 0
        for index in range(group["first_layer"], group["end_layer"]):
            heads = []
            for W in codec.tensors[f"weights.{kind}.{index}"]:
                rows = slice(at, at + len(W))
                at += len(W)
                heads.append(expected[:, rows] + y @ U[rows].T @ np.linalg.inv(W).T)
            x = np.stack(heads).astype(np.float32)
            found[f"{kind}.{index}"] = rotated(x, codec, index, first, dtype) if kind == "keys" else x
    return found


def rotated(x: Array, codec: Folder, layer: int, first: int, dtype: torch.dtype) -> Array:
    """x [H, T, D] turned to positions first, first + 1, ..."""
    rope = codec.ropes[layer]
    if rope["pairing"] == "none":
        return x
    inv_freq = codec.tensors[f"inv_freq.{layer}"]
    positions = np.arange(first, first + x.shape[1]).astype(np.float32)
    y = x.copy()
    for pair, frequency in enumerate(inv_freq):
        angle = positions * frequency
        c, s = (rounded(turn * np.float32(rope["scaling"]), dtype) for turn in (np.cos(angle), np.sin(angle)))
        i, j = (pair, pair + len(inv_freq)) if rope["pairing"] == "half" else (2 * pair, 2 * pair + 1)
        y[..., i] = x[..., i] * c - x[..., j] * s
        y[..., j] = x[..., j] * c + x[..., i] * s
    return y


@pytest.mark.parametrize("folder", sorted({path.parent for path in PAYLOADS}), ids=lambda folder: folder.name)
def test_the_page_says_how_a_codec_is_named(folder: Path) -> None:
    config = json.loads((folder / "kvalign_config.json").read_text())
    layout = {name: config[name] for name in ("geometry", "groups", "recomputed_layers", "ropes")}
    digest = hashlib.sha256((folder / "kvalign_codec.safetensors").read_bytes())
    digest.update(json.dumps(layout, sort_keys=True).encode("ascii"))
    assert config["codec_id"] == digest.digest()[:16].hex()
    for path in folder.glob("*.kv"):
        assert path.read_bytes()[30:46].hex() == config["codec_id"]


@pytest.mark.parametrize("path", PAYLOADS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_page_says_what_kvalign_does(path: Path) -> None:
    codec = codec_of(path.parent)
    data = path.read_bytes()
    tensors, symbols = read(data, Folder(path.parent))
    for name, wanted in stored_symbols(codec, data).items():
        assert np.array_equal(symbols.pop(name.removeprefix("symbols.")), wanted.numpy())
    assert not symbols
    decoded = codec.decode_dense(data).layers
    assert {f"{kind}.{layer}" for kind in ("keys", "values") for layer in range(len(decoded))} == tensors.keys()
    for name, found in tensors.items():
        kind, layer = name.split(".")
        wanted = getattr(decoded[int(layer)], kind)
        assert found.shape == tuple(wanted.shape)
        scale = float(wanted.float().abs().max())
        precision = {torch.float32: 2**-18, torch.float16: 2**-9, torch.bfloat16: 2**-6}[wanted.dtype]
        off = np.abs(found - wanted.float().numpy()).max()
        assert off <= scale * precision, name
