"""The weighted principal basis: one orthogonal transform over all layers and heads. Knows sums, not models.

With W = F^(1/2) from the sensitivity F of each head, and B the regression of x on what the recomputed layers show of
the same token (its features f), the coefficients of a token x are

    y = U^T W (x - expected)          x ~ expected + W^-1 U y          expected = intercept + B^T f

where U holds the leading eigenvectors of W S W, S the covariance of what B leaves. Squared error in y is then, to
second order, what the error costs in KL (Staniszewski and Lancucki 2025, arXiv 2511.01815: the transform alone).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvalign.geometry import KINDS, Kind
from kvalign.statistics import FeatureGroup, Statistics

# Share of the features' mean variance added to each, so that directions hardly seen predict nothing.
_FEATURE_RIDGE = 1e-3
# Unregularised whitening blows up in directions the loss never felt.
_RIDGE = 0.05


@dataclass(frozen=True)
class Basis:
    """The transform of one feature group.

    intercept   [P] float32: the expected token whose features are zero
    predictor   [F, P] float32: B; F is 0 when no layer is recomputed
    weights     per layer of the group, [H, D, D] float32, symmetric positive definite: W of each head
    directions  [P, R] float32, orthonormal columns by falling variance: U
    variance    [R] float32, of each coefficient over the calibration text
    """

    group: FeatureGroup
    intercept: Tensor
    predictor: Tensor
    weights: tuple[Tensor, ...]
    directions: Tensor
    variance: Tensor

    def analysis(self) -> Tensor:
        """[P, R]: coefficients are (x - expected) @ analysis."""
        return _each_head(self.weights, self.directions)

    def synthesis(self) -> Tensor:
        """[R, P]: x is coefficients @ synthesis + expected."""
        return _each_head(tuple(torch.linalg.inv(w) for w in self.weights), self.directions).T.contiguous()


def fit_basis(statistics: Statistics, group: FeatureGroup, weights: tuple[Tensor, ...]) -> Basis:
    """All P directions of one group, widest first. O(P^3): about a minute at P = 5760 on two cores."""
    moments = statistics.moments_of(group)
    predictor, explained = _regression(statistics, group)
    left = moments.covariance() - explained
    weighted = _each_head(weights, _each_head(weights, left).T.contiguous())
    variance, directions = torch.linalg.eigh((weighted + weighted.T) / 2)
    order = torch.arange(variance.numel() - 1, -1, -1)
    assert statistics.features is not None
    return Basis(
        group,
        moments.mean() - statistics.features.mean() @ predictor,
        predictor,
        weights,
        directions[:, order].contiguous(),
        variance[order].clamp_min(0),
    )


def _regression(statistics: Statistics, group: FeatureGroup) -> tuple[Tensor, Tensor]:
    """Ridge regression of a group on the features: B [F, P], and the covariance that it takes away, [P, P]."""
    assert statistics.features is not None
    own = statistics.features.covariance().double()
    cross = statistics.cross_covariance(group).double()
    if not own.numel():
        return cross.float(), torch.zeros(group.width, group.width)
    ridge = _FEATURE_RIDGE * own.diagonal().mean() * torch.eye(own.shape[0], dtype=own.dtype)
    predictor = torch.linalg.solve(own + ridge, cross)
    # Cov(x - B^T f) = S - B^T C - C^T B + B^T V B, with V B = C - ridge B.
    return predictor.float(), (predictor.T @ (cross + ridge @ predictor)).float()


def head_weights(statistics: Statistics) -> dict[str, tuple[Tensor, ...]]:
    """W of every head: for each feature group, per layer [H, D, D].

    W_h = m^(1/2) (F_h / m + 0.05 I)^(1/2) with one m for all keys and one for all values: one step then serves
    every layer and head, keys and values. Without gradients W is the identity over the kind's root mean variance.
    """
    if not statistics.gradient_weight:
        return _plain_weights(statistics)
    weights = {}
    for group in statistics.groups:
        mean = _mean_sensitivity(statistics, group.kind)
        weights[group.name] = tuple(
            mean**0.5 * matrix_root(statistics.sensitivity[f"{group.kind}.{layer}"] / statistics.gradient_weight / mean)
            for layer in range(group.first_layer, group.end_layer)
        )
    return weights


def _mean_sensitivity(statistics: Statistics, kind: Kind) -> float:
    """m: mean square of the gradient towards one number of the cache."""
    coded = {layer for group in statistics.groups for layer in range(group.first_layer, group.end_layer)}
    matrices = [statistics.sensitivity[f"{kind}.{layer}"] for layer in sorted(coded)]
    diagonals = torch.cat([outer.diagonal(dim1=1, dim2=2).flatten() for outer in matrices])
    return float(diagonals.mean()) / statistics.gradient_weight


def sensitivity_shares(statistics: Statistics) -> dict[Kind, Tensor]:
    """Share of each layer in tr F S over all layers, keys and values; [L] float32 for each kind; empty without F.

    tr F S / 2 is the KL, to second order, when a layer's entries are replaced by noise of their own covariance S.
    """
    if not statistics.gradient_weight:
        return {}
    costs: dict[Kind, Tensor] = {}
    for kind in KINDS:
        layers = []
        for index, layer in enumerate(statistics.geometry.layers):
            heads, dim = layer.kv_heads, layer.head_dim(kind)
            covariance = statistics.layer_moments(kind, index)[1].unflatten(0, (heads, dim)).unflatten(2, (heads, dim))
            own = covariance.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
            layers.append((statistics.sensitivity[f"{kind}.{index}"].double() * own.double()).sum().clamp_min(0))
        costs[kind] = torch.stack(layers)
    total = sum(float(cost.sum()) for cost in costs.values())
    if not total > 0:  # nothing that the model says depends on its cache
        return {}
    return {kind: (cost / total).float() for kind, cost in costs.items()}


def _plain_weights(statistics: Statistics) -> dict[str, tuple[Tensor, ...]]:
    weights = {}
    for group in statistics.groups:
        variances = [
            statistics.moments_of(other).covariance().diagonal()
            for other in statistics.groups
            if other.kind == group.kind
        ]
        scale = float(torch.cat(variances).mean().clamp_min(1e-30)) ** -0.5
        weights[group.name] = tuple(
            scale * torch.eye(layer.head_dim(group.kind)).repeat(layer.kv_heads, 1, 1)
            for layer in statistics.geometry.layers[group.first_layer : group.end_layer]
        )
    return weights


def matrix_root(normalised: Tensor) -> Tensor:
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
        tensors[f"{name}/intercept"] = basis.intercept
        tensors[f"{name}/predictor"] = basis.predictor.contiguous()
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
                file.get_tensor(f"{group.name}/intercept"),
                file.get_tensor(f"{group.name}/predictor"),
                tuple(
                    file.get_tensor(f"{group.name}/weights/{index}")
                    for index in range(group.end_layer - group.first_layer)
                ),
                file.get_tensor(f"{group.name}/directions"),
                file.get_tensor(f"{group.name}/variance"),
            )
            for group in groups
        ]
