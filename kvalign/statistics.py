"""Streaming sums over calibration text: means, scatter, sensitivity. Sums add, so they resume and merge.

Knows features and gradients as matrices; nothing of models, files of text, or what the sums are for.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvalign.geometry import KINDS, Geometry, Kind

_DENSE_WIDTH = 8192
_FEATURES = "features"


@dataclass(frozen=True)
class FeatureGroup:
    """Layers of keys or values that share one basis: columns start..stop of that kind's token matrix."""

    kind: Kind
    first_layer: int
    end_layer: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.kind}.{self.first_layer}-{self.end_layer - 1}"

    @property
    def width(self) -> int:
        return self.stop - self.start


def feature_groups(geometry: Geometry, layer_group_size: int | None = None, *, first: int = 0) -> list[FeatureGroup]:
    """Keys then values, the layers from `first` on cut into runs.

    layer_group_size None takes as many layers as keep a group within 8192 features: its scatter is then at most
    256 MiB in float32 and its eigendecomposition about a minute on two cores.
    """
    groups = []
    for kind in KINDS:
        offsets = geometry.offsets(kind)
        start = first
        while start < len(geometry.layers):
            end = start + 1
            while end < len(geometry.layers) and (
                end - start < layer_group_size
                if layer_group_size
                else offsets[end + 1] - offsets[start] <= _DENSE_WIDTH
            ):
                end += 1
            groups.append(FeatureGroup(kind, start, end, offsets[start], offsets[end]))
            start = end
    return groups


@dataclass
class Moments:
    """Count, mean and scatter of a stream of rows, about a fixed shift.

    The shift (mean of the first rows seen) keeps a channel whose mean dwarfs its spread, such as a biased key,
    from cancelling in float32. Chan, Golub and LeVeque 1983.
    """

    count: int
    shift: Tensor  # [P]
    total: Tensor  # [P], sum of x - shift
    scatter: Tensor  # [P, P], sum of (x - shift)(x - shift)^T

    @classmethod
    def about(cls, shift: Tensor) -> "Moments":
        width = shift.numel()
        return cls(0, shift.clone(), torch.zeros(width), torch.zeros(width, width))

    def update(self, x: Tensor) -> None:
        """Add rows x [T, P] float32; 2 T P^2 flops."""
        centred = x - self.shift
        self.count += x.shape[0]
        self.total += centred.sum(0)
        self.scatter.addmm_(centred.T, centred)

    def merge(self, other: "Moments") -> None:
        """Add another stream's sums, whatever its shift."""
        moved = other.shift - self.shift
        self.scatter += other.scatter
        self.scatter += torch.outer(other.total, moved) + torch.outer(moved, other.total)
        self.scatter += other.count * torch.outer(moved, moved)
        self.total += other.total + other.count * moved
        self.count += other.count

    def mean(self) -> Tensor:
        return self.shift + self.total / self.count

    def covariance(self) -> Tensor:
        """[P, P], about the mean, divided by the count."""
        offset = self.total / self.count
        return self.scatter / self.count - torch.outer(offset, offset)


@dataclass
class Statistics:
    """All sums of one calibration.

    features     moments of what predicts the groups, [F]; F may be 0
    moments      one for each of `summed`, by name
    cross        for each group, [F, P]: sum of (f - shift)(x - shift)^T, each about the shift of its moments
    sensitivity  per kind and layer, [H, D, D]: weighted sum of g g^T, g the gradient of the loss towards one head's
                 entry
    """

    groups: list[FeatureGroup]
    geometry: Geometry
    features: Moments | None = None
    moments: dict[str, Moments] = field(default_factory=dict)
    cross: dict[str, Tensor] = field(default_factory=dict)
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    gradient_weight: float = 0.0
    sequences: int = 0

    @cached_property
    def summed(self) -> list[FeatureGroup]:
        """The groups, the first of each kind with all layers below it, which are in no group."""
        return [
            replace(group, first_layer=0, start=0)
            if all(other.kind != group.kind for other in self.groups[:index])
            else group
            for index, group in enumerate(self.groups)
        ]

    def moments_of(self, group: FeatureGroup) -> Moments:
        """Of some layers within one of `summed`: views of its sums."""
        whole = next(
            whole
            for whole in self.summed
            if whole.kind == group.kind and whole.start <= group.start and group.stop <= whole.stop
        )
        own = slice(group.start - whole.start, group.stop - whole.start)
        moments = self.moments[whole.name]
        return Moments(moments.count, moments.shift[own], moments.total[own], moments.scatter[own, own])

    def whole(self) -> "Statistics":
        """The same sums with every layer in a group, predicted by nothing: what codecs that store all layers fit on."""
        found = Statistics(self.summed, self.geometry, Moments.about(torch.zeros(0)), self.moments)
        found.cross = {group.name: torch.zeros(0, group.width) for group in self.summed}
        return found

    def update(self, columns: dict[Kind, Tensor], features: Tensor) -> None:
        """Add one sequence; columns [T, P] over all layers for each kind, features [T, F]. 2 T (P + F) P flops."""
        if self.features is None:
            self.features = Moments.about(features.mean(0))
        self.features.update(features)
        for group in self.summed:
            x = columns[group.kind][:, group.start : group.stop]
            moments = self.moments.setdefault(group.name, Moments.about(x.mean(0)))
            moments.update(x)
        for group in self.groups:
            x = columns[group.kind][:, group.start : group.stop]
            cross = self.cross.setdefault(group.name, torch.zeros(features.shape[1], group.width))
            cross.addmm_((features - self.features.shift).T, x - self.moments_of(group).shift)
        self.sequences += 1

    def layer_moments(self, kind: Kind, layer: int) -> tuple[Tensor, Tensor]:
        """Mean [P] and covariance [P, P] of one layer alone."""
        offsets = self.geometry.offsets(kind)
        own = self.moments_of(FeatureGroup(kind, layer, layer + 1, offsets[layer], offsets[layer + 1]))
        return own.mean(), own.covariance()

    def update_sensitivity(self, gradients: dict[Kind, Tensor], weights: Tensor) -> None:
        """Add one sequence's gradients, [T, P] for each kind, each token with its weight, [T]."""
        for kind in KINDS:
            offsets = self.geometry.offsets(kind)
            for index, layer in enumerate(self.geometry.layers):
                columns = gradients[kind][:, offsets[index] : offsets[index + 1]]
                g = columns.unflatten(1, (layer.kv_heads, layer.head_dim(kind)))
                outer = torch.einsum("thd,the->hde", g * weights[:, None, None], g)
                name = f"{kind}.{index}"
                self.sensitivity[name] = self.sensitivity.get(name, 0) + outer
        self.gradient_weight += float(weights.sum())

    def add_sensitivity(self, matrices: dict[Kind, list[Tensor]], weight: float) -> None:
        """Add one sequence's mean matrices, per kind and layer [H, D, D], over tokens of that weight in all."""
        for kind in KINDS:
            for index, matrix in enumerate(matrices[kind]):
                name = f"{kind}.{index}"
                self.sensitivity[name] = self.sensitivity.get(name, 0) + weight * matrix
        self.gradient_weight += weight

    def cross_covariance(self, group: FeatureGroup) -> Tensor:
        """Of features and a group, [F, P]: about the means, divided by the count."""
        assert self.features is not None
        moments = self.moments_of(group)
        return self.cross[group.name] / moments.count - torch.outer(
            self.features.total / moments.count, moments.total / moments.count
        )

    def merge(self, other: "Statistics") -> None:
        """Add the sums of another part of the text, on the same geometry, groups and features."""
        if other.features is None:
            return
        if self.features is None:
            self.features = Moments.about(other.features.shift)
        feature_move = other.features.shift - self.features.shift
        for name, theirs in other.moments.items():
            self.moments.setdefault(name, Moments.about(theirs.shift))
        for group in self.groups:
            ours, theirs = self.moments_of(group), other.moments_of(group)
            move = theirs.shift - ours.shift
            cross = self.cross.setdefault(group.name, torch.zeros_like(other.cross[group.name]))
            cross += other.cross[group.name] + torch.outer(other.features.total, move)
            cross += torch.outer(feature_move, theirs.total + theirs.count * move)
        for name, theirs in other.moments.items():
            self.moments[name].merge(theirs)
        self.features.merge(other.features)
        for name, outer in other.sensitivity.items():
            self.sensitivity[name] = self.sensitivity.get(name, 0) + outer
        self.gradient_weight += other.gradient_weight
        self.sequences += other.sequences

    def save(self, path: Path) -> None:
        """Write atomically; about 4 P^2 bytes a group."""
        tensors = {f"sensitivity.{name}": outer.contiguous() for name, outer in self.sensitivity.items()}
        for name, moments in self._all_moments().items():
            tensors[f"moments.{name}.shift"] = moments.shift
            tensors[f"moments.{name}.total"] = moments.total
            tensors[f"moments.{name}.scatter"] = moments.scatter
            tensors[f"moments.{name}.count"] = torch.tensor(moments.count)
        for name, cross in self.cross.items():
            tensors[f"cross.{name}"] = cross
        tensors["gradient_weight"] = torch.tensor(self.gradient_weight, dtype=torch.float64)
        tensors["sequences"] = torch.tensor(self.sequences)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, groups: list[FeatureGroup], geometry: Geometry) -> "Statistics":
        tensors = load_file(path)

        def moments(name: str) -> Moments:
            shift, total, scatter, count = (
                tensors[f"moments.{name}.{key}"] for key in ("shift", "total", "scatter", "count")
            )
            return Moments(int(count), shift, total, scatter)

        statistics = cls(groups, geometry, moments(_FEATURES))
        for group in statistics.summed:
            statistics.moments[group.name] = moments(group.name)
        for group in groups:
            statistics.cross[group.name] = tensors[f"cross.{group.name}"]
        statistics.sensitivity = {
            name.removeprefix("sensitivity."): outer
            for name, outer in tensors.items()
            if name.startswith("sensitivity.")
        }
        statistics.gradient_weight = float(tensors["gradient_weight"])
        statistics.sequences = int(tensors["sequences"])
        return statistics

    def _all_moments(self) -> dict[str, Moments]:
        assert self.features is not None
        return {_FEATURES: self.features, **self.moments}
