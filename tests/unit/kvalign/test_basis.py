"""The weighted basis against brute force, on rotated covariances where a transposed or mis-scaled one shows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
from synthetic import SHAPE, CacheSource
from torch import Tensor

from kvalign.align.basis import Basis, fit_basis, head_weights, load_bases, save_bases
from kvalign.geometry import KINDS, Geometry, Kind, LayerGeometry
from kvalign.statistics import FeatureGroup, Statistics, feature_groups
from kvalign.transform import Transform

RIDGE = 0.05


def summed(source: CacheSource, *, layer_group_size: int | None = None, gradients: bool = True) -> Statistics:
    geometry = source.shape.geometry
    statistics = Statistics(feature_groups(geometry, layer_group_size), geometry)
    for seed in range(3):
        statistics.update(source.features(300, seed), torch.zeros(300, 0))
        if gradients:
            gradients_of_seed = CacheSource(source.shape, seed=50).features(100, 900 + seed)
            statistics.update_sensitivity(gradients_of_seed, torch.ones(100))
    return statistics


def dense(weights: tuple[Tensor, ...]) -> Tensor:
    """All heads' weights as one block-diagonal matrix in float64."""
    return torch.block_diag(*[head.double() for weight in weights for head in weight])


@pytest.fixture(scope="module")
def statistics(source: CacheSource) -> Statistics:
    return summed(source)


@pytest.fixture(scope="module")
def bases(statistics: Statistics) -> list[Basis]:
    weights = head_weights(statistics)
    return [fit_basis(statistics, group, weights[group.name]) for group in statistics.groups]


def test_directions_are_the_eigenvectors_of_the_weighted_covariance(statistics: Statistics, bases: list[Basis]) -> None:
    for basis in bases:
        W = dense(basis.weights)
        S = statistics.moments_of(basis.group).covariance().double()
        weighted = (W @ S @ W).numpy()
        values, _ = scipy.linalg.eigh(weighted)
        U = basis.directions.double()
        torch.testing.assert_close(U.T @ U, torch.eye(U.shape[1], dtype=torch.float64), rtol=0, atol=1e-5)
        scale = float(values[-1])
        torch.testing.assert_close(
            basis.variance.double(), torch.tensor(values[::-1].copy()), rtol=1e-3, atol=1e-5 * scale
        )
        assert (basis.variance[1:] <= basis.variance[:-1]).all()
        residual = torch.tensor(weighted) @ U - U * basis.variance.double()
        assert residual.abs().max() < 1e-4 * scale


def test_coefficients_are_decorrelated_and_have_the_variance_told(source: CacheSource, bases: list[Basis]) -> None:
    for basis in bases:
        x = torch.cat([source.features(300, seed)[basis.group.kind] for seed in range(3)]).double()
        y = (x - basis.intercept.double()) @ basis.analysis().double()
        covariance = y.T @ y / len(y)
        expected = torch.diag(basis.variance.double())
        assert (covariance - expected).abs().max() < 1e-3 * float(basis.variance[0])


def test_synthesis_undoes_analysis(bases: list[Basis]) -> None:
    for basis in bases:
        product = basis.analysis().double() @ basis.synthesis().double()
        torch.testing.assert_close(product, torch.eye(len(product), dtype=torch.float64), rtol=0, atol=1e-4)


def test_an_error_in_a_coefficient_costs_its_square_in_the_metric(bases: list[Basis]) -> None:
    """(e synthesis) W^2 (e synthesis)^T = |e|^2 for every e: one step fits all layers, heads and kinds."""
    for basis in bases:
        errors = torch.randn(20, basis.variance.numel(), generator=torch.Generator().manual_seed(0)).double()
        moved = errors @ basis.synthesis().double()
        costs = (moved @ dense(basis.weights)).square().sum(1)
        torch.testing.assert_close(costs, errors.square().sum(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_no_basis_of_the_rank_is_nearer_in_the_metric(
    source: CacheSource, statistics: Statistics, bases: list[Basis], rank: int
) -> None:
    for basis in bases:
        W = dense(basis.weights)
        x = torch.cat([source.features(300, seed)[basis.group.kind] for seed in range(3)]).double()
        centred = x - basis.intercept.double()

        def distortion(analysis: Tensor, synthesis: Tensor, x: Tensor = centred, W: Tensor = W) -> float:
            return float(((x - x @ analysis @ synthesis) @ W).square().sum(1).mean())

        found = distortion(basis.analysis().double()[:, :rank], basis.synthesis().double()[:rank])
        dropped = float(basis.variance[rank:].sum())
        assert found == pytest.approx(dropped, rel=1e-2)
        # Brute force: the same algebra done densely, and rivals that are near but wrong.
        values, vectors = scipy.linalg.eigh((W @ statistics.moments_of(basis.group).covariance().double() @ W).numpy())
        assert found == pytest.approx(float(values[:-rank].sum()), rel=1e-2)
        U = torch.tensor(vectors[:, ::-1].copy())
        rivals = {
            "transposed": U.T[:, :rank],
            "unweighted": torch.tensor(
                scipy.linalg.eigh(statistics.moments_of(basis.group).covariance().double().numpy())[1][:, ::-1].copy()
            )[:, :rank],
            "narrowest first": U[:, -rank:],
        }
        for name, rival in rivals.items():
            worse = distortion(W @ rival, rival.T @ torch.linalg.inv(W))
            assert worse > 1.02 * found, name


def test_a_basis_that_is_mis_scaled_shows_in_the_distortion(source: CacheSource, bases: list[Basis]) -> None:
    """That the cases above can fail."""
    basis = bases[0]
    x = source.features(300, 0)["keys"] - basis.intercept
    for wrong in (
        basis.synthesis() * 1.1,
        basis.synthesis().flip(0),
        basis.directions.T @ dense(basis.weights).float(),
    ):
        off = x - x @ basis.analysis() @ wrong
        assert off.norm() > 0.05 * x.norm()


@pytest.mark.parametrize("layer_group_size", [1, 2])
def test_groups_have_bases_of_their_own(source: CacheSource, layer_group_size: int) -> None:
    statistics = summed(source, layer_group_size=layer_group_size)
    weights = head_weights(statistics)
    for group in statistics.groups:
        basis = fit_basis(statistics, group, weights[group.name])
        assert basis.directions.shape == (group.width, group.width)
        x = source.features(50, 1)[group.kind][:, group.start : group.stop]
        back = (x - basis.intercept) @ basis.analysis() @ basis.synthesis() + basis.intercept
        torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-3)


# ---- weights


def brute_weights(statistics: Statistics, kind: Kind) -> list[Tensor]:
    """(F_h + 0.05 m I)^(1/2) of every head, m the mean diagonal entry over all heads of the kind."""
    sums: list[Tensor] = []
    for layer in range(len(statistics.geometry.layers)):
        sums += list(statistics.sensitivity[f"{kind}.{layer}"].double() / statistics.gradient_weight)
    entries = [float(F[i, i]) for F in sums for i in range(len(F))]
    m = sum(entries) / len(entries)
    return [torch.tensor(scipy.linalg.sqrtm((F + RIDGE * m * torch.eye(len(F))).numpy()).real) for F in sums]


@pytest.mark.parametrize("layer_group_size", [None, 1, 2])
def test_head_weights_are_roots_of_the_sensitivity(source: CacheSource, layer_group_size: int | None) -> None:
    statistics = summed(source, layer_group_size=layer_group_size)
    weights = head_weights(statistics)
    for kind in KINDS:
        found = [
            head
            for group in statistics.groups
            if group.kind == kind
            for weight in weights[group.name]
            for head in weight
        ]
        for head, wanted in zip(found, brute_weights(statistics, kind), strict=True):
            torch.testing.assert_close(head.double(), wanted.double(), rtol=1e-3, atol=1e-4)
            assert torch.equal(head, head.T) or (head - head.T).abs().max() < 1e-5


def test_steps_of_keys_and_values_balance(source: CacheSource) -> None:
    """Gradients a hundred times larger on keys make their weights ten thousand times as costly."""
    geometry = source.shape.geometry
    statistics = Statistics(feature_groups(geometry), geometry)
    statistics.update(source.features(200, 0), torch.zeros(200, 0))
    noise = {kind: torch.randn(4000, geometry.width(kind)) for kind in KINDS}
    statistics.update_sensitivity({"keys": 100 * noise["keys"], "values": noise["values"]}, torch.ones(4000))
    weights = head_weights(statistics)
    sizes = [
        torch.cat([w.diagonal(dim1=1, dim2=2).flatten() for w in weights[g.name]]).mean() for g in statistics.groups
    ]
    assert float(sizes[0] / sizes[1]) == pytest.approx(100, rel=0.05)
    # White gradients of unit size: W is sqrt(1.05) times the identity.
    torch.testing.assert_close(weights["values.0-2"][1][0], 1.05**0.5 * torch.eye(4), rtol=0, atol=0.1)


def test_heads_that_were_never_felt_keep_the_ridge(source: CacheSource) -> None:
    geometry = source.shape.geometry
    statistics = Statistics(feature_groups(geometry), geometry)
    statistics.update(source.features(200, 0), torch.zeros(200, 0))
    gradients = source.features(200, 1)
    gradients["keys"][:, :8] = 0  # the first head
    statistics.update_sensitivity(gradients, torch.ones(200))
    first = head_weights(statistics)["keys.0-2"][0][0]
    assert torch.linalg.eigvalsh(first).min() > 0
    torch.testing.assert_close(first / first[0, 0], torch.eye(8), rtol=0, atol=1e-5)


def test_without_gradients_each_kind_is_scaled_to_unit_variance(source: CacheSource) -> None:
    statistics = summed(source, gradients=False)
    weights = head_weights(statistics)
    for group in statistics.groups:
        variance = statistics.moments_of(group).covariance().diagonal().mean()
        for weight in weights[group.name]:
            for head in weight:
                torch.testing.assert_close(head, variance**-0.5 * torch.eye(len(head)))


# ---- prediction


@dataclass(frozen=True)
class Predicted:
    """Tokens x = B^T f + noise, with the sums over them; f correlated, its scales apart, its mean not zero."""

    statistics: Statistics
    features: Tensor
    tokens: dict[Kind, Tensor]
    predictor: dict[Kind, Tensor]

    def basis(self, group: int) -> Basis:
        chosen = self.statistics.groups[group]
        return fit_basis(self.statistics, chosen, head_weights(self.statistics)[chosen.name])


def predicted(source: CacheSource, *, features: int = 5, noise: float = 1.0, tokens: int = 4000) -> Predicted:
    geometry = source.shape.geometry
    generator = torch.Generator().manual_seed(7)
    mixing = torch.randn(features, features, generator=generator) + 3 * torch.eye(features)
    f = torch.randn(tokens, features, generator=generator) @ mixing + 4
    B = {kind: torch.randn(features, geometry.width(kind), generator=generator) for kind in KINDS}
    x = {kind: f @ B[kind] + noise * rows for kind, rows in source.features(tokens, 1).items()}
    statistics = Statistics(feature_groups(geometry), geometry)
    for part in torch.arange(tokens).split(tokens // 4):
        statistics.update({kind: x[kind][part] for kind in KINDS}, f[part])
    return Predicted(statistics, f, x, B)


def test_what_is_a_linear_function_of_the_features_is_predicted(source: CacheSource) -> None:
    """Without noise nothing is left to code but what the ridge of a thousandth leaves: its square, about."""
    exact = predicted(source, noise=0.0)
    for index in range(2):
        basis = exact.basis(index)
        wanted = exact.predictor[basis.group.kind]
        assert (basis.predictor - wanted).norm() < 0.02 * wanted.norm()
        weighted = (exact.tokens[basis.group.kind] - exact.tokens[basis.group.kind].mean(0)) @ basis.analysis()
        assert basis.variance.sum() < 1e-3 * weighted.var(0).sum()


def test_residuals_have_the_variance_told(source: CacheSource) -> None:
    """Coefficients of x - intercept - B^T f are decorrelated, and as wide as the noise alone would be."""
    noisy = predicted(source)
    for index in range(2):
        basis = noisy.basis(index)
        assert basis.predictor.shape == (5, basis.group.width)
        x = noisy.tokens[basis.group.kind].double()
        left = x - basis.intercept.double() - noisy.features.double() @ basis.predictor.double()
        assert left.mean(0).abs().max() < 1e-3 * x.std()
        y = left @ basis.analysis().double()
        off = y.T @ y / len(y) - torch.diag(basis.variance.double())
        assert off.abs().max() < 2e-3 * float(basis.variance[0])
        noise = source.features(4000, 1)[basis.group.kind].double()
        alone = ((noise - noise.mean(0)) @ basis.analysis().double()).square().sum(1).mean()
        assert float(basis.variance.sum()) == pytest.approx(float(alone), rel=0.02)


def test_the_ridge_keeps_a_feature_that_never_varies_out(source: CacheSource) -> None:
    plain = predicted(source)
    statistics = Statistics(plain.statistics.groups, source.shape.geometry)
    statistics.update(plain.tokens, torch.cat([plain.features, torch.full((4000, 1), 3.0)], dim=1))
    group = statistics.groups[0]
    basis = fit_basis(statistics, group, head_weights(statistics)[group.name])
    assert basis.predictor[5].abs().max() < 1e-3
    torch.testing.assert_close(basis.predictor[:5], plain.basis(0).predictor, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("features", [0, 5])
def test_a_transform_folds_the_prediction_in(source: CacheSource, features: int) -> None:
    made = predicted(source, features=features)
    for index in range(2):
        basis = made.basis(index)
        transform = Transform.of(basis, np.zeros(basis.group.width, np.int16))
        x, f = made.tokens[basis.group.kind][:50], made.features[:50]
        y = transform.coefficients(x, f, basis.group.width)
        wanted = (x - basis.intercept - f @ basis.predictor) @ basis.analysis()
        torch.testing.assert_close(y, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        torch.testing.assert_close(transform.tokens(y, f), x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))
        assert transform.features == features
        # Of no coefficient at all the prediction remains.
        torch.testing.assert_close(
            transform.tokens(y[:, :0], f), basis.intercept + f @ basis.predictor, rtol=1e-4, atol=1e-3
        )
        order = torch.arange(basis.group.width - 1, -1, -1)
        turned = transform.ordered(order, transform.scales)
        torch.testing.assert_close(turned.coefficients(x, f, 3), y[:, order[:3]])
        torch.testing.assert_close(turned.tokens(y[:, order], f), x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


# ---- files


@pytest.mark.parametrize("features", [0, 5])
def test_saved_bases_come_back_bit_for_bit(source: CacheSource, tmp_path: Path, features: int) -> None:
    bases = [predicted(source, features=features).basis(group) for group in range(2)]
    save_bases(bases, tmp_path / "bases.safetensors")
    for found, wanted in zip(load_bases(tmp_path / "bases.safetensors"), bases, strict=True):
        assert found.group == wanted.group
        for name in ("intercept", "predictor", "directions", "variance"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
        assert all(torch.equal(a, b) for a, b in zip(found.weights, wanted.weights, strict=True))


def test_a_singular_covariance_still_gives_a_basis() -> None:
    """Fewer tokens than features: the rest of the directions have no variance, none of it negative."""
    geometry = Geometry((LayerGeometry(2, 8, 8),))
    statistics = Statistics([FeatureGroup("keys", 0, 1, 0, 16), FeatureGroup("values", 0, 1, 0, 16)], geometry)
    x = torch.randn(5, 16)
    statistics.update({"keys": x, "values": x}, torch.zeros(5, 0))
    basis = fit_basis(statistics, statistics.groups[0], head_weights(statistics)["keys.0-0"])
    assert (basis.variance >= 0).all()
    assert (basis.variance[5:] < 1e-5).all()
    assert torch.isfinite(basis.analysis()).all()


def test_shape_covers_uneven_heads() -> None:
    """That the cases above see heads of different widths in one group."""
    assert len({layer.key_dim for layer in SHAPE.geometry.layers}) > 1
