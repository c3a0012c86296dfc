"""Streaming sums against one pass in float64, in any order, merged, shifted, saved and resumed."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvalign.geometry import KINDS, Geometry, Kind, LayerGeometry
from kvalign.statistics import FeatureGroup, Moments, Statistics, feature_groups

GEOMETRY = Geometry((LayerGeometry(2, 4, 3), LayerGeometry(1, 6, 5), LayerGeometry(2, 2, 2)))
GROUPS = feature_groups(GEOMETRY, layer_group_size=2)
FEATURES = 3


def rows(count: int, width: int, *, seed: int, mean: float = 0.0) -> Tensor:
    """Correlated rows: a rotated, anisotropic covariance."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator) * torch.logspace(0, -2, width)
    return torch.randn(count, width, generator=generator) @ mixing.T + mean * torch.randn(width, generator=generator)


def sequence(seed: int, tokens: int = 40) -> dict[Kind, Tensor]:
    return {kind: rows(tokens, GEOMETRY.width(kind), seed=seed, mean=5.0) for kind in KINDS}


def features(seed: int, tokens: int = 40) -> Tensor:
    return rows(tokens, FEATURES, seed=seed + 500, mean=7.0)


def summed(seeds: range) -> Statistics:
    statistics = Statistics(GROUPS, GEOMETRY)
    for seed in seeds:
        statistics.update(sequence(seed), features(seed))
        statistics.update_sensitivity(sequence(seed + 100), torch.full((40,), 0.5))
    return statistics


@pytest.mark.parametrize("mean", [0.0, 30.0, 3000.0])
def test_moments_are_those_of_all_rows(mean: float) -> None:
    x = rows(500, 12, seed=1, mean=mean)
    moments = Moments.about(x[:10].mean(0))
    for part in x.split(37):
        moments.update(part)
    plain = x.double().numpy()
    assert moments.count == 500
    # float32 holds 24 bits of a mean, and the scatter is summed about it: 1e-4 of the spread is left as rounding.
    torch.testing.assert_close(moments.mean(), torch.tensor(plain.mean(0)).float(), rtol=1e-6, atol=1e-4)
    wanted = torch.tensor(np.cov(plain.T, bias=True)).float()
    torch.testing.assert_close(moments.covariance(), wanted, rtol=1e-3, atol=1e-4 * float(wanted.diagonal().max()))


def test_without_a_shift_a_large_mean_would_drown_the_spread() -> None:
    """That the case above can fail: sums about zero lose the covariance of the same rows."""
    x = rows(500, 12, seed=1, mean=3000.0)
    about_zero = Moments.about(torch.zeros(12))
    about_zero.update(x)
    wanted = torch.tensor(np.cov(x.double().numpy().T, bias=True)).float()
    assert (about_zero.covariance() - wanted).abs().max() > 0.1 * wanted.abs().max()


def test_statistics_shift_by_the_first_rows_they_see() -> None:
    """Biased keys: channels whose mean is thousands of times their spread."""
    statistics = Statistics(GROUPS, GEOMETRY)
    x = {kind: rows(400, GEOMETRY.width(kind), seed=4, mean=3000.0) for kind in KINDS}
    for start in range(0, 400, 50):
        statistics.update({kind: x[kind][start : start + 50] for kind in KINDS}, torch.zeros(50, 0))
    for group in GROUPS:
        wanted = np.cov(x[group.kind][:, group.start : group.stop].double().numpy().T, bias=True)
        found = statistics.moments_of(group).covariance()
        torch.testing.assert_close(found, torch.tensor(wanted).float(), rtol=1e-2, atol=1e-3 * float(wanted.max()))


def test_the_shift_does_not_matter() -> None:
    x = rows(300, 8, seed=2, mean=10.0)
    found = []
    for shift in (x.mean(0), x[0], x.mean(0) + 3.0):
        moments = Moments.about(shift)
        moments.update(x)
        found.append(moments)
    for other in found[1:]:
        torch.testing.assert_close(other.mean(), found[0].mean(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.covariance(), found[0].covariance(), rtol=1e-3, atol=1e-4)


def test_merged_parts_equal_a_single_pass() -> None:
    whole, left, right = summed(range(6)), summed(range(2)), summed(range(2, 6))
    left.merge(right)
    assert (left.sequences, left.gradient_weight) == (whole.sequences, whole.gradient_weight) == (6, 120)
    assert left.features is not None
    assert whole.features is not None
    both = {**whole.moments, "features": whole.features}
    for name, found in {**left.moments, "features": left.features}.items():
        assert found.count == both[name].count == 240
        torch.testing.assert_close(found.mean(), both[name].mean(), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found.covariance(), both[name].covariance(), rtol=1e-3, atol=1e-3)
    for group in GROUPS:
        torch.testing.assert_close(left.cross_covariance(group), whole.cross_covariance(group), rtol=1e-3, atol=1e-3)
        # The shifts were far apart: adding the sums as they are would not do.
        assert not torch.allclose(left.moments_of(group).shift, right.moments_of(group).shift, atol=0.1)
    for name, outer in whole.sensitivity.items():
        torch.testing.assert_close(left.sensitivity[name], outer, rtol=1e-5, atol=1e-3)


def test_merging_into_nothing_gives_the_other() -> None:
    empty, other = Statistics(GROUPS, GEOMETRY), summed(range(2))
    empty.merge(other)
    assert empty.moments.keys() == other.moments.keys()
    assert torch.equal(empty.moments["keys.0-1"].covariance(), other.moments["keys.0-1"].covariance())
    assert torch.equal(empty.cross_covariance(GROUPS[0]), other.cross_covariance(GROUPS[0]))
    other.merge(Statistics(GROUPS, GEOMETRY))
    assert (empty.sequences, other.sequences) == (2, 2)


@pytest.mark.parametrize("mean", [0.0, 3000.0])
def test_cross_covariances_are_those_of_all_rows(mean: float) -> None:
    statistics = Statistics(GROUPS, GEOMETRY)
    f = rows(400, FEATURES, seed=1, mean=mean)
    x = {kind: rows(400, GEOMETRY.width(kind), seed=4, mean=mean) for kind in KINDS}
    for kind in KINDS:
        x[kind][:, :FEATURES] += 0.5 * f
    for start in range(0, 400, 50):
        part = slice(start, start + 50)
        statistics.update({kind: x[kind][part] for kind in KINDS}, f[part])
    for group in GROUPS:
        columns = x[group.kind][:, group.start : group.stop]
        joint = np.cov(torch.cat([f, columns], dim=1).double().numpy().T, bias=True)
        wanted = torch.tensor(joint[:FEATURES, FEATURES:]).float()
        assert statistics.cross_covariance(group).shape == (FEATURES, group.width)
        torch.testing.assert_close(
            statistics.cross_covariance(group), wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max())
        )


def test_sensitivity_is_the_weighted_sum_of_outer_products_of_each_head() -> None:
    statistics = Statistics(GROUPS, GEOMETRY)
    gradients = sequence(3)
    weights = torch.linspace(0, 2, 40)
    statistics.update_sensitivity(gradients, weights)
    assert statistics.gradient_weight == pytest.approx(40)
    for kind in KINDS:
        column = 0
        for index, layer in enumerate(GEOMETRY.layers):
            for head in range(layer.kv_heads):
                dim = layer.head_dim(kind)
                g = gradients[kind][:, column : column + dim].double()
                column += dim
                wanted = sum(weight * torch.outer(row, row) for weight, row in zip(weights.double(), g, strict=True))
                assert isinstance(wanted, Tensor)
                found = statistics.sensitivity[f"{kind}.{index}"][head]
                torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-3)


def test_saved_sums_come_back_bit_for_bit(tmp_path: Path) -> None:
    statistics = summed(range(3))
    statistics.save(tmp_path / "s.safetensors")
    found = Statistics.load(tmp_path / "s.safetensors", GROUPS, GEOMETRY)
    assert _same(found, statistics)
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]
    for seed in (7, 8):
        found.update(sequence(seed), features(seed))
        statistics.update(sequence(seed), features(seed))
    assert _same(found, statistics)


def test_sums_without_features_and_gradients_come_back(tmp_path: Path) -> None:
    statistics = Statistics(GROUPS, GEOMETRY)
    statistics.update(sequence(0), torch.zeros(40, 0))
    statistics.save(tmp_path / "s.safetensors")
    found = Statistics.load(tmp_path / "s.safetensors", GROUPS, GEOMETRY)
    assert _same(found, statistics)
    assert found.cross_covariance(GROUPS[0]).shape == (0, GROUPS[0].width)


def _same(a: Statistics, b: Statistics) -> bool:
    return (a.sequences, a.gradient_weight) == (b.sequences, b.gradient_weight) and _sums(a) == _sums(b)


def _sums(statistics: Statistics) -> dict[str, Any]:
    """Every number summed, in plain Python."""
    assert statistics.features is not None
    moments = {"features": statistics.features, **statistics.moments}
    return {
        **{
            f"{name}.{part}": torch.as_tensor(getattr(found, part)).tolist()
            for name, found in moments.items()
            for part in ("count", "shift", "total", "scatter")
        },
        **{f"cross.{name}": cross.tolist() for name, cross in statistics.cross.items()},
        **{f"sensitivity.{name}": outer.tolist() for name, outer in statistics.sensitivity.items()},
    }


def test_groups_cover_every_feature_once() -> None:
    for size in (None, 1, 2, 3, 10):
        for kind in KINDS:
            groups = [group for group in feature_groups(GEOMETRY, size) if group.kind == kind]
            assert groups[0].start == 0
            assert groups[-1].stop == GEOMETRY.width(kind)
            for left, right in pairwise(groups):
                assert (left.stop, left.end_layer) == (right.start, right.first_layer)
    assert [group.name for group in GROUPS] == ["keys.0-1", "keys.2-2", "values.0-1", "values.2-2"]
    assert GROUPS[1] == FeatureGroup("keys", 2, 3, 14, 18)


def test_groups_begin_at_the_first_layer_that_is_stored() -> None:
    for size in (None, 1):
        groups = [group for group in feature_groups(GEOMETRY, size, first=1) if group.kind == "values"]
        assert (groups[0].first_layer, groups[0].start) == (1, 6)
        assert (groups[-1].end_layer, groups[-1].stop) == (3, 15)


def test_groups_stay_within_what_one_decomposition_takes() -> None:
    large = Geometry((LayerGeometry(8, 128, 128),) * 32)
    groups = feature_groups(large)
    assert [group.width for group in groups] == [8192] * 8
    wider = Geometry((LayerGeometry(80, 128, 128),) * 2)
    assert [group.width for group in feature_groups(wider)] == [10_240] * 4  # a layer is never cut
