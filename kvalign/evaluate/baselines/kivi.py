"""KIVI-style quantisation: keys per channel, values per token, in groups of 32 with a 16-bit scale and zero.

Keys are coded as cached, after rotary positions, along the tokens of each channel; the last tokens that do not fill
a group stay in 16 bit. Values are coded along the channels of each token. Liu et al. 2024, arXiv 2402.02750.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.capture import CacheShape
from kvalign.evaluate.baselines.packing import pack_bits, packed_bytes, unpack_bits
from kvalign.evaluate.baselines.stored import Body, Layers, Reader, to_bytes
from kvalign.geometry import LayerGeometry

GROUP = 32


@dataclass(frozen=True)
class Kivi:
    """bits: of each number, 1 to 8; published are 2 and 4."""

    shape: CacheShape
    bits: int

    def encode(self, layers: Layers, body: Body) -> bytes:
        return b"".join(
            self._encoded_keys(keys, body.half) + self._encoded_values(values, body.half) for keys, values in layers
        )

    def decode(self, data: bytes, body: Body) -> Layers:
        reader = Reader(data)
        return [
            (self._decoded_keys(reader, layer, body), self._decoded_values(reader, layer, body))
            for layer in self.shape.geometry.layers
        ]

    def _encoded_keys(self, keys: Tensor, half: torch.dtype) -> bytes:
        grouped = keys.shape[1] // GROUP * GROUP
        groups = keys[:, :grouped].unflatten(1, (-1, GROUP))
        return self._encoded(groups, half) + to_bytes(keys[:, grouped:].to(half))

    def _decoded_keys(self, reader: Reader, layer: LayerGeometry, body: Body) -> Tensor:
        heads, dim = layer.kv_heads, layer.key_dim
        groups, rest = divmod(body.tokens, GROUP)
        coded = self._decoded(reader, (heads, groups, GROUP, dim), body.half).flatten(1, 2)
        return torch.cat([coded, reader.numbers(body.half, (heads, rest, dim))], dim=1)

    def _encoded_values(self, values: Tensor, half: torch.dtype) -> bytes:
        return b"".join(self._encoded(part, half) for part in values.split(GROUP, dim=2))

    def _decoded_values(self, reader: Reader, layer: LayerGeometry, body: Body) -> Tensor:
        widths = [min(GROUP, layer.value_dim - start) for start in range(0, layer.value_dim, GROUP)]
        parts = [self._decoded(reader, (layer.kv_heads, body.tokens, width), body.half) for width in widths]
        return torch.cat(parts, dim=2)

    def _encoded(self, x: Tensor, half: torch.dtype) -> bytes:
        """Codes of numbers that share a scale and a zero along dimension 2, then scales, then zeros."""
        if not x.numel():
            return b""
        low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
        zero = low.to(half)
        scale = ((high - low) / self._largest).to(half)
        # A scale that rounds to zero leaves every number at its zero.
        codes = ((x - zero.float()) / scale.float().clamp_min(1e-30)).round().clamp(0, self._largest)
        codes = torch.where(scale == 0, 0, codes)
        return pack_bits(codes.to(torch.uint8).numpy(), self.bits) + to_bytes(scale) + to_bytes(zero)

    def _decoded(self, reader: Reader, shape: tuple[int, ...], half: torch.dtype) -> Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.zeros(shape)
        codes = unpack_bits(reader.take(packed_bytes(self.bits, count)), self.bits, count)
        shared = (*shape[:2], 1, *shape[3:])
        scale, zero = reader.numbers(half, shared), reader.numbers(half, shared)
        return torch.from_numpy(codes.astype("float32")).view(shape) * scale + zero

    @property
    def _largest(self) -> int:
        return (1 << self.bits) - 1
