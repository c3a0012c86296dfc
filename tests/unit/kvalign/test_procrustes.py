"""Likeness of heads against scipy's orthogonal Procrustes on the rows themselves, and against closed forms."""

from collections.abc import Iterator

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from kvalign.align.procrustes import HeadRotations, different_heads, polar_factors


def rows(heads: int, dim: int, count: int = 200, seed: int = 0, noise: float = 0.3) -> Tensor:
    """Heads that are rotated, scaled and noisy copies of one another: [count, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    turns = torch.Generator().manual_seed(99)
    shared = torch.randn(count, dim, generator=generator) * torch.logspace(0, -1, dim)
    parts = []
    for head in range(heads):
        rotation = torch.linalg.qr(torch.randn(dim, dim, generator=turns)).Q
        parts.append((head + 1) * (shared @ rotation + noise * torch.randn(count, dim, generator=generator)))
    return torch.stack(parts, dim=1)


def chunks(x: Tensor) -> Iterator[Tensor]:
    yield from x.split(37)


def similarity(fitting: Tensor, held_out: Tensor) -> tuple[Tensor, Tensor]:
    rotations = HeadRotations(*fitting.shape[1:])
    for part in chunks(fitting):
        rotations.update(part)
    found = rotations.fit()
    for part in chunks(held_out):
        found.update(part)
    return found.before(), found.after()


def units(x: Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(x, dim=-1).transpose(0, 1).double().numpy()


@pytest.mark.parametrize("heads", [1, 4, 8, 11, 17])
def test_similarities_are_those_of_the_best_rotation_of_another_text(heads: int) -> None:
    fitting, held_out = rows(heads, 6, seed=1), rows(heads, 6, seed=2)
    before, after = similarity(fitting, held_out)
    fitted, tokens = units(fitting), units(held_out)
    for i in range(heads):
        for j in range(heads):
            assert float(before[i, j]) == pytest.approx((tokens[i] * tokens[j]).sum(1).mean(), abs=1e-5)
            if i < j:
                rotation, _ = scipy.linalg.orthogonal_procrustes(fitted[j], fitted[i])
                wanted = (tokens[i] * (tokens[j] @ rotation)).sum(1).mean()
                assert float(after[i, j]) == pytest.approx(wanted, abs=1e-4)
    torch.testing.assert_close(after, after.T)
    torch.testing.assert_close(after.diagonal(), torch.ones(heads), rtol=0, atol=1e-4)


def test_rotated_copies_of_one_head_are_alike_after_and_not_before() -> None:
    """Eight rotations of one isotropic head of 64 channels: near 0 as they stand, 1 once turned."""
    generator = torch.Generator().manual_seed(3)
    turns = torch.stack([torch.linalg.qr(torch.randn(64, 64, generator=generator)).Q for _ in range(8)])
    fitting, held_out = (torch.einsum("td,hde->the", torch.randn(512, 64, generator=generator), turns) for _ in "ab")
    before, after = similarity(fitting, held_out)
    assert different_heads(after) == pytest.approx(1, abs=1e-4)
    assert abs(different_heads(before)) < 0.02


def test_heads_of_noise_are_not_alike_on_text_that_was_not_fitted() -> None:
    """On the very text a rotation finds likeness in noise; measured on another there is none."""
    generator = torch.Generator().manual_seed(4)
    fitting, held_out = (torch.randn(400, 3, 16, generator=generator) for _ in "ab")
    assert different_heads(similarity(fitting, fitting)[1]) > 0.15
    assert abs(different_heads(similarity(fitting, held_out)[1])) < 0.05


def test_silent_and_constant_heads_divide_by_nothing() -> None:
    x = rows(4, 4)
    x[:, 0] = 0
    x[:, 1] = torch.tensor([3.0, 0.0, 0.0, 0.0])
    x[:, 2] = torch.tensor([0.0, -2.0, 0.0, 0.0])
    before, after = similarity(x, x)
    for found in (before, after):
        assert torch.isfinite(found).all()
        assert not found[0].any()
    assert before[1, 2] == 0
    assert after[1, 2] == pytest.approx(1)


def test_one_head_alone_is_like_itself() -> None:
    assert different_heads(torch.ones(1, 1)) == 1


def test_polar_factors_are_orthogonal_and_nearest() -> None:
    blocks = torch.randn(5, 7, 7, generator=torch.Generator().manual_seed(5))
    blocks[4, :, 3:] = 0  # singular
    found = polar_factors(blocks)
    torch.testing.assert_close(found @ found.mT, torch.eye(7).expand(5, 7, 7), rtol=0, atol=1e-5)
    for block, factor in zip(blocks, found, strict=True):
        assert float((block * factor).sum()) == pytest.approx(float(torch.linalg.svdvals(block).sum()), rel=1e-5)
