"""What the resident form of one model's cache is: bases, widths, codebooks. Plain data, fitted elsewhere.

    x -> z = (x - mean) analysis            [P] -> [R], coefficients of about unit size
      -> scale of the token, codes          x is about scale level(code) synthesis + mean

Keys are coded after rotary position: the score of a query q is then scale (synthesis q) . level + q . mean, so that
attention never sees a key. Heads of a group share one basis: all heads of a layer, or each its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.geometry import KINDS, Kind
from kvalign.resident.layout import MAX_WIDTH, PAGE_TOKENS, Codebook, PageLayout

BasisKind = Literal["joint", "head"]


@dataclass(frozen=True, eq=False)
class SidePlan:
    """Keys or values of one group of heads.

    mean       [P] float32, P = heads x channels
    analysis   [P, R] float32
    synthesis  [R, P] float32
    energy     [R] float32: share of each coefficient in a token's scale; sums to 1
    widths     bits of each coefficient, falling
    books      codebook of each width that occurs
    """

    mean: Tensor
    analysis: Tensor
    synthesis: Tensor
    energy: Tensor
    widths: tuple[int, ...]
    books: Mapping[int, Codebook]

    @cached_property
    def layout(self) -> PageLayout:
        return PageLayout(self.widths)

    @property
    def token_bits(self) -> int:
        """Bits of one token, its scale included."""
        return sum(self.widths) + 8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of tokens, scales included."""
        return self.layout.page_bytes + PAGE_TOKENS

    @cached_property
    def polynomials(self) -> NDArray[np.float32]:
        """[MAX_WIDTH + 1, 4]: c0..c3 of each width; zeros where a width does not occur."""
        table = np.zeros((MAX_WIDTH + 1, 4), dtype=np.float32)
        for width in set(self.widths):
            table[width] = self.books[width].polynomial()
        return table

    @cached_property
    def centred(self) -> NDArray[np.float32]:
        """[MAX_WIDTH + 1, 3]: middle m, a and b of each width; level = (b z^2 + a) z with z = code - m.

        Sums of what is spread about zero keep the digits that sums of the polynomials' parts would cancel.
        """
        table = np.zeros((MAX_WIDTH + 1, 3), dtype=np.float32)
        for width in set(self.widths):
            book = self.books[width]
            table[width] = (book.middle, book.gain, book.gain * book.bend)
        return table

    @cached_property
    def levels(self) -> Tensor:
        """[MAX_WIDTH + 1, 256] float32: what each code of each width stands for."""
        table = torch.zeros(MAX_WIDTH + 1, 1 << MAX_WIDTH)
        for width in set(self.widths):
            table[width, : 1 << width] = self.books[width].levels()
        return table

    @cached_property
    def width_array(self) -> NDArray[np.uint64]:
        return np.array(self.widths, dtype=np.uint64)

    @cached_property
    def offset_array(self) -> NDArray[np.uint64]:
        return np.array(self.layout.offsets, dtype=np.uint64)

    def to(self, device: Any) -> "SidePlan":
        """The same on another device."""
        return SidePlan(
            self.mean.to(device),
            self.analysis.to(device),
            self.synthesis.to(device),
            self.energy.to(device),
            self.widths,
            self.books,
        )


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Heads first_head..end_head of one layer, coded together."""

    first_head: int
    end_head: int
    keys: SidePlan
    values: SidePlan

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head

    def side(self, kind: Kind) -> SidePlan:
        return self.keys if kind == "keys" else self.values

    @cached_property
    def absorbing(self) -> Tensor:
        """[H, DK, R + 1]: a query times this is its part on each coefficient, and on the mean."""
        rows = torch.cat([self.keys.synthesis, self.keys.mean[None]])
        return rows.unflatten(1, (self.heads, -1)).permute(1, 2, 0).contiguous()

    @cached_property
    def releasing(self) -> Tensor:
        """[H, R + 1, DV]: sums of coefficients, and the probability that they hold, times this are a head's output."""
        rows = torch.cat([self.values.synthesis, self.values.mean[None]])
        return rows.unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()

    def to(self, device: Any) -> "GroupPlan":
        return GroupPlan(self.first_head, self.end_head, self.keys.to(device), self.values.to(device))


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """One layer of the cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    groups: tuple[GroupPlan, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> "LayerPlan":
        return self  # never changed: copies of a cache share it

    @property
    def token_bits(self) -> int:
        return sum(group.side(kind).token_bits for group in self.groups for kind in KINDS)

    @property
    def values_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    def to(self, device: torch.device) -> "LayerPlan":
        """The same on a device; itself where it is there already, with all that was derived from it."""
        if self.groups[0].keys.mean.device == device:
            return self
        return LayerPlan(self.kv_heads, self.key_dim, self.value_dim, tuple(group.to(device) for group in self.groups))


def by_head(x: Tensor, matrices: Tensor) -> Tensor:
    """x [B, G, ..., X], query heads of a KV head in a row, times its matrix of [H, X, Y]: [B, G, ..., Y]."""
    grouped = x.unflatten(1, (matrices.shape[0], -1)).transpose(0, 1)  # [H, B, shared, ..., X]
    found = grouped.flatten(1, -2) @ matrices
    return found.unflatten(1, grouped.shape[1:-1]).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class ResidentPlan:
    """The resident form of one model's cache.

    bits          bits for each number of a coded token, scales included, as asked for
    basis         whether the heads of a layer share a basis
    layers        of each layer that is coded, by its index; other layers are left to transformers
    sink_tokens   first tokens of a text, kept in 16 bit
    recent_tokens  newest tokens, kept in 16 bit; up to a page more wait to be coded
    """

    bits: float
    basis: BasisKind
    layers: Mapping[int, LayerPlan]
    sink_tokens: int
    recent_tokens: int

    @property
    def bits_per_value(self) -> float:
        """Bits that a coded token takes for each of its numbers, scales included."""
        layers = self.layers.values()
        return sum(layer.token_bits for layer in layers) / sum(layer.values_per_token for layer in layers)
