"""The transform of one feature group, and which of its components are coded at a step. Knows no cache and no bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.align.basis import Basis
from kvalign.compiled import njit
from kvalign.entropy.classes import LOWEST
from kvalign.entropy.rans import CLASS_LIMIT
from kvalign.statistics import FeatureGroup
from kvalign.token_steps import SIXTEENTHS_A_SHIFT


@dataclass(frozen=True)
class Transform:
    """The transform of one feature group, its prediction folded in; components by falling scale.

    intercept  [P] float32
    analysis   [P + F, R]: coefficients are [x - intercept | features] @ analysis
    synthesis  [F + R, P], a left inverse up to the rank: x ~ [features | coefficients] @ synthesis + intercept
    scales     [R] int16, mean magnitude of each component in sixteenths of an octave

    analysis and synthesis are in the dtype that products run in.
    """

    group: FeatureGroup
    intercept: Tensor
    analysis: Tensor
    synthesis: Tensor
    scales: NDArray[np.int16]

    @classmethod
    def of(cls, basis: Basis, scales: NDArray[np.int16]) -> "Transform":
        """In float32; 2 P R (D + F) flops."""
        analysis = basis.analysis()
        return cls(
            basis.group,
            basis.intercept,
            torch.cat([analysis, -(basis.predictor @ analysis)]),
            torch.cat([basis.predictor, basis.synthesis()]),
            scales,
        )

    @property
    def features(self) -> int:
        """F."""
        return self.analysis.shape[0] - self.group.width

    def ordered(self, order: Tensor, scales: NDArray[np.int16]) -> "Transform":
        """With components in another order; order [R] int64, scales [R] in that order."""
        synthesis = torch.cat([self.synthesis[: self.features], self.synthesis[self.features :][order]])
        return replace(self, analysis=self.analysis[:, order].contiguous(), synthesis=synthesis, scales=scales)

    def to(self, dtype: torch.dtype) -> "Transform":
        """With products in a dtype: float32 is exact to its rounding; bfloat16 errs by 2^-9 of each number."""
        return replace(self, analysis=self.analysis.to(dtype), synthesis=self.synthesis.to(dtype))

    def coefficients(self, x: Tensor, features: Tensor, coded: int) -> Tensor:
        """The first `coded` coefficients, [T, coded] in the dtype of products. x [T, P], features [T, F] float32."""
        seen = torch.empty(x.shape[0], self.analysis.shape[0], dtype=self.analysis.dtype)
        seen[:, : x.shape[1]] = x - self.intercept
        seen[:, x.shape[1] :] = features
        return seen @ self.analysis[:, :coded]

    def tokens(self, coefficients: Tensor, features: Tensor) -> Tensor:
        """Inverse of coefficients, [T, P] in the dtype of products. coefficients [T, coded], features [T, F]."""
        dtype = self.synthesis.dtype
        known = torch.cat([features.to(dtype), coefficients.to(dtype)], dim=1)
        return torch.addmm(self.intercept.to(dtype), known, self.synthesis[: known.shape[1]])

    def classes(self, step: int) -> NDArray[np.int16]:
        """Class of each component that is coded at a step: [r], r <= R, the widest components."""
        classes = (self.scales[: coded_components(self.scales, step)].astype(np.int32) - step + 2) >> 2
        return np.minimum(classes, CLASS_LIMIT).astype(np.int16)


def token_classes(
    transforms: Sequence[Transform], step: int, shifts: NDArray[np.int8]
) -> tuple[NDArray[np.int16], list[int]]:
    """Class of each token and component over all groups side by side, [T, r], and each group's share of r.

    shifts   [T], of each token's step, in quarter octaves

    r covers the finest token; what it codes and others do not has a class below LOWEST for those.
    """
    finest = step + SIXTEENTHS_A_SHIFT * int(shifts.min(initial=0))
    coded = [coded_components(transform.scales, finest) for transform in transforms]
    scales = np.concatenate([t.scales[:count] for t, count in zip(transforms, coded, strict=True)]).astype(np.int32)
    classes = np.empty((shifts.size, scales.size), dtype=np.int16)
    _fill_classes((scales - step + 2) >> 2, shifts, classes)
    return classes, coded


@njit(cache=True)
def _fill_classes(plain, shifts, classes):  # type: ignore[no-untyped-def]
    for t in range(classes.shape[0]):
        for r in range(classes.shape[1]):
            classes[t, r] = min(plain[r] - shifts[t], CLASS_LIMIT)


def coded_components(scales: NDArray[np.int16], step: int) -> int:
    """How many of the widest components are coded at a step. scales [R], falling."""
    return int((((scales.astype(np.int32) - step + 2) >> 2) >= LOWEST).sum())
