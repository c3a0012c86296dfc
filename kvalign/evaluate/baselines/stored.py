"""What all baselines share: sinks in 16 bit, a body coder for the rest, and a cache from the stored bytes alone.

    header | sink tokens, 16 bits a number | body                                     one sequence a payload

Knows no method: a body coder (kivi.py, fp8.py, kvtc.py) turns the tokens after the sinks into bytes and back.
"""

import struct
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign.accounting import PayloadSizes
from kvalign.capture import CacheShape, layer_tensors
from kvalign.codec import DTYPES
from kvalign.errors import ConfigInvalid, PayloadInvalid
from kvalign.evaluate.protocol import PreparedWindow

Layers = list[tuple[Tensor, Tensor]]

_HEADER = struct.Struct("<IHBB")
_FLOAT16_SAFE = 60_000.0


@dataclass(frozen=True)
class Body:
    """The tokens after the sinks.

    positions  [T] int64, rotary position of each
    dtype      of the cache
    half       the 16-bit type of numbers that stay plain: scales, zeros, residuals
    """

    positions: Tensor
    dtype: torch.dtype
    half: torch.dtype

    @property
    def tokens(self) -> int:
        return self.positions.numel()


class BodyCoder(Protocol):
    """One published method at one setting. Layers are (keys, values) as cached, float32 [H, T, D] each."""

    def encode(self, layers: Layers, body: Body) -> bytes: ...

    def decode(self, data: bytes, body: Body) -> Layers: ...


class Baseline:
    """A cache coder made of a body coder: encode to bytes, decode from them only.

    sink_tokens  first tokens, kept in 16 bit
    """

    def __init__(self, shape: CacheShape, coder: BodyCoder, sink_tokens: int = 4) -> None:
        self._geometry = shape.geometry
        self._coder = coder
        self._sink_tokens = sink_tokens

    def __call__(self, prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        """As evaluate.protocol.CacheCoder; no baseline looks at tokens or queries."""
        data = self.encode(prepared.cache)
        return self.decode(data), self.sizes(data)

    def encode(self, cache: Any) -> bytes:
        """Bytes of a cache that holds one sequence; raises ConfigInvalid for a batch of several."""
        layers = layer_tensors(cache)
        keys = layers[0][0]
        if keys.shape[0] != 1:
            raise ConfigInvalid(f"The cache holds {keys.shape[0]} sequences.", "Baselines code one at a time.")
        tokens = keys.shape[2]
        sink = min(tokens, self._sink_tokens)
        half = _half_dtype(layers)
        plain = [(k[0].cpu().float(), v[0].cpu().float()) for k, v in layers]
        head = _HEADER.pack(tokens, sink, DTYPES.index(keys.dtype), DTYPES.index(half))
        verbatim = b"".join(to_bytes(x[:, :sink].to(half)) for pair in plain for x in pair)
        body = Body(torch.arange(sink, tokens), keys.dtype, half)
        return head + verbatim + self._coder.encode([(k[:, sink:], v[:, sink:]) for k, v in plain], body)

    def decode(self, data: bytes) -> DynamicCache:
        """The cache, in the dtype it was encoded from. Raises PayloadInvalid when cut short."""
        tokens, sink, dtype, half, start = self._parsed(data)
        reader = Reader(data[_HEADER.size : start])
        kept = [
            tuple(reader.numbers(half, (layer.kv_heads, sink, width)) for width in (layer.key_dim, layer.value_dim))
            for layer in self._geometry.layers
        ]
        coded = self._coder.decode(data[start:], Body(torch.arange(sink, tokens), dtype, half))
        cache = DynamicCache()
        for index, (first, rest) in enumerate(zip(kept, coded, strict=True)):
            keys, values = (torch.cat([a, b], dim=1)[None].to(dtype) for a, b in zip(first, rest, strict=True))
            cache.update(keys, values, index)
        return cache

    def sizes(self, data: bytes) -> PayloadSizes:
        """Where the bytes of a payload went; their sum is its length."""
        tokens, sink, _, _, start = self._parsed(data)
        return PayloadSizes(
            coded=len(data) - start,
            verbatim=start - _HEADER.size,
            side_info=_HEADER.size,
            body_tokens=tokens - sink,
            verbatim_tokens=sink,
        )

    def _parsed(self, data: bytes) -> tuple[int, int, torch.dtype, torch.dtype, int]:
        """Tokens, sink tokens, dtype of the cache, 16-bit dtype, and where the body starts."""
        if len(data) < _HEADER.size:
            raise PayloadInvalid("The payload is cut short.", "Encode the cache again.")
        tokens, sink, dtype, half = _HEADER.unpack_from(data)
        start = _HEADER.size + 2 * self._geometry.values_per_token * sink
        return tokens, sink, DTYPES[dtype], DTYPES[half], start


class Reader:
    """Takes numbers off the front of bytes. Raises PayloadInvalid when they run out."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise PayloadInvalid("The payload is cut short.", "Encode the cache again.")
        part = self._data[self._at : self._at + size]
        self._at += size
        return part

    def numbers(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Plain numbers as float32 of this shape."""
        count = torch.Size(shape).numel()
        data = self.take(count * dtype.itemsize)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).float() if count else torch.zeros(shape)


def to_bytes(x: Tensor) -> bytes:
    """A tensor's numbers in order, little-endian."""
    return x.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _half_dtype(layers: Layers) -> torch.dtype:
    """The cache's own 16-bit type, or for float32 the finest that holds its range."""
    dtype = layers[0][0].dtype
    if dtype != torch.float32:
        return dtype
    peak = max(float(x.abs().max()) for pair in layers for x in pair)
    return torch.float16 if peak < _FLOAT16_SAFE else torch.bfloat16
