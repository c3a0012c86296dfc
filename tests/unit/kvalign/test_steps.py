"""Symbols, and the classes of tokens that each have a step of their own, against one number at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from synthetic import CacheSource, fitted_to

from kvalign.artifact import Artifact
from kvalign.entropy.classes import LOWEST
from kvalign.entropy.rans import CLASS_LIMIT
from kvalign.quantize import LARGEST_SYMBOL, dequantize, quantize, step_size
from kvalign.token_steps import COARSEST_SHIFT, FINEST_SHIFT, step_sizes
from kvalign.transform import coded_components, token_classes

shifts_of_tokens = st.lists(st.integers(FINEST_SHIFT, COARSEST_SHIFT), min_size=1, max_size=20)


@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=6, max_size=6),
    st.integers(-64, 64),
    st.integers(-64, 64),
)
def test_symbols_are_the_nearest_multiples_of_their_tokens_step(numbers: list[float], first: int, second: int) -> None:
    y = np.array(numbers, np.float32).reshape(2, 3)
    sizes = np.array([[step_size(first)], [step_size(second)]], np.float32)
    classes = np.array([[LOWEST, LOWEST - 1, 5], [LOWEST + 1, 0, LOWEST - 9]], np.int16)
    symbols = quantize(y, sizes, classes)
    assert symbols.dtype == np.int32
    for t in range(2):
        for r in range(3):
            wanted = float(y[t, r]) / float(sizes[t, 0])
            if classes[t, r] < LOWEST:
                assert symbols[t, r] == 0
            elif abs(wanted) >= LARGEST_SYMBOL:
                assert symbols[t, r] == math.copysign(LARGEST_SYMBOL, wanted)
            else:
                # A product by the inverse of a step is off by a rounding of float32 or two.
                assert abs(symbols[t, r] - wanted) <= 0.5 + 2**-22 * abs(wanted)
    assert np.array_equal(dequantize(symbols, sizes), symbols * sizes)


def test_sizes_are_those_of_each_tokens_step() -> None:
    shifts = np.array([0, -6, 8, 1, 0], np.int8)
    found = step_sizes(-10, shifts)
    assert found.shape == (5, 1)
    assert found.dtype == np.float32
    # A shift is a quarter of an octave.
    assert found[:, 0] == pytest.approx([2 ** (-10 / 16 + shift / 4) for shift in shifts.tolist()])
    assert step_sizes(0, np.zeros(0, np.int8)).shape == (0, 1)


@given(shifts=shifts_of_tokens, step=st.integers(-80, 80))
def test_each_token_has_the_classes_of_its_own_step(artifact: Artifact, shifts: list[int], step: int) -> None:
    transforms = artifact.codec().transforms
    classes, counts = token_classes(transforms, step, np.array(shifts, np.int8))
    assert counts == [coded_components(t.scales, step + 4 * min(0, *shifts)) for t in transforms]
    assert classes.shape == (len(shifts), sum(counts))
    for found, shift in zip(classes, shifts, strict=True):
        for transform, own in zip(transforms, np.split(found, np.cumsum(counts)[:-1]), strict=True):
            alone = transform.classes(step + 4 * shift)
            assert np.array_equal(own[: alone.size], alone)
            assert (own[alone.size :] < LOWEST).all()
    assert classes.max(initial=0) <= CLASS_LIMIT


def test_no_token_has_no_classes(artifact: Artifact) -> None:
    classes, counts = token_classes(artifact.codec().transforms, -10, np.zeros(0, np.int8))
    assert classes.shape == (0, sum(counts))


@pytest.mark.parametrize("recomputed", [False, True])
def test_products_in_bfloat16_are_near_those_in_float32(
    source: CacheSource, artifact: Artifact, recomputed: bool, request: pytest.FixtureRequest
) -> None:
    if recomputed:
        artifact = fitted_to(request.getfixturevalue("tiny_model")("llama"))
    generator = torch.Generator().manual_seed(0)
    for transform in artifact.codec().transforms:
        half = transform.to(torch.bfloat16)
        y = torch.randn(30, transform.analysis.shape[1], generator=generator)
        f = torch.randn(30, transform.features, generator=generator)
        x = transform.tokens(y, f)
        assert half.tokens(y, f).dtype == torch.bfloat16
        # Each number is rounded to eight bits: half of 2^-8, and again in the sum.
        assert (half.tokens(y, f) - x).norm() < 0.02 * x.norm()
        found = half.coefficients(x, f, y.shape[1])
        assert found.dtype == torch.bfloat16
        assert (transform.coefficients(x, f, y.shape[1]) - y).norm() < 0.05 * y.norm()
        error = transform.tokens(found - y, f) - transform.tokens(torch.zeros_like(y), f)
        assert error.norm() < 0.05 * x.norm()
