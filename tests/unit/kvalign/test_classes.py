"""Symbol tables: sums, floors, and the order that Laplace variables impose."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvalign.entropy.classes import (
    ALPHABET,
    CLASSES,
    ESCAPE,
    HIGHEST,
    LARGEST,
    LOWEST,
    TOTAL,
    Tables,
    fitted_tables,
    laplace_tables,
    scale_number,
)

LAPLACE = laplace_tables()


def symbol(value: int) -> int:
    """Column of a symbol."""
    return value + LARGEST


def test_every_class_shares_4096_out_among_the_symbols_that_are_worth_it() -> None:
    assert LAPLACE.frequencies.shape == (CLASSES, ALPHABET)
    assert (LAPLACE.frequencies.sum(axis=1, dtype=np.int64) == TOTAL).all()
    assert (LAPLACE.frequencies[:, ESCAPE] > 0).all()
    for cls in range(LOWEST, HIGHEST + 1):
        given = LAPLACE.frequencies[cls - LOWEST, :ESCAPE] > 0
        # A floor costs 1 / (4096 ln 2) bits, an escape 32 bits more: symbols rarer than their quotient are escaped.
        worth = laplace(cls)[:ESCAPE] * 32 >= 1 / (TOTAL * np.log(2))
        assert abs(int(given.sum()) - int(worth.sum())) <= 2


def test_frequencies_fall_away_from_zero_and_mirror() -> None:
    body = LAPLACE.frequencies[:, :ESCAPE].astype(int)
    away = body[:, symbol(0) :]
    assert (np.diff(away, axis=1) <= 1).all()  # what is left of rounding to integers
    assert (np.abs(body - body[:, ::-1]) <= 1).all()


def test_wider_classes_are_flatter() -> None:
    assert (np.diff(LAPLACE.frequencies[:, symbol(0)].astype(int)) < 0).all()
    shares = LAPLACE.frequencies / TOTAL
    entropies = -(shares * np.log2(np.where(shares > 0, shares, 1))).sum(axis=1)
    assert (np.diff(entropies) > 0).all()
    # A wide Laplace variable of scale b in steps has log2(2 e b) bits; floors of 1/4096 cost the rest.
    assert entropies[-1] == pytest.approx(np.log2(2 * np.e * 2 ** (HIGHEST / 4)), abs=0.1)


def laplace(cls: int) -> NDArray[np.float64]:
    """Probabilities of the columns for a Laplace variable of mean magnitude 2^(class / 4), by its distribution."""
    b = 2.0 ** (cls / 4)
    inside = [_between(value - 0.5, value + 0.5, b) for value in range(-LARGEST, LARGEST + 1)]
    return np.array([*inside, 1 - sum(inside)]).clip(1e-300)


def _between(low: float, high: float, b: float) -> float:
    return float(scipy.stats.laplace.cdf(high, scale=b) - scipy.stats.laplace.cdf(low, scale=b))


@pytest.mark.parametrize("cls", range(LOWEST, HIGHEST + 1))
def test_tables_cost_little_more_than_the_laplace_variables_they_stand_for(cls: int) -> None:
    """Rare symbols are escaped, at 32 bits more, so that few floors of 1/4096 are paid for."""
    wanted, table = laplace(cls), LAPLACE.frequencies[cls - LOWEST] / TOTAL
    given = table > 0
    escaped = wanted[~given].sum()
    cost = -(wanted[given] * np.log2(table[given])).sum() + escaped * (32 - np.log2(table[ESCAPE]))
    lost = cost + float((wanted * np.log2(wanted)).sum())
    assert 0 <= lost < 0.02


@pytest.mark.parametrize("cls", [LOWEST, LOWEST + 2, 0, HIGHEST])
def test_no_unit_of_frequency_would_be_better_elsewhere(cls: int) -> None:
    row = LAPLACE.frequencies[cls - LOWEST].astype(float)
    wanted = np.where(row > 0, laplace(cls), 0)
    row = np.maximum(row, 1)
    loss = np.where(row > 1, wanted * np.log2(row / np.maximum(row - 1, 0.5)), np.inf)
    gain = wanted * np.log2((row + 1) / row)
    # Rows begin at floors, which may each be a unit off: no move saves more than 0.0002 bits a symbol.
    assert gain.max() < loss.min() + 2e-4


def test_cumulative_and_slots_agree() -> None:
    cumulative, slots = LAPLACE.cumulative(), LAPLACE.slots()
    assert slots.shape == (CLASSES, TOTAL)
    for row in (0, 10, CLASSES - 1):
        for column in (symbol(-1), symbol(0), ESCAPE):
            first = int(cumulative[row, column])
            last = first + int(LAPLACE.frequencies[row, column]) - 1
            assert slots[row, first] == slots[row, last] == column
            assert first == 0 or slots[row, first - 1] < column
            assert last == TOTAL - 1 or slots[row, last + 1] > column


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 50, 10**4, 10**12]))
@settings(max_examples=15)
def test_fitted_tables_are_tables_whatever_was_counted(seed: int, most: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, most + 1, size=(CLASSES, ALPHABET)) * (generator.random((CLASSES, ALPHABET)) < 0.2)
    tables = fitted_tables(counts.astype(np.int64))
    body = tables.frequencies[:, :ESCAPE].astype(int)
    assert np.abs(body - body[:, ::-1]).max() <= 1
    assert np.array_equal(fitted_tables(counts.astype(np.int64)).frequencies, tables.frequencies)


def test_nothing_counted_gives_the_laplace_tables() -> None:
    empty = fitted_tables(np.zeros((CLASSES, ALPHABET), np.int64))
    assert np.array_equal(empty.frequencies, LAPLACE.frequencies)


def test_counts_outweigh_the_model_once_there_are_many() -> None:
    counts = np.zeros((CLASSES, ALPHABET), np.int64)
    counts[:, [symbol(-2), symbol(2)]] = 500_000
    tables = fitted_tables(counts)
    assert (tables.frequencies[:, symbol(2)] > 1900).all()
    assert (tables.frequencies[:, symbol(0)] < 20).all()


def test_counts_of_a_symbol_and_its_negative_are_shared() -> None:
    counts = np.zeros((CLASSES, ALPHABET), np.int64)
    counts[:, symbol(5)] = 1000
    tables = fitted_tables(counts)
    assert (np.abs(tables.frequencies[:, symbol(5)].astype(int) - tables.frequencies[:, symbol(-5)]) <= 1).all()


@pytest.mark.parametrize("change", ["zero", "sum", "shape", "dtype"])
def test_what_is_no_table_is_refused(change: str) -> None:
    frequencies = LAPLACE.frequencies.copy()
    if change == "zero":
        frequencies[3, symbol(0)] += frequencies[3, ESCAPE]
        frequencies[3, ESCAPE] = 0
    elif change == "sum":
        frequencies[3, 5] += 1
    elif change == "shape":
        frequencies = frequencies[:-1]
    else:
        frequencies = frequencies.astype(np.int32)
    with pytest.raises(ValueError, match=r"frequencies must be|4096 in all"):
        Tables(frequencies)


def test_scales_count_in_sixteenths_of_an_octave() -> None:
    magnitudes = np.array([1, 2, 0.5, 2 ** (1 / 16), 2 ** (1.4 / 16), 2 ** (1.6 / 16), 0, 1e-38], np.float32)
    assert scale_number(magnitudes).tolist() == [0, 16, -16, 1, 1, 2, -1600, -1600]
