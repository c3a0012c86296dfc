"""How alike two heads are, as they stand and once one is rotated onto the other. Knows cross-products only.

For heads i and j with cross-product C = sum x_i x_j^T, the orthogonal Q that brings x_j nearest to x_i is the
polar factor of C, and sum x_i . Q x_j becomes the nuclear norm of C (Schoenemann 1966).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.geometry import KINDS, Kind
from kvalign.statistics import Statistics

# N^2 / 2 decompositions of D x D: about ten seconds for 90 heads of 64 channels on two cores.
MAX_HEADS = 128


@dataclass(frozen=True)
class HeadAlignment:
    """Mean over all pairs of different heads, energy-weighted cosine similarity about the mean token."""

    heads: int
    before: float
    after: float


def head_alignment(statistics: Statistics) -> dict[Kind, HeadAlignment]:
    """For keys and values, where one group holds all stored heads, of one width, and no more than MAX_HEADS."""
    found: dict[Kind, HeadAlignment] = {}
    for kind in KINDS:
        groups = [group for group in statistics.groups if group.kind == kind]
        layers = statistics.geometry.layers[groups[0].first_layer :]
        heads = sum(layer.kv_heads for layer in layers)
        widths = {layer.head_dim(kind) for layer in layers}
        if len(groups) == len(widths) == 1 and 1 < heads <= MAX_HEADS:
            before, after = pairwise_similarity(statistics.moments[groups[0].name].covariance(), heads)
            different = ~torch.eye(heads, dtype=torch.bool)
            found[kind] = HeadAlignment(heads, float(before[different].mean()), float(after[different].mean()))
    return found


def pairwise_similarity(scatter: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Energy-weighted cosine similarity of all pairs of heads, before and after rotation.

    scatter  [N * D, N * D] float32, uncentred or centred sums over all heads of one width D
    heads    N
    returns  before, after: [N, N] float32 with ones on the diagonal; N^2 / 2 singular value decompositions of D x D

    before is tr C / sqrt(tr C_ii tr C_jj), after puts the nuclear norm of C in place of its trace.
    """
    dim = scatter.shape[0] // heads
    blocks = scatter.unflatten(0, (heads, dim)).unflatten(2, (heads, dim)).permute(0, 2, 1, 3)
    energy = blocks.diagonal(dim1=2, dim2=3).sum(-1).diagonal().clamp_min(torch.finfo(scatter.dtype).tiny)
    norm = torch.outer(energy.sqrt(), energy.sqrt())
    before = blocks.diagonal(dim1=2, dim2=3).sum(-1) / norm
    after = torch.eye(heads)
    for i in range(heads - 1):
        after[i, i + 1 :] = torch.linalg.svdvals(blocks[i, i + 1 :]).sum(-1) / norm[i, i + 1 :]
        after[i + 1 :, i] = after[i, i + 1 :]
    return before, after
