"""KVTC: its dynamic programming against every segmentation, its errors against its coder, its round trip on models."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import window_of
from transformers import DynamicCache

from kvalign import accounting
from kvalign.capture import CacheShape, capture, layer_tensors, measure_shape, run
from kvalign.errors import PayloadInvalid
from kvalign.evaluate.baselines import Baseline, KvtcFit, fit_kvtc
from kvalign.evaluate.baselines.kvtc import decode_group, encode_group
from kvalign.evaluate.baselines.kvtc_plan import BITS, SIZES, TYPES, Allocation, Errors, Group, shared_budget
from kvalign.evaluate.baselines.stored import Reader
from kvalign.statistics import Statistics, feature_groups

SMALL_SIZES = (1, 2, 4)


def spread(tokens: int, width: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Coefficients whose scale falls from 10 to 0.01, as principal components do."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(tokens, width, generator=generator) * torch.logspace(1, -2, width)).numpy()


def every_segmentation(errors: Errors, start: int = 0) -> list[tuple[int, float]]:
    """(bits, error) of every way to cut the components from `start` on into groups and dropped ones."""
    width = len(errors.dropped)
    if start == width:
        return [(0, 0.0)]
    found = [(bits, error + errors.dropped[start]) for bits, error in every_segmentation(errors, start + 1)]
    for size_index, size in enumerate(errors.sizes):
        if start + size <= width:
            rest = every_segmentation(errors, start + size)
            for type_index, name in enumerate(TYPES):
                here = errors.grouped[start, size_index, type_index]
                found += [(bits + size * BITS[name] + 32, error + here) for bits, error in rest]
    return found


def check_against_every_segmentation(errors: Errors) -> None:
    all_cuts = every_segmentation(errors)
    largest = max(bits for bits, _ in all_cuts)
    allocation = Allocation(errors, largest)
    for budget in range(0, largest + 1, 2):
        least = min(error for bits, error in all_cuts if bits <= budget)
        plan = allocation.plan(budget)
        assert sum(group.bits for group in plan) <= budget
        assert allocation.errors[budget // 2] == pytest.approx(least, rel=1e-9, abs=1e-12)
        assert error_of(plan, errors) == pytest.approx(least, rel=1e-9, abs=1e-12)


def error_of(plan: tuple[Group, ...], errors: Errors) -> float:
    """Error of a plan whose groups are in order and do not overlap."""
    total, at = 0.0, 0
    for group in plan:
        assert group.start >= at
        total += float(errors.dropped[at : group.start].sum())
        total += float(errors.grouped[group.start, errors.sizes.index(group.size), TYPES.index(group.type)])
        at = group.start + group.size
    return total + float(errors.dropped[at:].sum())


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_plan_is_the_best_of_all_segmentations(width: int) -> None:
    check_against_every_segmentation(Errors.measured(spread(8, width), SMALL_SIZES))


@settings(max_examples=20)
@given(st.lists(st.floats(0, 100), min_size=40, max_size=40))
def test_the_plan_is_the_best_whatever_the_errors(numbers: list[float]) -> None:
    grouped = np.array(numbers[:36]).reshape(4, 3, 3)
    for index, size in enumerate(SMALL_SIZES):
        grouped[4 - size + 1 :, index] = np.inf
    check_against_every_segmentation(Errors(SMALL_SIZES, grouped, np.array(numbers[36:])))


def test_a_shared_budget_is_the_best_split() -> None:
    allocations = [
        Allocation(Errors.measured(spread(8, 20, seed) * (1 + 4 * seed), SMALL_SIZES), 400) for seed in (0, 1)
    ]
    first, second = shared_budget(allocations[0], allocations[1], 300, 0.25)
    total = allocations[0].errors[first // 2] + 0.25 * allocations[1].errors[second // 2]
    splits = [allocations[0].errors[b] + 0.25 * allocations[1].errors[150 - b] for b in range(151)]
    assert first + second <= 300
    assert total == min(splits)


@pytest.mark.parametrize("number_type", TYPES)
@pytest.mark.parametrize("size", [1, 16, 64])
def test_errors_are_those_of_the_coder(number_type: str, size: int) -> None:
    y = spread(21, 70)
    errors = Errors.measured(y)
    for start in range(0, 70 - size + 1, 6):
        part = torch.from_numpy(y[:, start : start + size])
        codes, scales = encode_group(part, number_type)
        assert len(codes) == math.ceil(21 * size * BITS[number_type] / 8)
        assert len(scales) == 21 * 4
        decoded = decode_group(Reader(codes), Reader(scales), Group(start, size, number_type), 21)
        measured = errors.grouped[start, SIZES.index(size), TYPES.index(number_type)]
        # The mean of a group is summed in another order: a shift may round the other way.
        assert float((part - decoded).square().sum() / 21) == pytest.approx(measured, rel=1e-3, abs=1e-9)
    assert np.isinf(errors.grouped[70 - size + 1 :, SIZES.index(size)]).all()
    assert np.isinf(errors.grouped[:, SIZES.index(256)]).all()


@pytest.mark.parametrize("peak", [1e-9, 1e-4, 1.0, 1e4, 1e6])
@pytest.mark.parametrize("number_type", TYPES)
def test_errors_are_those_of_the_coder_at_any_scale(number_type: str, peak: float) -> None:
    y = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)) * peak
    codes, scales = map(Reader, encode_group(y, number_type))
    decoded = decode_group(codes, scales, Group(0, 16, number_type), 5)
    measured = Errors.measured(y.numpy(), (16,)).grouped[0, 0, TYPES.index(number_type)]
    assert torch.isfinite(decoded).all()
    assert float((y - decoded).double().square().sum() / 5) == pytest.approx(measured, rel=1e-3)


def fitted(model: Any, smallest_ratio: float) -> tuple[CacheShape, KvtcFit]:
    """KVTC fitted on random tokens."""
    shape = measure_shape(model)
    generator = torch.Generator().manual_seed(0)
    captured = list(capture(model, shape, iter([torch.randint(256, (200,), generator=generator) for _ in range(3)])))
    statistics = Statistics(feature_groups(shape.geometry), shape.geometry)
    for sequence in captured[:2]:
        statistics.update({"keys": sequence.keys[4:], "values": sequence.values[4:]}, sequence.features[4:])
    return shape, fit_kvtc(statistics, shape, captured[2:], smallest_ratio=smallest_ratio)


def a_cache(model: Any, tokens: int) -> DynamicCache:
    generator = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        _, cache = run(model, torch.randint(256, (1, tokens), generator=generator))
    return cache  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "qwen2", "phi", "cohere", "gpt2"])
def test_a_large_budget_gives_the_cache_back(tiny_model: Callable[[str], Any], family: str) -> None:
    """With 48 bits a number every component can have a group of its own: a transposed basis would show."""
    model = tiny_model(family)
    shape, fit = fitted(model, smallest_ratio=1 / 3)
    for tokens in (3, 5, 41):
        cache = a_cache(model, tokens)
        decoded, _ = Baseline(shape, fit.at(1 / 3))(window_of(cache))
        for original, restored in zip(layer_tensors(cache), layer_tensors(decoded), strict=True):
            for x, y in zip(original, restored, strict=True):
                # float16 shifts and directions: eleven bits of the largest number.
                assert (x - y).abs().max() <= 4e-3 * x.abs().max()


def test_bytes_shrink_and_errors_grow_with_the_ratio(tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("llama")
    shape, fit = fitted(model, smallest_ratio=1.0)
    cache = a_cache(model, 150)
    ratios, errors, artifacts = [], [], []
    for nominal in (1.0, 2.0, 4.0, 8.0, 16.0):
        coder = fit.at(nominal)
        baseline = Baseline(shape, coder)
        data = baseline.encode(cache)
        sizes = baseline.sizes(data)
        assert sizes.total == len(data)
        assert sizes.verbatim == 4 * 2 * shape.geometry.values_per_token
        ratios.append(accounting.coded_ratio(shape.geometry, sizes))
        decoded = layer_tensors(baseline.decode(data))
        pairs = zip(layer_tensors(cache), decoded, strict=True)
        errors.append(sum(float((x - y).square().sum()) for a, b in pairs for x, y in zip(a, b, strict=True)))
        artifacts.append(coder.artifact_bytes)
    assert ratios == sorted(ratios)
    assert errors == sorted(errors)
    assert artifacts == sorted(artifacts, reverse=True)
    # DEFLATE may add a little to what does not shrink.
    assert all(found > 0.95 * nominal for found, nominal in zip(ratios, (1, 2, 4, 8, 16), strict=True))


def test_damaged_bytes_are_refused(tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("llama")
    shape, fit = fitted(model, smallest_ratio=4.0)
    baseline = Baseline(shape, fit.at(4.0))
    data = baseline.encode(a_cache(model, 30))
    for damaged in (data[:-1], data[:-9] + bytes(9)):
        with pytest.raises(PayloadInvalid):
            baseline.decode(damaged)
