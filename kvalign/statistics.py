"""Streaming sums over calibration text: means, scatter, sensitivity. Sums add, so they resume and merge.

Knows features and gradients as matrices; nothing of models, files of text, or what the sums are for.
"""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvalign.geometry import KINDS, Geometry, Kind

_DENSE_WIDTH = 8192


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


def feature_groups(geometry: Geometry, layer_group_size: int | None = None) -> list[FeatureGroup]:
    """Keys then values, cut into runs of layers.

    layer_group_size None takes as many layers as keep a group within 8192 features: its scatter is then at most
    256 MiB in float32 and its eigendecomposition about a minute on two cores.
    """
    groups = []
    for kind in KINDS:
        offsets = geometry.offsets(kind)
        first = 0
        while first < len(geometry.layers):
            end = first + 1
            while end < len(geometry.layers) and (
                end - first < layer_group_size
                if layer_group_size
                else offsets[end + 1] - offsets[first] <= _DENSE_WIDTH
            ):
                end += 1
            groups.append(FeatureGroup(kind, first, end, offsets[first], offsets[end]))
            first = end
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

    moments      one for each feature group, by name
    sensitivity  per kind and layer, [H, D, D]: sum of g g^T, g the gradient of the loss towards one head's entry
    """

    groups: list[FeatureGroup]
    geometry: Geometry
    moments: dict[str, Moments] = field(default_factory=dict)
    sensitivity: dict[str, Tensor] = field(default_factory=dict)
    gradient_count: int = 0
    gradient_sequences: int = 0
    sequences: int = 0

    @property
    def passes(self) -> int:
        """Sequences summed so far, forward and backward."""
        return self.sequences + self.gradient_sequences

    def update(self, features: dict[Kind, Tensor]) -> None:
        """Add one sequence; features [T, P] for each kind."""
        for group in self.groups:
            x = features[group.kind][:, group.start : group.stop]
            if group.name not in self.moments:
                self.moments[group.name] = Moments.about(x.mean(0))
            self.moments[group.name].update(x)
        self.sequences += 1

    def update_sensitivity(self, gradients: dict[Kind, Tensor]) -> None:
        """Add one sequence's gradients; [T, P] for each kind."""
        for kind in KINDS:
            offsets = self.geometry.offsets(kind)
            for index, layer in enumerate(self.geometry.layers):
                columns = gradients[kind][:, offsets[index] : offsets[index + 1]]
                g = columns.unflatten(1, (layer.kv_heads, layer.head_dim(kind)))
                outer = torch.einsum("thd,the->hde", g, g)
                name = f"{kind}.{index}"
                self.sensitivity[name] = self.sensitivity.get(name, 0) + outer
        self.gradient_count += gradients["keys"].shape[0]
        self.gradient_sequences += 1

    def merge(self, other: "Statistics") -> None:
        """Add the sums of another part of the text, on the same geometry and groups."""
        for name, moments in other.moments.items():
            if name in self.moments:
                self.moments[name].merge(moments)
            else:
                self.moments[name] = moments
        for name, outer in other.sensitivity.items():
            self.sensitivity[name] = self.sensitivity.get(name, 0) + outer
        self.gradient_count += other.gradient_count
        self.gradient_sequences += other.gradient_sequences
        self.sequences += other.sequences

    def save(self, path: Path) -> None:
        """Write atomically; about 4 P^2 bytes a group."""
        tensors = {f"sensitivity.{name}": outer.contiguous() for name, outer in self.sensitivity.items()}
        for name, moments in self.moments.items():
            tensors[f"moments.{name}.shift"] = moments.shift
            tensors[f"moments.{name}.total"] = moments.total
            tensors[f"moments.{name}.scatter"] = moments.scatter
            tensors[f"moments.{name}.count"] = torch.tensor(moments.count)
        counts = [self.gradient_count, self.gradient_sequences, self.sequences]
        tensors["counts"] = torch.tensor(counts)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, groups: list[FeatureGroup], geometry: Geometry) -> "Statistics":
        tensors = load_file(path)
        statistics = cls(groups, geometry)
        for group in groups:
            part = {key: tensors[f"moments.{group.name}.{key}"] for key in ("shift", "total", "scatter", "count")}
            statistics.moments[group.name] = Moments(int(part["count"]), part["shift"], part["total"], part["scatter"])
        statistics.sensitivity = {
            name.removeprefix("sensitivity."): outer
            for name, outer in tensors.items()
            if name.startswith("sensitivity.")
        }
        statistics.gradient_count, statistics.gradient_sequences, statistics.sequences = tensors["counts"].tolist()
        return statistics
