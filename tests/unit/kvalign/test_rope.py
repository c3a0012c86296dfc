"""Rotary positions: against complex numbers, and their inverse and transpose."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvalign.rope import NO_ROPE, Pairing, Rope

PAIRINGS: tuple[Pairing, ...] = ("none", "half", "interleaved")
EXACT = torch.float32


@st.composite
def ropes(draw: st.DrawFn) -> tuple[Rope, Tensor, Tensor]:
    """A rope, keys [2, T, D] with channels beyond its rotary ones, and positions."""
    pairing = draw(st.sampled_from(PAIRINGS))
    pairs, rest, tokens = draw(st.integers(1, 4)), draw(st.sampled_from([0, 1, 4])), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    inv_freq = torch.rand(pairs, generator=generator)
    rope = Rope(pairing, inv_freq, draw(st.sampled_from([1.0, 0.7, 1.39])))
    keys = torch.randn(2, tokens, 2 * pairs + rest, generator=generator)
    return rope, keys, torch.randint(2048, (tokens,), generator=generator)


def by_complex_numbers(rope: Rope, keys: Tensor, positions: Tensor) -> Tensor:
    y = keys.double().clone()
    n = rope.inv_freq.numel()
    for pair in range(n if rope.pairing != "none" else 0):
        i, j = (pair, pair + n) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
        # The angle in float32, as models compute it; all else in float64.
        angle = (positions.float() * rope.inv_freq[pair]).double().numpy()
        turned = (keys[..., i].double().numpy() + 1j * keys[..., j].double().numpy()) * np.exp(1j * angle)
        y[..., i] = torch.tensor(turned.real * rope.scaling)
        y[..., j] = torch.tensor(turned.imag * rope.scaling)
    return y


@given(ropes())
def test_redo_turns_each_pair_and_leaves_the_rest(case: tuple[Rope, Tensor, Tensor]) -> None:
    rope, keys, positions = case
    found = rope.redo(keys, positions, EXACT)
    torch.testing.assert_close(found.double(), by_complex_numbers(rope, keys, positions), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[..., rope.rotary_dim :], keys[..., rope.rotary_dim :])


@given(ropes(), st.sampled_from([torch.float16, torch.bfloat16]))
def test_cos_and_sin_are_rounded_as_the_model_rounds_them(
    case: tuple[Rope, Tensor, Tensor], dtype: torch.dtype
) -> None:
    rope, keys, positions = case
    if rope.pairing == "none":
        return
    angles = positions.float()[:, None] * rope.inv_freq
    cos, sin = ((f(angles) * rope.scaling).to(dtype).float() for f in (torch.cos, torch.sin))
    n = rope.inv_freq.numel()
    i, j = (slice(0, n), slice(n, 2 * n)) if rope.pairing == "half" else (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    found = rope.redo(keys, positions, dtype)
    torch.testing.assert_close(found[..., i], keys[..., i] * cos - keys[..., j] * sin, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[..., j], keys[..., j] * cos + keys[..., i] * sin, rtol=1e-6, atol=1e-6)


@given(ropes(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_undo_inverts_redo(case: tuple[Rope, Tensor, Tensor], dtype: torch.dtype) -> None:
    """Also where cos and sin were rounded to 16 bit: the inverse divides by what they became."""
    rope, keys, positions = case
    back = rope.undo(rope.redo(keys, positions, dtype), positions, dtype)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-5)
    forth = rope.redo(rope.undo(keys, positions, dtype), positions, dtype)
    torch.testing.assert_close(forth, keys, rtol=1e-5, atol=1e-5)


@given(ropes(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_undo_gradient_is_the_transpose_of_redo(case: tuple[Rope, Tensor, Tensor], dtype: torch.dtype) -> None:
    rope, keys, positions = case
    gradient = torch.randn(keys.shape, generator=torch.Generator().manual_seed(1))
    left = (gradient * rope.redo(keys, positions, dtype)).sum()
    right = (rope.undo_gradient(gradient, positions, dtype) * keys).sum()
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_undo_gradient_is_not_undo_where_there_is_a_scale() -> None:
    """That the case above can fail: the transpose multiplies by the scale, the inverse divides by it."""
    rope = Rope("half", torch.tensor([0.5]), scaling=2.0)
    x, positions = torch.randn(3, 2), torch.arange(3)
    torch.testing.assert_close(rope.undo_gradient(x, positions, EXACT), 4 * rope.undo(x, positions, EXACT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_keys_are_unrotated_in_float32_and_rotated_in_their_own_dtype(dtype: torch.dtype) -> None:
    keys = torch.randn(1, 3, 4).to(dtype)
    for rope in (NO_ROPE, Rope("half", torch.tensor([0.5, 0.1]))):
        assert rope.undo(keys, torch.arange(3), dtype).dtype == torch.float32
        assert rope.redo(keys, torch.arange(3), dtype).dtype == dtype
        assert rope.redo(keys.float(), torch.arange(3), dtype).dtype == torch.float32
        assert rope.undo_gradient(keys, torch.arange(3), dtype).dtype == torch.float32
