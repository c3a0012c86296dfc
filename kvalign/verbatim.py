"""Tokens kept as they are, in 16 bit: layer by layer, keys then values, each [H, T, D]. Knows no compression."""

import torch
from torch import Tensor

from kvalign.errors import PayloadInvalid
from kvalign.geometry import KINDS, Geometry, Kind

_FLOAT16_SAFE = 60_000.0


def verbatim_dtype(tensors: list[tuple[Tensor, Tensor]]) -> torch.dtype:
    """16-bit type of verbatim tokens: the cache's own, or for float32 the finest that holds its range."""
    dtype = tensors[0][0].dtype
    if dtype != torch.float32:
        return dtype
    peak = max(float(x.abs().max()) for pair in tensors for x in pair)
    return torch.float16 if peak < _FLOAT16_SAFE else torch.bfloat16


def to_bytes(tensors: list[tuple[Tensor, Tensor]], row: int, tokens: list[int], dtype: torch.dtype) -> bytes:
    """Tokens of one row in 16 bit: layer by layer, keys then values, each [H, T, D]."""
    if not tokens:
        return b""
    picked = torch.tensor(tokens)
    parts = [
        x[row].index_select(1, picked.to(x.device)).to(dtype).cpu().contiguous().view(torch.int16).numpy().tobytes()
        for pair in tensors
        for x in pair
    ]
    return b"".join(parts)


def from_bytes(data: bytes, geometry: Geometry, tokens: int, dtype: torch.dtype) -> dict[Kind, list[Tensor]]:
    """Inverse of to_bytes: float32 [H, T, D] of each layer."""
    if len(data) != 2 * geometry.values_per_token * tokens:
        raise PayloadInvalid("A raw block of the payload has the wrong length.", "Fetch the payload again.")
    numbers = torch.frombuffer(bytearray(data), dtype=torch.int16).view(dtype) if data else torch.zeros(0)
    result: dict[Kind, list[Tensor]] = {kind: [] for kind in KINDS}
    at = 0
    for layer in geometry.layers:
        for kind in KINDS:
            count = tokens * layer.width(kind)
            part = numbers[at : at + count].view(layer.kv_heads, tokens, layer.head_dim(kind))
            at += count
            result[kind].append(part.float())
    return result
