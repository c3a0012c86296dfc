"""Structure of pictures of channels: shares against pictures made by hand, and the words that follow from them."""

import numpy as np
import pytest
from scipy import stats

from kvalign.report import structure
from kvalign.report.structure import column_and_row_structure, describe_structure


def test_structure_of_pictures_made_by_hand() -> None:
    rng = np.random.default_rng(3)
    columns = np.tile(rng.uniform(0, 1, 40).astype(np.float32), (30, 1))
    assert column_and_row_structure(columns) == pytest.approx((1, 0), abs=1e-6)
    assert column_and_row_structure(columns.T) == pytest.approx((0, 1), abs=1e-6)
    assert column_and_row_structure(np.full((5, 7), 0.3, np.float32)) == (0, 0)
    assert column_and_row_structure(np.zeros((5, 7), np.float32)) == (0, 0)
    assert column_and_row_structure(np.full((2, 2), np.nan, np.float32)) == (0, 0)
    # 2 x 2 by hand: mean 3, total 26; column means 2 and 4 give 4, row means 1 and 5 give 16, the rest is 6.
    by_hand = 3 + np.array([[-3.0, -1], [1, 3]]) + np.sqrt(1.5) * np.array([[1, -1], [-1, 1]])
    assert column_and_row_structure(by_hand) == pytest.approx((4 / 26, 16 / 26))
    noise = column_and_row_structure(rng.uniform(0, 1, (90, 64)))
    assert max(noise) < 0.05
    columns[4, 5] = np.nan
    assert column_and_row_structure(columns) == pytest.approx((1, 0), abs=1e-6)


def test_structure_in_words() -> None:
    rng = np.random.default_rng(4)
    noise = rng.uniform(0, 0.1, (90, 64))
    channel, head, flat = rng.uniform(0, 0.9, 64), rng.uniform(0, 0.9, (90, 1)), np.ones((90, 64))
    rising = flat * np.linspace(0.1, 1, 64)
    said = describe_structure("keys", channel + noise, rising)
    share = round(100 * column_and_row_structure(channel + noise)[0])
    assert said.startswith(f"Keys: channels explain {share} % of the picture's variance and heads 0 %: columns,")
    assert "large in 100 % of the heads" in said
    assert said.endswith("variance rises with the channel index (rank correlation 1.00).")
    said = describe_structure("values", head + noise, rising[:, ::-1])
    assert said.startswith("Values: ")
    assert "%: rows, whole heads" in said
    assert said.endswith("variance falls with the channel index (rank correlation -1.00).")
    assert "columns and rows both" in describe_structure("keys", (channel + head) / 2, flat)
    said = describe_structure("keys", noise, flat)
    assert "neither columns nor rows" in said
    assert said.endswith("no trend over the channel index (rank correlation 0.00).")


def test_few_heads_of_noise_show_no_columns() -> None:
    rng = np.random.default_rng(5)
    two = rng.uniform(0, 1, (2, 128))
    assert column_and_row_structure(two)[0] > 0.3
    assert "neither columns nor rows" in describe_structure("keys", two, two)
    assert "too few" in describe_structure("keys", two[:1], two[:1])
    assert "too few" in describe_structure("keys", two[:, :1], two[:, :1])


def test_rank_correlation_against_scipy() -> None:
    rng = np.random.default_rng(6)
    for size in (2, 5, 64):
        a, b = rng.integers(0, 6, size) + np.arange(size) * 0.1, rng.integers(0, 4, size)
        if len(set(b.tolist())) > 1:
            assert structure._rank_correlation(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert structure._rank_correlation(np.arange(4), np.ones(4)) == 0
