"""A step for each token: finer for tokens that the prefix's last queries attend to. Knows attention, not symbols."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.quantize import step_size

# Shifts count quarter octaves of the step; a token's step is at most one and a half octaves finer.
FINEST_SHIFT, COARSEST_SHIFT = -6, 8
SIXTEENTHS_A_SHIFT = 4


def shifts_by_attention(received: Sequence[Tensor], beta: float) -> NDArray[np.int8]:
    """Shift of each token's step, [T] int8.

    received  per layer, [T]: mean square attention that each token receives
    beta      octaves of step for each octave of attention

    step_t = step 2^(-beta (log2 a_t - mean)), a_t the root mean square attention over layers.
    """
    level = torch.stack(list(received)).mean(0).clamp_min(1e-20).log2() / 2
    shift = -4 * beta * (level - level.mean())
    return shift.round().clamp(FINEST_SHIFT, COARSEST_SHIFT).to(torch.int8).numpy()


def step_sizes(step: int, shifts: NDArray[np.int8]) -> NDArray[np.float32]:
    """Size of each token's step, [T, 1]."""
    known = {shift: step_size(step + SIXTEENTHS_A_SHIFT * int(shift)) for shift in np.unique(shifts)}
    return np.array([known[shift] for shift in shifts], dtype=np.float32).reshape(-1, 1)


def shift_bytes(shifts: NDArray[np.int8]) -> bytes:
    return shifts.tobytes() if shifts.any() else b""
