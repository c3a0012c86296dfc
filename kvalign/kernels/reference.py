"""What every kernel must compute, in plain PyTorch: nothing between the reader and the mathematics.

Runs on any device, and unpacks everything it needs: correct at any length, quick at none.
"""

import torch
from torch import Tensor

from kvalign.resident.layout import MAX_WIDTH, PAGE_TOKENS, SCALE_BIAS, SCALE_STEPS, nearest, pack, scale_of, unpack
from kvalign.resident.plan import SidePlan

# Steps of a token's scale that are tried around the one its energy asks for; the least squared error wins.
TRIED_SCALES = (-4, -2, -1, 0, 1, 2, 3, 4, 6)
_SMALLEST = 1e-30


def encode(side: SidePlan, x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages of tokens as codes.

    x        [..., N x PAGE_TOKENS, P] float32, finite
    returns  pages [..., N, page_bytes] and log scales [..., N, PAGE_TOKENS], uint8 both
    """
    z = (x - side.mean) @ side.analysis
    scale = encoded_scale(side, z)
    code = nearest_codes(side, z / scale_of(scale)[..., None])
    pages = pack(code.unflatten(-2, (-1, PAGE_TOKENS)).transpose(-1, -2), side.layout)
    return pages, scale.unflatten(-1, (-1, PAGE_TOKENS))


def encoded_scale(side: SidePlan, z: Tensor) -> Tensor:
    """Log scale of each token, [..., T] uint8; z [..., T, R] coefficients."""
    energy = (z.square() * side.energy).sum(-1).clamp_min(_SMALLEST)
    start = (energy.log2() * (SCALE_STEPS / 2)).round() + SCALE_BIAS
    best = torch.full_like(energy, float("inf"))
    found = start
    for step in TRIED_SCALES:
        tried = (start + step).clamp(0, 255)
        scale = scale_of(tried)[..., None]
        error = ((levels_of(side, nearest_codes(side, z / scale)) * scale - z).square() * side.energy).sum(-1)
        found = torch.where(error < best, tried, found)
        best = torch.minimum(error, best)
    return found.clamp(0, 255).to(torch.uint8)


def nearest_codes(side: SidePlan, z: Tensor) -> Tensor:
    """Code of the nearest level, [..., R] uint8; between two, the upper one. z [..., R] over its token's scale."""
    parts = []
    for width, first, end in side.layout.runs:
        levels = side.books[width].levels().to(z.device)
        parts.append(nearest(z[..., first:end].contiguous(), levels))
    return torch.cat(parts, dim=-1).to(torch.uint8) if parts else z.to(torch.uint8)


def levels_of(side: SidePlan, code: Tensor) -> Tensor:
    """[..., R] float32: what codes [..., R] stand for, before their token's scale."""
    table = side.levels.to(code.device).flatten()
    widths = torch.tensor(side.widths, device=code.device)
    return table[code.long() + widths * (1 << MAX_WIDTH)]


def coefficients(side: SidePlan, pages: Tensor, scales: Tensor) -> Tensor:
    """What pages [..., N, page_bytes] and scales [..., N, PAGE_TOKENS] stand for, [..., R, N x PAGE_TOKENS] float32."""
    code = unpack(pages, side.layout)  # [..., N, R, PAGE_TOKENS]
    level = levels_of(side, code.transpose(-1, -2)) * scale_of(scales)[..., None]
    return level.flatten(-3, -2).transpose(-1, -2).contiguous()


def dense(side: SidePlan, pages: Tensor, scales: Tensor) -> Tensor:
    """Keys or values that pages stand for, [..., N x PAGE_TOKENS, P] float32."""
    return coefficients(side, pages, scales).transpose(-1, -2) @ side.synthesis + side.mean


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention on dense keys and values, in float32: the truth that fused kernels are held to.

    queries      [B, QH, Q, D]
    keys         [B, H, T, D], values [B, H, T, DV]; query heads QH / H in a row share one
    visible      broadcasts to [B, QH, Q, T]: whether a query may see a token; None: all
    softcap      bound that scores approach, softcap tanh(score / softcap)
    sink_logits  [QH]: learned logit of a token that has no value
    bias         broadcasts to [B, QH, Q, T]: added to scores
    returns      [B, QH, Q, DV] in the dtype of queries; zeros where a query may see nothing
    """
    shared = queries.shape[1] // keys.shape[1]
    k, v = (x.float().repeat_interleave(shared, dim=1) for x in (keys, values))
    scores = queries.float() @ k.mT * scaling
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is not None:
        sink = sink_logits.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return (weights @ v).to(queries.dtype)
