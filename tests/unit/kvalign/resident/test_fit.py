"""From statistics to a resident plan: codebooks, bits, bases that hold wherever a key is turned to."""

import itertools
from dataclasses import replace

import pytest
import torch
from synthetic import CacheSource
from torch import Tensor

from kvalign.capture import Captured
from kvalign.geometry import KINDS
from kvalign.kernels import reference
from kvalign.resident.fit import allocate_bits, fit_codebook, fit_resident
from kvalign.resident.stored import StoredResident
from kvalign.statistics import Statistics, feature_groups

SINKS = 2


@pytest.fixture(scope="module")
def statistics(source: CacheSource) -> Statistics:
    found = Statistics(feature_groups(source.shape.geometry), source.shape.geometry)
    gradients = CacheSource(source.shape, seed=99)
    for seed in range(4):
        found.update(source.features(512, 10_000 + seed), torch.zeros(512, 0))
        found.update_sensitivity(gradients.features(64, 20_000 + seed), torch.ones(64))
    return found


def fit(source: CacheSource, statistics: Statistics, bits: float, layers: range | None = None) -> StoredResident:
    held_out = source.features(512, 30_000)
    kept_aside = [Captured(held_out["keys"], held_out["values"], torch.zeros(512, 0))] * 2
    return fit_resident(
        statistics,
        source.shape,
        kept_aside,
        bits=bits,
        sink_tokens=SINKS,
        layers=layers or range(len(source.shape.geometry.layers)),
        position_limit=2048,
    )


def error(source: CacheSource, stored: StoredResident, start: int) -> float:
    """Share of the energy of tokens at positions from `start` on that coding takes, over all layers and both kinds."""
    held_out, off, whole = source.features(128, 40_000), 0.0, 0.0
    plan = stored.plan(SINKS, 0)
    for index, layer in plan.layers.items():
        shape, rope = source.shape.geometry.layers[index], source.shape.ropes[index]
        for kind in KINDS:
            offsets = source.shape.geometry.offsets(kind)
            x = (
                held_out[kind][:, offsets[index] : offsets[index + 1]]
                .unflatten(1, (shape.kv_heads, -1))
                .transpose(0, 1)
            )
            if kind == "keys":
                x = rope.redo(x, torch.arange(start, start + 128), torch.float32)
            for group in layer.groups:
                own = x[group.first_head : group.end_head].transpose(0, 1).flatten(1)
                again = reference.dense(group.side(kind), *reference.encode(group.side(kind), own))
                off += float((again - own).square().sum())
                whole += float((own - own.mean(0)).square().sum())
    return off / whole


def test_bits_are_dealt_out_as_brute_force_would() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        sizes = torch.rand(4, generator=generator).double() + 0.01
        table = sizes * 4.0 ** -torch.arange(4, dtype=torch.float64)[:, None]
        budget = 6
        found = allocate_bits(table, budget)
        assert int(found.sum()) <= budget
        best = min(
            sum(float(table[width, n]) for n, width in enumerate(widths))
            for widths in itertools.product(range(4), repeat=4)
            if sum(widths) <= budget
        )
        assert float(table.gather(0, found[None]).sum()) == pytest.approx(best)


@pytest.mark.parametrize(("width", "lloyd_max"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_two_numbers_come_near_to_the_best_levels_of_a_gaussian(width: int, lloyd_max: float) -> None:
    """Distortions of Lloyd and Max: Gersho and Gray 1992, table 5.2."""
    sample = torch.randn(60_000, generator=torch.Generator().manual_seed(1)).double().sort().values
    levels = fit_codebook(sample, width).levels().double()
    nearest = levels[torch.bucketize(sample, (levels[1:] + levels[:-1]) / 2)]
    assert lloyd_max * 0.97 < float((nearest - sample).square().mean()) < lloyd_max * 1.05


def test_heavier_tails_bend_the_levels_apart() -> None:
    uniform = torch.rand(50_000, generator=torch.Generator().manual_seed(2)).double() - 0.5
    heavy = uniform.sign() * -(1 - 2 * uniform.abs()).clamp_min(1e-9).log()
    bends = [fit_codebook(sample.sort().values, 4).bend for sample in (uniform, heavy)]
    assert bends[0] < 1e-3 < bends[1]


@pytest.mark.parametrize("width", range(1, 9))
def test_every_codebook_rises(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    for sample in (torch.randn(5000, generator=generator), torch.randn(5000, generator=generator) ** 3, torch.ones(50)):
        assert fit_codebook(sample.double().sort().values, width).rises()


@pytest.mark.parametrize("bits", [2.5, 4.0, 6.0])
def test_the_size_follows_the_bits_asked_for(source: CacheSource, statistics: Statistics, bits: float) -> None:
    plan = fit(source, statistics, bits).plan(SINKS, 0)
    assert bits - 0.3 < plan.bits_per_value <= bits


def test_more_bits_leave_less_error(source: CacheSource, statistics: Statistics) -> None:
    errors = [error(source, fit(source, statistics, bits), 0) for bits in (2.5, 4.0, 7.0)]
    assert errors[0] > 3 * errors[1] > 30 * errors[2] > 0


def test_a_key_far_from_the_start_is_coded_as_well_as_one_near_it(source: CacheSource, statistics: Statistics) -> None:
    stored = fit(source, statistics, 5.0)
    assert error(source, stored, 1900) < 1.5 * error(source, stored, 0)


def test_layers_are_left_out_that_are_not_asked_for(source: CacheSource, statistics: Statistics) -> None:
    assert list(fit(source, statistics, 4.0, range(1, 2)).layers) == [1]


def test_a_plan_is_fitted_without_gradients(source: CacheSource, statistics: Statistics) -> None:
    plain = replace(statistics, sensitivity={}, gradient_weight=0.0)
    assert error(source, fit(source, plain, 6.0), 0) < 0.01


def test_no_layer_makes_an_empty_plan(source: CacheSource, statistics: Statistics) -> None:
    held_out = source.features(64, 1)
    found = fit_resident(
        statistics,
        source.shape,
        [Captured(held_out["keys"], held_out["values"], torch.zeros(64, 0))],
        bits=4.0,
        sink_tokens=SINKS,
        layers=[],
        position_limit=64,
    )
    assert not found.plan(SINKS, 0).layers


def test_a_coefficient_that_never_varies_does_no_harm(source: CacheSource) -> None:
    found = Statistics(feature_groups(source.shape.geometry), source.shape.geometry)
    still: dict[str, Tensor] = {kind: x.clone() for kind, x in source.features(256, 1).items()}
    for x in still.values():
        x[:, :8] = 3.0
    found.update(still, torch.zeros(256, 0))  # type: ignore[arg-type]
    kept = [Captured(still["keys"], still["values"], torch.zeros(256, 0))]
    stored = fit_resident(found, source.shape, kept, bits=4.0, sink_tokens=SINKS, layers=range(2), position_limit=256)
    plan = stored.plan(SINKS, 0)
    assert all(group.keys.analysis.isfinite().all() for layer in plan.layers.values() for group in layer.groups)
