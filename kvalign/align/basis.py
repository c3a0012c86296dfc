"""The weighted principal basis: one orthogonal transform over all layers and heads. Knows sums, not models.

With W = F^(1/2) from the sensitivity F of each head, the coefficients of a token x are

    y = U^T W (x - mean)          x ~ mean + W^-1 U y

where U holds the leading eigenvectors of W S W, S the covariance. Squared error in y is then, to second order,
what the error costs in KL (Staniszewski and Lancucki 2025, arXiv 2511.01815, for the transform without W).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvalign.geometry import Kind
from kvalign.statistics import FeatureGroup, Statistics

# Unregularised whitening blows up in directions the loss never felt.
_RIDGE = 0.05


@dataclass(frozen=True)
class Basis:
    """The transform of one feature group.

    mean        [P] float32
    weights     per layer of the group, [H, D, D] float32, symmetric positive definite: W of each head
    directions  [P, R] float32, orthonormal columns by falling variance: U
    variance    [R] float32, of each coefficient over the calibration text
    """

    group: FeatureGroup
    mean: Tensor
    weights: tuple[Tensor, ...]
    directions: Tensor
    variance: Tensor

    def analysis(self) -> Tensor:
        """[P, R]: coefficients are (x - mean) @ analysis."""
        return _each_head(self.weights, self.directions)

    def synthesis(self) -> Tensor:
        """[R, P]: x is coefficients @ synthesis + mean."""
        return _each_head(tuple(torch.linalg.inv(w) for w in self.weights), self.directions).T.contiguous()


def fit_basis(statistics: Statistics, group: FeatureGroup, weights: tuple[Tensor, ...]) -> Basis:
    """All P directions of one group, widest first. O(P^3): about a minute at P = 5760 on two cores."""
    moments = statistics.moments[group.name]
    weighted = _each_head(weights, _each_head(weights, moments.covariance()).T.contiguous())
    variance, directions = torch.linalg.eigh((weighted + weighted.T) / 2)
    order = torch.arange(variance.numel() - 1, -1, -1)
    return Basis(group, moments.mean(), weights, directions[:, order].contiguous(), variance[order].clamp_min(0))


def head_weights(statistics: Statistics) -> dict[str, tuple[Tensor, ...]]:
    """W of every head: for each feature group, per layer [H, D, D].

    W_h = m^(1/2) (F_h / m + 0.05 I)^(1/2) with one m for all keys and one for all values: one step then serves
    every layer and head, keys and values. Without gradients W is the identity over the kind's root mean variance.
    """
    if not statistics.gradient_count:
        return _plain_weights(statistics)
    weights = {}
    for group in statistics.groups:
        mean = _mean_sensitivity(statistics, group.kind)
        weights[group.name] = tuple(
            mean**0.5 * _matrix_root(statistics.sensitivity[f"{group.kind}.{layer}"] / statistics.gradient_count / mean)
            for layer in range(group.first_layer, group.end_layer)
        )
    return weights


def _mean_sensitivity(statistics: Statistics, kind: Kind) -> float:
    """m: mean square of the gradient towards one number of the cache."""
    matrices = [outer for name, outer in statistics.sensitivity.items() if name.startswith(kind)]
    diagonals = torch.cat([outer.diagonal(dim1=1, dim2=2).flatten() for outer in matrices])
    return float(diagonals.mean()) / statistics.gradient_count


def _plain_weights(statistics: Statistics) -> dict[str, tuple[Tensor, ...]]:
    weights = {}
    for group in statistics.groups:
        variances = [
            statistics.moments[other.name].covariance().diagonal()
            for other in statistics.groups
            if other.kind == group.kind
        ]
        scale = float(torch.cat(variances).mean().clamp_min(1e-30)) ** -0.5
        weights[group.name] = tuple(
            scale * torch.eye(layer.head_dim(group.kind)).repeat(layer.kv_heads, 1, 1)
            for layer in statistics.geometry.layers[group.first_layer : group.end_layer]
        )
    return weights


def _matrix_root(normalised: Tensor) -> Tensor:
    """(F + ridge)^(1/2) of each head, [H, D, D]."""
    values, vectors = torch.linalg.eigh(normalised.double())
    return ((vectors * (values.clamp_min(0) + _RIDGE).sqrt()[:, None, :]) @ vectors.mT).float()


def _each_head(blocks: tuple[Tensor, ...], x: Tensor) -> Tensor:
    """Block-diagonal product: each head's [D, D] block times its rows of x [P, C]."""
    parts, start = [], 0
    for block in blocks:
        heads, dim, _ = block.shape
        rows = x[start : start + heads * dim].unflatten(0, (heads, dim))
        parts.append((block @ rows).flatten(0, 1))
        start += heads * dim
    return torch.cat(parts)


def save_bases(bases: Sequence[Basis], path: Path) -> None:
    """One safetensors file; about 4 P^2 bytes a group."""
    tensors: dict[str, Tensor] = {}
    for basis in bases:
        name = basis.group.name
        tensors[f"{name}/mean"] = basis.mean
        tensors[f"{name}/directions"] = basis.directions
        tensors[f"{name}/variance"] = basis.variance
        tensors |= {f"{name}/weights/{index}": weight.contiguous() for index, weight in enumerate(basis.weights)}
    save_file(tensors, path, metadata={"groups": json.dumps([asdict(basis.group) for basis in bases])})


def load_bases(path: Path) -> list[Basis]:
    with safe_open(path, "pt") as file:
        groups = [FeatureGroup(**item) for item in json.loads(file.metadata()["groups"])]
        return [
            Basis(
                group,
                file.get_tensor(f"{group.name}/mean"),
                tuple(
                    file.get_tensor(f"{group.name}/weights/{index}")
                    for index in range(group.end_layer - group.first_layer)
                ),
                file.get_tensor(f"{group.name}/directions"),
                file.get_tensor(f"{group.name}/variance"),
            )
            for group in groups
        ]
