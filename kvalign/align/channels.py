"""Size and spread of every channel of every head over a stream of tokens. Knows no model."""

import torch
from torch import Tensor


class ChannelSums:
    """Sums over tokens of N heads of D channels; about 3 N D numbers are held."""

    def __init__(self, heads: int, dim: int) -> None:
        self._tokens = 0
        self._absolute, self._total, self._squares = torch.zeros(3, heads, dim, dtype=torch.float64)
        self._shift: Tensor | None = None

    def update(self, x: Tensor) -> None:
        """Add tokens, x [T, N, D] float32."""
        if self._shift is None:
            # A channel whose mean dwarfs its spread would cancel.
            self._shift = x.double().mean(0)
        centred = x - self._shift
        self._absolute += x.abs().sum(0, dtype=torch.float64)
        self._total += centred.sum(0)
        self._squares += centred.square().sum(0)
        self._tokens += x.shape[0]

    def absolute(self) -> Tensor:
        """[N, D] float32: mean of |x|, over the largest of its head; zeros for a head of zeros."""
        return _over_largest(self._absolute)

    def variance(self) -> Tensor:
        """[N, D] float32: variance, over the largest of its head; zeros for a head that never changes."""
        mean = self._total / max(1, self._tokens)
        return _over_largest((self._squares / max(1, self._tokens) - mean.square()).clamp_min(0))


def _over_largest(x: Tensor) -> Tensor:
    return (x / x.amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)).float()
