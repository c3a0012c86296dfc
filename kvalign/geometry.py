"""Shape of a model's KV cache: layers x KV heads x channels, and which tokens are coded. Pure integers; no tensors."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

Kind = Literal["keys", "values"]
KINDS: tuple[Kind, Kind] = ("keys", "values")


@dataclass(frozen=True)
class LayerGeometry:
    """One layer of the cache; key and value heads may differ in width."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def head_dim(self, kind: Kind) -> int:
        return self.key_dim if kind == "keys" else self.value_dim

    def width(self, kind: Kind) -> int:
        """Features of one token in this layer."""
        return self.kv_heads * self.head_dim(kind)


@dataclass(frozen=True)
class Geometry:
    """All layers of the cache, in order, as measured on a forward pass (configs mislead)."""

    layers: tuple[LayerGeometry, ...]

    def width(self, kind: Kind) -> int:
        """P: features of one token over all layers."""
        return sum(layer.width(kind) for layer in self.layers)

    def offsets(self, kind: Kind) -> list[int]:
        """First feature of each layer, and P at the end."""
        return [0, *accumulate(layer.width(kind) for layer in self.layers)]

    @property
    def values_per_token(self) -> int:
        """Numbers that one token leaves in the cache."""
        return self.width("keys") + self.width("values")

    def to_json(self) -> list[dict[str, int]]:
        return [
            {"kv_heads": layer.kv_heads, "key_dim": layer.key_dim, "value_dim": layer.value_dim}
            for layer in self.layers
        ]

    @classmethod
    def from_json(cls, data: list[dict[str, Any]]) -> "Geometry":
        return cls(
            tuple(LayerGeometry(int(item["kv_heads"]), int(item["key_dim"]), int(item["value_dim"])) for item in data)
        )


@dataclass(frozen=True)
class TokenSplit:
    """Which tokens of a sequence are kept verbatim and which are coded: sink | body | recent.

    >>> TokenSplit.of(tokens=100, sink_tokens=4, recent_tokens=64)
    TokenSplit(sink=4, body=32, recent=64)
    >>> TokenSplit.of(tokens=50, sink_tokens=4, recent_tokens=64)
    TokenSplit(sink=4, body=0, recent=46)
    """

    sink: int
    body: int
    recent: int

    @classmethod
    def of(cls, tokens: int, sink_tokens: int, recent_tokens: int) -> "TokenSplit":
        sink = min(tokens, sink_tokens)
        recent = min(tokens - sink, recent_tokens)
        return cls(sink, tokens - sink - recent, recent)

    @property
    def verbatim(self) -> int:
        return self.sink + self.recent
