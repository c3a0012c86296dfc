"""Likeness of heads against scipy's orthogonal Procrustes on the rows themselves."""

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from kvalign.align.procrustes import MAX_HEADS, head_alignment, pairwise_similarity
from kvalign.geometry import Geometry, Kind, LayerGeometry
from kvalign.statistics import Statistics, feature_groups


def rows(heads: int, dim: int, count: int = 200, seed: int = 0) -> Tensor:
    """Heads that are rotated, scaled and noisy copies of one another: [count, heads * dim]."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(count, dim, generator=generator) * torch.logspace(0, -1, dim)
    parts = []
    for head in range(heads):
        rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator)).Q
        parts.append((head + 1) * (shared @ rotation + 0.3 * torch.randn(count, dim, generator=generator)))
    return torch.cat(parts, dim=1)


def test_similarities_are_those_of_the_best_rotation() -> None:
    x = rows(4, 6)
    before, after = pairwise_similarity(x.T @ x, 4)
    heads = x.unflatten(1, (4, 6)).transpose(0, 1).double().numpy()
    for i in range(4):
        for j in range(4):
            norms = np.linalg.norm(heads[i]) * np.linalg.norm(heads[j])
            assert float(before[i, j]) == pytest.approx((heads[i] * heads[j]).sum() / norms, abs=1e-4)
            Q, _ = scipy.linalg.orthogonal_procrustes(heads[j], heads[i])
            assert float(after[i, j]) == pytest.approx((heads[i] * (heads[j] @ Q)).sum() / norms, abs=1e-4)
    assert after[~torch.eye(4, dtype=torch.bool)].min() > 0.7  # copies, found again
    assert before[~torch.eye(4, dtype=torch.bool)].abs().max() < 0.5  # which the rotation had hidden


def test_rotating_a_head_changes_before_and_not_after() -> None:
    x = rows(3, 5)
    turned = x.clone()
    turned[:, 5:10] = turned[:, 5:10] @ torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(9))).Q
    (before, after), (other_before, other_after) = (pairwise_similarity(y.T @ y, 3) for y in (x, turned))
    torch.testing.assert_close(after, other_after, rtol=1e-4, atol=1e-4)
    assert (before - other_before).abs().max() > 0.1


def test_silent_heads_are_like_none_and_divide_by_nothing() -> None:
    x = rows(3, 4)
    x[:, :8] = 0
    before, after = pairwise_similarity(x.T @ x, 3)
    for found in (before, after):
        assert torch.isfinite(found).all()
        assert found[0, 1] == found[0, 2] == found[1, 2] == 0


def statistics_of(geometry: Geometry, layer_group_size: int | None = None) -> Statistics:
    statistics = Statistics(feature_groups(geometry, layer_group_size), geometry)
    heads = sum(layer.kv_heads for layer in geometry.layers)
    for seed in range(2):
        columns: dict[Kind, Tensor] = {
            "keys": rows(heads, 6, seed=seed) + 50.0,
            "values": rows(heads, 4, seed=seed + 9),
        }
        statistics.update(columns, torch.zeros(200, 0))
    return statistics


def test_a_model_is_summed_over_all_pairs_about_the_mean_token() -> None:
    geometry = Geometry((LayerGeometry(2, 6, 4), LayerGeometry(1, 6, 4)))
    statistics = statistics_of(geometry)
    found = head_alignment(statistics)
    assert {kind: item.heads for kind, item in found.items()} == {"keys": 3, "values": 3}
    before, after = pairwise_similarity(statistics.moments["keys.0-1"].covariance(), 3)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    assert found["keys"].before == pytest.approx(float(np.mean([before[p] for p in pairs])), abs=1e-6)
    assert found["keys"].after == pytest.approx(float(np.mean([after[p] for p in pairs])), abs=1e-6)
    # The shared offset of 50 would make every pair alike, were it not taken off.
    assert found["keys"].before < 0.5


def test_layers_that_are_not_stored_are_left_out() -> None:
    """Of one recomputed layer of 2 heads and two stored ones, the heads of the stored two are compared."""
    geometry = Geometry((LayerGeometry(2, 6, 4), LayerGeometry(2, 6, 4), LayerGeometry(1, 6, 4)))
    statistics = Statistics(feature_groups(geometry, first=1), geometry)
    columns: dict[Kind, Tensor] = {"keys": rows(5, 6), "values": rows(5, 4)}
    statistics.update(columns, torch.zeros(200, 0))
    found = head_alignment(statistics)
    assert {kind: item.heads for kind, item in found.items()} == {"keys": 3, "values": 3}
    _, after = pairwise_similarity(torch.cov(columns["keys"][:, 12:].T), 3)
    different = ~torch.eye(3, dtype=torch.bool)
    assert found["keys"].after == pytest.approx(float(after[different].mean()), abs=1e-3)


def test_models_that_it_does_not_fit_are_left_out() -> None:
    uneven = Geometry((LayerGeometry(2, 6, 4), LayerGeometry(1, 6, 4)))
    assert head_alignment(statistics_of(uneven, layer_group_size=1)) == {}
    single = Geometry((LayerGeometry(1, 6, 4),))
    assert head_alignment(statistics_of(single)) == {}
    many = Geometry((LayerGeometry(MAX_HEADS + 1, 6, 4),))
    assert head_alignment(statistics_of(many)) == {}
