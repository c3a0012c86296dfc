"""Undo and redo rotary positions on cached keys. Knows frequencies and pairings, not models.

Within one rotated pair (a, b) at position t, with angle t * inv_freq and an attention scale m (YaRN, longrope):

    a' = m (a cos - b sin)        b' = m (b cos + a sin)

so the inverse divides by m^2 (cos^2 + sin^2), which also removes the rounding of a 16-bit cos and sin.
Su et al. 2021, arXiv 2104.09864.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Pairing = Literal["none", "half", "interleaved"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one layer.

    pairing   none: no rotation; half: channel i with i + rotary_dim/2; interleaved: channel 2i with 2i + 1
    inv_freq  [rotary_dim / 2] float32; channels from rotary_dim on are left alone
    scaling   factor on cos and sin
    """

    pairing: Pairing
    inv_freq: Tensor
    scaling: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.numel() if self.pairing != "none" else 0

    def undo(self, keys: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys as they were before rotation, in float32.

        keys       [..., T, D] any float dtype, as cached
        positions  [T] int64
        dtype      that of the model's activations: the model rounded cos and sin to it
        """
        if self.pairing == "none":
            return keys.float()
        cos, sin = self._cos_sin(positions, dtype)
        norm = cos * cos + sin * sin
        return self._mix(keys.float(), cos / norm, -sin / norm)

    def redo(self, keys: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Inverse of undo, in the dtype of `keys`."""
        if self.pairing == "none":
            return keys
        cos, sin = self._cos_sin(positions, dtype)
        return self._mix(keys, cos, sin)

    def undo_gradient(self, gradient: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient towards the unrotated key, from the one towards the cached key: the transpose of redo."""
        if self.pairing == "none":
            return gradient.float()
        cos, sin = self._cos_sin(positions, dtype)
        return self._mix(gradient.float(), cos, -sin)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[T, rotary_dim / 2] each, rounded as the model rounds them."""
        angles = positions.float()[:, None] * self.inv_freq.float()[None, :]
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return cos.to(dtype).float(), sin.to(dtype).float()

    def _mix(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each pair turned, in the dtype of x."""
        mixed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = self.rotary_dim
        mixed[..., n:] = x[..., n:]
        (a, b), (a_out, b_out) = self._pairs(x[..., :n]), self._pairs(mixed[..., :n])
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        torch.mul(a, cos, out=a_out).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=b_out).addcmul_(a, sin)
        return mixed

    def _pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the two halves of every pair."""
        if self.pairing == "half":
            return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x[..., 0::2], x[..., 1::2]


NO_ROPE = Rope("none", torch.zeros(0))
