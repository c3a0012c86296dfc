"""fp8 E4M3 with one scale for the keys and one for the values of each layer, as inference engines cache it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.capture import CacheShape
from kvalign.evaluate.baselines.stored import Body, Layers, Reader, to_bytes

E4M3_MAX = 448.0


@dataclass(frozen=True)
class Fp8:
    """8 bits a number, and a float32 scale for each layer's keys and values that fills the range of the format."""

    shape: CacheShape

    def encode(self, layers: Layers, body: Body) -> bytes:
        return b"".join(_encoded(x) for pair in layers for x in pair)

    def decode(self, data: bytes, body: Body) -> Layers:
        reader = Reader(data)
        return [
            (
                _decoded(reader, (layer.kv_heads, body.tokens, layer.key_dim)),
                _decoded(reader, (layer.kv_heads, body.tokens, layer.value_dim)),
            )
            for layer in self.shape.geometry.layers
        ]


def _encoded(x: Tensor) -> bytes:
    if not x.numel():
        return b""
    scale = (x.abs().max() / E4M3_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    # Casting does not saturate: what rounding of the scale puts past the largest number would become NaN.
    return to_bytes(scale) + to_bytes((x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))


def _decoded(reader: Reader, shape: tuple[int, ...]) -> Tensor:
    if not torch.Size(shape).numel():
        return torch.zeros(shape)
    scale = reader.numbers(torch.float32, ())
    return reader.numbers(torch.float8_e4m3fn, shape) * scale
