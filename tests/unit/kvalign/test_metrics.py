"""Distances between distributions, by brute force over every token in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kvalign.evaluate.metrics import Divergence, divergence, summarise


def logits(tokens: int, vocabulary: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def softmax(row: Tensor) -> list[float]:
    largest = float(row.max())
    weights = [math.exp(float(x) - largest) for x in row]
    return [weight / sum(weights) for weight in weights]


def test_every_distance_is_its_formula() -> None:
    reference, measured = logits(6, 20, 0), logits(6, 20, 0) + 0.3 * logits(6, 20, 1, 1.0)
    targets = torch.tensor([3, 0, 19, 7, 7, 11])
    found = divergence(reference, measured, targets)
    for t in range(6):
        p, q = softmax(reference[t].double()), softmax(measured[t].double())
        assert float(found.kl[t]) == pytest.approx(
            sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)), rel=1e-5
        )
        variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert float(found.total_variation[t]) == pytest.approx(variation, rel=1e-5)
        assert float(found.top1[t]) == (int(np.argmax(p)) == int(np.argmax(q)))
        assert float(found.nll_delta[t]) == pytest.approx(math.log(p[targets[t]] / q[targets[t]]), rel=1e-4, abs=1e-6)


def test_kl_is_of_the_uncompressed_from_the_codec_and_not_the_other_way() -> None:
    sharp, flat = torch.tensor([[8.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    towards_flat = float(divergence(sharp, flat, torch.tensor([0])).kl)
    towards_sharp = float(divergence(flat, sharp, torch.tensor([0])).kl)
    assert towards_flat == pytest.approx(math.log(2), abs=0.01)
    assert towards_sharp > 3


def test_equal_distributions_are_at_no_distance() -> None:
    reference = logits(4, 50, 2)
    found = divergence(reference, reference + 5.0, torch.zeros(4, dtype=torch.int64))  # a shift of all logits is none
    assert found.kl.max() < 1e-9
    assert found.total_variation.max() < 1e-6
    assert found.top1.tolist() == [1.0] * 4
    assert found.nll_delta.abs().max() < 1e-6


def test_small_distances_do_not_drown_in_rounding() -> None:
    """KL of 1e-8 nats between near distributions, in float64."""
    reference = logits(1, 1000, 3).double()
    moved = reference.clone()
    moved[0, 5] += 1e-3
    p = softmax(reference[0])[5]
    found = float(divergence(reference, moved, torch.tensor([0])).kl)
    assert found == pytest.approx(p * (1 - p) * 1e-6 / 2, rel=0.01)


def of(*kl: float) -> Divergence:
    values = torch.tensor(kl)
    return Divergence(values, values / 2, (values < 1).float(), -values)


def test_a_summary_weighs_tokens_and_its_interval_windows() -> None:
    windows = [of(0.0, 2.0, 4.0), of(1.0), of(0.5, 0.5)]
    summary = summarise(windows)
    assert (summary.tokens, summary.windows) == (6, 3)
    assert summary.kl_mean == pytest.approx(8 / 6)
    assert summary.kl_max == 4.0
    assert summary.kl_p99 == pytest.approx(np.quantile([0, 2, 4, 1, 0.5, 0.5], 0.99), rel=1e-5)
    assert summary.top1 == pytest.approx(3 / 6)
    assert summary.total_variation == pytest.approx(4 / 6)
    assert summary.nll_delta == pytest.approx(-8 / 6)
    assert summary.kl_low is not None
    assert summary.kl_high is not None
    assert 0.5 <= summary.kl_low <= summary.kl_high <= 2.0


def test_the_interval_is_that_of_the_mean_over_windows() -> None:
    """Many windows of known spread: 1.96 standard errors to each side."""
    means = torch.rand(200, generator=torch.Generator().manual_seed(0))
    summary = summarise([of(float(mean)) for mean in means])
    error = float(means.std()) / 200**0.5
    assert summary.kl_low == pytest.approx(float(means.mean()) - 1.96 * error, abs=0.15 * error)
    assert summary.kl_high == pytest.approx(float(means.mean()) + 1.96 * error, abs=0.15 * error)
    assert summary == summarise([of(float(mean)) for mean in means])
    assert summary != summarise([of(float(mean)) for mean in means], seed=1)


def test_one_window_has_no_interval() -> None:
    summary = summarise([of(0.25, 0.75)])
    assert summary.kl_mean == 0.5
    assert (summary.kl_low, summary.kl_high) == (None, None)
