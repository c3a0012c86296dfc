"""Rates from sizes, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.geometry import Geometry, LayerGeometry

GEOMETRY = Geometry((LayerGeometry(2, 8, 4), LayerGeometry(1, 16, 8)))  # 48 numbers, 96 bytes a token
SIZES = PayloadSizes(coded=900, verbatim=960, side_info=60, body_tokens=100, verbatim_tokens=10)


def test_ratios_name_their_numerator_and_denominator() -> None:
    assert accounting.raw_bytes(GEOMETRY, 10) == 960
    assert SIZES.total == 1920
    assert accounting.coded_ratio(GEOMETRY, SIZES) == 9600 / 960
    assert accounting.cache_ratio(GEOMETRY, SIZES) == 10560 / 1920


def test_merged_sizes_add() -> None:
    both = accounting.merged([SIZES, SIZES])
    assert both.total == 2 * SIZES.total
    assert (both.body_tokens, both.verbatim_tokens) == (200, 20)
    assert accounting.coded_ratio(GEOMETRY, both) == accounting.coded_ratio(GEOMETRY, SIZES)


def test_a_projection_to_the_same_length_is_what_was_measured() -> None:
    projected = accounting.projected_cache_ratio(GEOMETRY, accounting.coded_ratio(GEOMETRY, SIZES), 110, 10)
    assert projected == pytest.approx(accounting.cache_ratio(GEOMETRY, SIZES))


def test_a_short_cache_gains_nothing_and_a_long_one_nears_the_coded_ratio() -> None:
    assert accounting.projected_cache_ratio(GEOMETRY, 20.0, 50, 68) == 1.0
    assert accounting.projected_cache_ratio(GEOMETRY, 20.0, 10**9, 68) == pytest.approx(20.0, rel=1e-4)


def test_the_artifact_lowers_the_ratio() -> None:
    with_artifact = accounting.projected_cache_ratio(GEOMETRY, 10.0, 1000, 0, artifact_share_bytes=9600)
    assert with_artifact == 96_000 / (9600 + 9600)


@given(st.integers(0, 10**9), st.floats(1.01, 500))
def test_break_even_is_the_first_token_count_that_saves(artifact_bytes: int, ratio: float) -> None:
    def saved(tokens: int) -> float:
        raw = accounting.raw_bytes(GEOMETRY, tokens)
        return raw - raw / ratio - artifact_bytes

    tokens = accounting.break_even_tokens(GEOMETRY, artifact_bytes, ratio)
    slack = 1e-6 * (artifact_bytes + 1)  # rounding of the division
    assert saved(tokens) > -slack
    assert saved(tokens - 1) <= slack
