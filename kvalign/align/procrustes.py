"""How alike two heads are, as they stand and once one is rotated onto the other. Knows streams of heads, no model.

With u_i the unit vector of head i at a token, cos(x_i, x_j) = u_i . u_j, so that the mean cosine over tokens is the
trace of the cross-product C = mean u_i u_j^T. The orthogonal Q that brings head j nearest to head i is the polar factor
of C (Schoenemann 1966), fitted on one text; on another the mean of u_i . Q u_j is the sum of Q * C.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Products of this many heads with all later ones are one matrix product.
_ROW_HEADS = 8


class HeadRotations:
    """Which rotation brings each head onto each other, fitted on a stream of tokens.

    heads, dim  N and D; N^2 D^2 / 2 numbers are held, whatever the length of the text
    """

    def __init__(self, heads: int, dim: int) -> None:
        self.heads, self.dim = heads, dim
        self._products = [torch.zeros((end - first) * dim, (heads - first) * dim) for first, end in _rows(heads)]

    def update(self, x: Tensor) -> None:
        """Add tokens, x [T, N, D] float32; T (N D)^2 flops."""
        for (own, later), products in zip(_row_columns(x), self._products, strict=True):
            products.addmm_(own.T, later)

    def fit(self) -> "HeadSimilarity":
        """Turns the products into rotations, in place: this object is spent. N^2 / 2 polar factors of D x D."""
        for products in self._products:
            products.copy_(_joined(polar_factors(_blocks(products, self.dim))))
        return HeadSimilarity(self.heads, self.dim, self._products)


class HeadSimilarity:
    """Mean cosine similarity of all pairs over a stream of tokens, before and after rotation.

    A pair whose heads are zero throughout has similarity 0, also with itself.
    """

    def __init__(self, heads: int, dim: int, rotations: list[Tensor]) -> None:
        self.heads, self.dim = heads, dim
        self._rotations = rotations
        self._before = torch.zeros(heads, heads)
        self._after = torch.zeros(heads, heads)
        self._tokens = 0

    def update(self, x: Tensor) -> None:
        """Add tokens, x [T, N, D] float32; T (N D)^2 flops."""
        for (first, end), (own, later), rotations in zip(
            _rows(self.heads), _row_columns(x), self._rotations, strict=True
        ):
            products = own.T @ later
            self._before[first:end, first:] += _blocks(products, self.dim).diagonal(dim1=2, dim2=3).sum(-1)
            self._after[first:end, first:] += _blocks(products.mul_(rotations), self.dim).sum((2, 3))
        self._tokens += x.shape[0]

    def before(self) -> Tensor:
        """[N, N] float32, symmetric."""
        return self._mirrored(self._before)

    def after(self) -> Tensor:
        """[N, N] float32, symmetric; ones on the diagonal where the head is not zero."""
        return self._mirrored(self._after)

    def _mirrored(self, sums: Tensor) -> Tensor:
        upper = torch.triu(sums / max(1, self._tokens))
        return upper + torch.triu(upper, diagonal=1).T


def different_heads(similarity: Tensor) -> float:
    """Mean over all pairs of different heads; similarity [N, N]. 1 where there is one head alone."""
    heads = similarity.shape[0]
    if heads < 2:
        return 1.0
    return float(similarity[~torch.eye(heads, dtype=torch.bool)].mean())


def _rows(heads: int) -> list[tuple[int, int]]:
    """The upper half of all pairs by rows: heads first..end against heads first..N."""
    return [(first, min(first + _ROW_HEADS, heads)) for first in range(0, heads, _ROW_HEADS)]


def _row_columns(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each row its own heads' columns of the unit vectors, and those of its own and all later heads."""
    _, heads, dim = x.shape
    units = (x / x.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)).flatten(1)
    for first, end in _rows(heads):
        yield units[:, first * dim : end * dim], units[:, first * dim :]


def _blocks(rows: Tensor, dim: int) -> Tensor:
    """[H D, N D] as a view [H, N, D, D]."""
    return rows.unflatten(0, (-1, dim)).unflatten(2, (-1, dim)).transpose(1, 2)


def _joined(blocks: Tensor) -> Tensor:
    """Inverse of _blocks."""
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)


def polar_factors(blocks: Tensor) -> Tensor:
    """The orthogonal matrix nearest to each, [..., D, D] float32; what a singular one does not see is turned anyhow."""
    left, _, right = torch.linalg.svd(blocks)
    return left @ right
