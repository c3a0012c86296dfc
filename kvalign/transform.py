"""The transform of one feature group, and which of its components are coded at a step. Knows no cache and no bytes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvalign.entropy.classes import LOWEST
from kvalign.entropy.rans import CLASS_LIMIT
from kvalign.statistics import FeatureGroup
from kvalign.token_steps import SIXTEENTHS_A_SHIFT


@dataclass(frozen=True)
class Transform:
    """The transform of one feature group; components by falling scale.

    mean       [P] float32
    analysis   [P, R] float32
    synthesis  [R, P] float32, a left inverse up to the rank: x ~ y @ synthesis + mean
    scales     [R] int16, mean magnitude of each component in sixteenths of an octave
    """

    group: FeatureGroup
    mean: Tensor
    analysis: Tensor
    synthesis: Tensor
    scales: NDArray[np.int16]

    def classes(self, step: int) -> NDArray[np.int16]:
        """Class of each component that is coded at a step: [r], r <= R, the widest components."""
        classes = (self.scales[: coded_components(self.scales, step)].astype(np.int32) - step + 2) >> 2
        return np.minimum(classes, CLASS_LIMIT).astype(np.int16)

    def token_classes(self, step: int, shifts: NDArray[np.int8]) -> NDArray[np.int16]:
        """Class of each token and component, [T, r]; r covers the finest token, and the others' rest is below LOWEST.

        shifts   [T], of each token's step, in quarter octaves
        """
        finest = step + SIXTEENTHS_A_SHIFT * int(shifts.min(initial=0))
        coded = self.classes(finest).size
        classes = ((self.scales[:coded].astype(np.int32) - step + 2) >> 2)[None, :] - shifts[:, None]
        return np.minimum(classes, CLASS_LIMIT).astype(np.int16)


def coded_components(scales: NDArray[np.int16], step: int) -> int:
    """How many of the widest components are coded at a step. scales [R], falling."""
    return int((((scales.astype(np.int32) - step + 2) >> 2) >= LOWEST).sum())
