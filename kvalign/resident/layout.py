"""How the codes of a page of tokens lie in bytes, and the numbers codes stand for. Knows no model and no attention.

A page holds PAGE_TOKENS tokens of one layer's keys or values, one coefficient after another: widths fall from
coefficient to coefficient, and each takes as many bits of every token as its width says. A code is cut into planes of
8, 4, 2 and 1 bits, the widest first and lowest; in a plane of b bits, token t stands in byte t mod 16 b at bit
b (t div 16 b), so that a processor takes many tokens apart with one shift.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

PAGE_TOKENS = 128
MAX_WIDTH = 8
SCALE_STEPS = 8  # a token's scale in eighths of an octave
SCALE_BIAS = 128
_PLANES = (8, 4, 2, 1)


@dataclass(frozen=True)
class PageLayout:
    """Where each coefficient lies in a page.

    widths   bits of each coefficient, 1 to 8, falling
    """

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(not 1 <= width <= MAX_WIDTH for width in self.widths) or list(self.widths) != sorted(
            self.widths, reverse=True
        ):
            raise ValueError(f"widths of a page are 1 to {MAX_WIDTH} and fall")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each coefficient."""
        found, at = [], 0
        for width in self.widths:
            found.append(at)
            at += coefficient_bytes(width)
        return tuple(found)

    @property
    def page_bytes(self) -> int:
        return sum(coefficient_bytes(width) for width in self.widths)

    @cached_property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(width, first coefficient, end) of each stretch of one width."""
        found: list[tuple[int, int, int]] = []
        for index, width in enumerate(self.widths):
            if found and found[-1][0] == width:
                found[-1] = (width, found[-1][1], index + 1)
            else:
                found.append((width, index, index + 1))
        return tuple(found)


def coefficient_bytes(width: int) -> int:
    """Bytes of one coefficient of all tokens of a page."""
    return width * PAGE_TOKENS // 8


def planes(width: int) -> list[tuple[int, int, int]]:
    """(bits, first bit of the code, first byte within the coefficient) of each plane of a code."""
    found, bit, at = [], 0, 0
    for bits in _PLANES:
        if width & bits:
            found.append((bits, bit, at))
            bit += bits
            at += coefficient_bytes(bits)
    return found


def pack(codes: Tensor, layout: PageLayout) -> Tensor:
    """Codes [..., R, PAGE_TOKENS] uint8, each below 2 ** its width, as pages [..., page_bytes] uint8."""
    parts = []
    for width, first, end in layout.runs:
        run = codes[..., first:end, :].to(torch.int32)
        cut = []
        for bits, bit, _ in planes(width):
            per_byte = 8 // bits
            fields = (run >> bit & (1 << bits) - 1).unflatten(-1, (per_byte, PAGE_TOKENS // per_byte))
            shifts = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)[:, None]
            cut.append((fields << shifts).sum(-2, dtype=torch.int32))
        parts.append(torch.cat(cut, dim=-1).flatten(-2))
    if not parts:
        return codes.new_zeros(*codes.shape[:-2], 0)
    return torch.cat(parts, dim=-1).to(torch.uint8)


def unpack(pages: Tensor, layout: PageLayout) -> Tensor:
    """Inverse of pack: codes [..., R, PAGE_TOKENS] uint8."""
    parts = []
    for width, first, end in layout.runs:
        start = layout.offsets[first]
        stop = start + (end - first) * coefficient_bytes(width)
        run = pages[..., start:stop].to(torch.int32).unflatten(-1, (end - first, coefficient_bytes(width)))
        code = torch.zeros(*run.shape[:-1], PAGE_TOKENS, dtype=torch.int32, device=pages.device)
        for bits, bit, at in planes(width):
            plane = run[..., at : at + coefficient_bytes(bits)]
            fields = torch.stack([plane >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], dim=-2)
            code |= fields.flatten(-2) << bit
        parts.append(code)
    if not parts:
        return pages.new_zeros(*pages.shape[:-1], 0, PAGE_TOKENS)
    return torch.cat(parts, dim=-2).to(torch.uint8)


@dataclass(frozen=True)
class Codebook:
    """What the codes of one width stand for: gain z (1 + bend z^2), z the code counted from the middle.

    Two numbers fitted to measured coefficients come as near to their best levels as these come to a Gaussian's
    (docs/log.md), and a processor computes them faster than it looks them up.
    """

    width: int
    gain: float
    bend: float

    @property
    def middle(self) -> float:
        return ((1 << self.width) - 1) / 2

    def levels(self) -> Tensor:
        """[2 ** width] float32, rising."""
        z = torch.arange(1 << self.width, dtype=torch.float64) - self.middle
        return (self.gain * z * (1 + self.bend * z * z)).float()

    def polynomial(self) -> tuple[float, float, float, float]:
        """c0..c3 with level = c0 + c1 u + c2 u^2 + c3 u^3, u the code itself."""
        m, a, b = self.middle, self.gain, self.gain * self.bend
        return (-a * m - b * m**3, a + 3 * b * m * m, -3 * b * m, b)

    def rises(self) -> bool:
        """Whether every code stands for more than the one before it."""
        return bool((self.levels().diff() > 0).all())


def nearest(numbers: Tensor, levels: Tensor) -> Tensor:
    """Index of the nearest of rising levels, int64; between two, the upper one."""
    return torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2, right=True)


def scale_of(code: Tensor) -> Tensor:
    """Scales that log codes stand for, float32. code: uint8."""
    return torch.exp2((code.float() - SCALE_BIAS) / SCALE_STEPS)
