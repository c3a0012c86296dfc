"""The compiled kernels against the reference, piece by piece; whole layers are in resident/test_attention.py."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from resident_plans import filled, layer_plan, layer_tokens, side_plan, slow_unpack, tokens_like
from torch import Tensor

from kvalign import kernels
from kvalign.kernels import cpu, reference, vectors
from kvalign.kernels.reference import TRIED_SCALES
from kvalign.resident.attention import Counters, Mask, attend
from kvalign.resident.layout import PAGE_TOKENS
from kvalign.resident.plan import SidePlan
from kvalign.resident.state import LayerState

WIDTHS = [*((width,) * 3 for width in range(1, 9)), (8, 7, 6, 5, 4, 3, 2, 1), (1,), (8,), (6, 4, 4, 3, 1), (5, 2)]
SHAPES = [(1,), (3,), (2, 1), (3, 2), (2, 2, 3)]  # [..., N] pages


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def made(widths: tuple[int, ...], shape: tuple[int, ...] = (2,), seed: int = 0) -> tuple[SidePlan, Tensor]:
    """A side and tokens [..., N x PAGE_TOKENS, P] for it."""
    generator = torch.Generator().manual_seed(seed)
    side = side_plan(widths, len(widths) + 1, generator)
    return side, tokens_like(side, (*shape[:-1], shape[-1] * PAGE_TOKENS), generator)


def random_pages(side: SidePlan, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randint(0, 256, (*shape, side.layout.page_bytes), generator=generator)
    scales = torch.randint(0, 256, (*shape, PAGE_TOKENS), generator=generator)
    return pages.to(torch.uint8), scales.to(torch.uint8)


def squared_errors(side: SidePlan, x: Tensor, pages: Tensor, scales: Tensor) -> Tensor:
    """[..., T] what encoding minimises."""
    z = (x - side.mean) @ side.analysis
    return ((reference.coefficients(side, pages, scales).mT - z).square() * side.energy).sum(-1)


# ---- encoding


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_are_coded_as_the_reference_codes_them(widths: tuple[int, ...], seed: int) -> None:
    side, x = made(widths, (3,), seed)
    pages, scales = cpu.encode(side, x)
    wanted_pages, wanted_scales = reference.encode(side, x)
    same = (scales == wanted_scales).flatten()
    # A tie between two scales, or a number between two levels, may fall to either side of a rounding.
    assert (~same).float().mean() < 0.02
    ours, theirs = (
        torch.cat([torch.tensor(slow_unpack(p.tolist(), widths)) for p in q], 1) for q in (pages, wanted_pages)
    )
    assert (ours[:, same] != theirs[:, same]).float().mean() < 0.001
    torch.testing.assert_close(
        squared_errors(side, x, pages, scales),
        squared_errors(side, x, wanted_pages, wanted_scales),
        rtol=1e-3,
        atol=1e-8,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_batches_of_any_shape_are_coded(shape: tuple[int, ...]) -> None:
    side, x = made((6, 4, 3, 1), shape)
    pages, scales = cpu.encode(side, x)
    assert pages.shape == (*shape, side.layout.page_bytes)
    assert scales.shape == (*shape, PAGE_TOKENS)
    assert pages.dtype == scales.dtype == torch.uint8
    flat_pages, flat_scales = cpu.encode(side, x.reshape(-1, x.shape[-1]))
    assert torch.equal(pages.flatten(0, -2), flat_pages)
    assert torch.equal(scales.flatten(0, -2), flat_scales)


def test_tokens_that_do_not_lie_together_are_coded() -> None:
    side, x = made((6, 4, 3, 1), (2, 2))
    wide = torch.full((4, *x.shape[1:]), float("nan"))
    wide[::2] = x
    assert all(torch.equal(a, b) for a, b in zip(cpu.encode(side, wide[::2]), cpu.encode(side, x), strict=True))
    turned = x.mT.contiguous().mT
    assert all(torch.equal(a, b) for a, b in zip(cpu.encode(side, turned), cpu.encode(side, x), strict=True))


def test_a_token_is_coded_the_same_wherever_it_stands() -> None:
    side, x = made((6, 4, 4, 3, 1), (3,))
    order = torch.randperm(3 * PAGE_TOKENS, generator=torch.Generator().manual_seed(2))
    (pages, scales), (moved, moved_scales) = cpu.encode(side, x), cpu.encode(side, x[order])
    assert torch.equal(moved_scales.flatten(), scales.flatten()[order])
    z, moved_z = (reference.coefficients(side, *coded) for coded in ((pages, scales), (moved, moved_scales)))
    assert torch.equal(moved_z, z[:, order])


def test_a_token_is_coded_the_same_whatever_its_neighbours_are() -> None:
    side, x = made((6, 4, 4, 3, 1), (1,))
    others = x * 1000
    others[37] = x[37]
    ours, theirs = (reference.coefficients(side, *cpu.encode(side, tokens))[:, 37] for tokens in (x, others))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("size", [0.0, 1e-20, 1e-6, 1e4, 1e9])
def test_sizes_beyond_the_scale_are_coded_as_the_reference_codes_them(size: float) -> None:
    side, x = made((8, 5, 3), (1,))
    off = (x - side.mean) * size + side.mean
    pages, scales = cpu.encode(side, off)
    wanted = reference.encode(side, off)
    torch.testing.assert_close(
        squared_errors(side, off, pages, scales), squared_errors(side, off, *wanted), rtol=1e-3, atol=1e-8
    )


def test_the_scale_is_the_best_of_those_tried() -> None:
    side, x = made((4, 3, 1), (1,))
    z = (x - side.mean) @ side.analysis
    _, scales = cpu.encode(side, x)
    start = ((z.square() * side.energy).sum(-1).log2() * 4).round() + 128
    least = torch.full((PAGE_TOKENS,), float("inf"))
    for step in TRIED_SCALES:
        size = torch.exp2((start + step - 128) / 8)
        error = torch.zeros(PAGE_TOKENS)
        for r, width in enumerate(side.widths):
            distance = (side.books[width].levels() * size[:, None] - z[:, r : r + 1]).abs().amin(1)
            error += distance.square() * side.energy[r]
        least = torch.minimum(least, error)
    torch.testing.assert_close(squared_errors(side, x, *cpu.encode(side, x)), least, rtol=1e-4, atol=1e-8)
    assert (scales.flatten() - start).abs().max() <= 6


# ---- unpacking


@pytest.mark.parametrize("widths", WIDTHS)
def test_coefficients_are_those_of_the_reference(widths: tuple[int, ...]) -> None:
    side, _ = made(widths)
    pages, scales = random_pages(side, (3,))
    found = cpu.coefficients(side, pages, scales)
    wanted = reference.coefficients(side, pages, scales)
    assert found.shape == wanted.shape
    sizes = torch.exp2((scales.flatten().float() - 128) / 8)
    # A polynomial in float32 of up to 255 against levels in float64: a few last places of the largest level.
    torch.testing.assert_close(found / sizes, wanted / sizes, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("shape", [*SHAPES, (0,), (2, 0)])
def test_batches_of_any_shape_are_unpacked(shape: tuple[int, ...]) -> None:
    side, _ = made((7, 4, 4, 1))
    pages, scales = random_pages(side, shape)
    found = cpu.coefficients(side, pages, scales)
    assert found.shape == (*shape[:-1], 4, shape[-1] * PAGE_TOKENS)
    torch.testing.assert_close(found, reference.coefficients(side, pages, scales), rtol=1e-4, atol=0.5)


def test_pages_that_do_not_lie_together_are_unpacked() -> None:
    side, _ = made((7, 4, 4, 1))
    pages, scales = random_pages(side, (3, 4))
    found = cpu.coefficients(side, pages[:, 1:3], scales[:, 1:3])
    assert torch.equal(found, cpu.coefficients(side, pages, scales)[..., 128:384])


def test_bytes_beside_the_pages_are_not_read() -> None:
    side, _ = made((7, 4, 4, 1))
    size = side.layout.page_bytes
    pages, scales = random_pages(side, (1,))
    answers = []
    for rubbish in (0, 255):
        around = torch.full((3 * size,), rubbish, dtype=torch.uint8)
        around[size : 2 * size] = pages[0]
        answers.append(cpu.coefficients(side, around[size : 2 * size][None], scales))
    assert torch.equal(*answers)


def test_what_was_encoded_comes_back() -> None:
    side, x = made((8, 8, 8, 8), (2, 2))
    found = cpu.coefficients(side, *cpu.encode(side, x)).mT
    z = (x - side.mean) @ side.analysis
    assert float((found - z).norm()) < 0.02 * float(z.norm())


def test_the_kernel_is_the_processors_own_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    side, x = made((4, 2), (1,))
    called: list[str] = []
    for name in ("encode", "coefficients"):
        monkeypatch.setattr(cpu, name, lambda *args, name=name: called.append(name))
    kernels.encode(side, x)
    kernels.coefficients(side, *random_pages(side, (1,)))
    assert called == ["encode", "coefficients"]


# ---- attention


@pytest.mark.skipif(not vectors.CAN_LOOK_UP, reason="registers are no tables on this processor")
@pytest.mark.parametrize("here", [1, 2])
def test_levels_looked_up_are_those_computed(here: int) -> None:
    side, _ = made((8, 7, 7, 6, 5, 4, 3, 2, 1))
    codes, scales = (x.numpy().reshape(-1) for x in random_pages(side, (1, 2)))
    U = np.uint64
    stride, table = U(side.layout.page_bytes), side.levels.numpy().reshape(-1)
    keys = (codes, scales, side.width_array, side.offset_array, side.centred, stride, table)
    found = []
    for levels_of in (cpu._levels_looked_up, cpu._levels_computed):
        levels = np.zeros((len(side.widths), 2 * PAGE_TOKENS), dtype=np.float32)
        levels_of(keys, U(0), U(here), U(0), U(len(side.widths)), np.zeros(256, np.uint8), levels.reshape(-1))
        found.append(levels[:, : here * PAGE_TOKENS])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
    assert np.unique(found[0][0]).size > 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 64, 80])
def test_every_sixteen_bit_number_is_read(dtype: torch.dtype, width: int) -> None:
    """All finite ones, subnormal ones too, as float32, in vectors and behind them."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % width)]).unflatten(0, (-1, width))
    tokens, padded = len(numbers), -(-width // vectors.TILE_TOKENS) * vectors.TILE_TOKENS
    found = np.full((-(-tokens // vectors.LANES) * vectors.LANES, padded), np.nan, dtype=np.float32)
    visible = np.ones(tokens, dtype=np.uint8)
    visible[5] = 0
    size, count = np.uint64(width), np.uint64(tokens)
    half = numbers.view(torch.int16).numpy().reshape(-1)
    cpu._widen(half, np.uint64(0), size, visible, count, dtype == torch.bfloat16, found.reshape(-1))
    wanted = numbers.float()
    wanted[5] = 0
    assert np.array_equal(found[:tokens, :width], wanted.numpy())
    assert not found[:, width:].any()
    assert not found[tokens:].any()


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("tokens", [20, 150, 300, 700, 1300])
def test_any_number_of_ranges_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, rows: int, splits: int, tokens: int
) -> None:
    state = filled(layer_plan(2, 4, 5, widths=(6, 3, 2)), tokens, rows=rows, padding=[0, 3, 140][:rows])
    queries = torch.randn(rows, 6, 1, 4, generator=torch.Generator().manual_seed(1))
    wanted = attend(state, queries, Mask(), Counters({}), scaling=0.5)
    monkeypatch.setattr(cpu, "_threads", lambda: splits)
    monkeypatch.setattr(cpu.numba, "set_num_threads", lambda count: None)
    found = attend(state, queries, Mask(), Counters({}), scaling=0.5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", [10, 300, 700, 1290])
def test_a_range_far_above_the_others_is_all_that_counts(monkeypatch: pytest.MonkeyPatch, start: int) -> None:
    plan = layer_plan(1, 4, 4, widths=(8,))
    keys, values = layer_tokens(plan, 1, 1300, torch.Generator().manual_seed(1))
    keys[:, :, start : start + 5, 0] += 1000
    state = LayerState(plan, 4, 16)
    state.append(keys.bfloat16(), values.bfloat16(), torch.tensor([0]))
    state.settle()
    queries = torch.tensor([1.0, 0, 0, 0]).expand(1, 3, 1, 4)
    wanted = attend(state, queries, Mask(), Counters({}), scaling=1.0)
    monkeypatch.setattr(cpu, "_threads", lambda: 3)
    monkeypatch.setattr(cpu.numba, "set_num_threads", lambda count: None)
    found = attend(state, queries, Mask(), Counters({}), scaling=1.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    inside = state.dense("values", torch.float32)[0, 0, start : start + 5]
    assert ((found > inside.amin(0) - 1e-3) & (found < inside.amax(0) + 1e-3)).all()


def test_powers_of_two_are_exact_to_the_last_places() -> None:
    scores = np.zeros(256, dtype=np.float32)
    scores[:] = np.linspace(-70, 0, 256, dtype=np.float32) + np.float32(5)
    wanted = np.where(scores - 5 > -60, np.exp2(scores.astype(np.float64) - 5), 0)
    cpu_exp2(scores, np.float32(5))
    assert scores == pytest.approx(wanted, rel=3e-7)
    assert (scores[wanted == 0] == 0).all()


def cpu_exp2(scores: np.ndarray, top: np.float32) -> None:
    cpu._exp2.py_func(scores, scores.view(np.int32), np.uint64(0), np.uint64(256), top, np.empty(256, dtype=np.int32))


def test_as_many_threads_work_as_torch_has(threads: None) -> None:
    torch.set_num_threads(1)
    assert cpu._threads() == 1
    torch.set_num_threads(64)
    assert cpu._threads() == cpu.numba.config.NUMBA_NUM_THREADS


@pytest.mark.parametrize("count", [1, 2])
def test_any_number_of_threads_codes_the_same(threads: None, count: int) -> None:
    side, x = made((6, 4, 3, 1), (2, 3))
    wanted = cpu.encode(side, x)
    torch.set_num_threads(count)
    found = cpu.encode(side, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert torch.equal(cpu.coefficients(side, *found), cpu.coefficients(side, *wanted))


def test_callers_at_once_get_their_own_codes(threads: None) -> None:
    made_ = [made((6, 4, 3, 1), (3,), seed) for seed in range(3)]
    wanted = [cpu.coefficients(side, *cpu.encode(side, x)) for side, x in made_]
    wrong: list[int] = []
    start = threading.Barrier(3)

    def call(index: int) -> None:
        torch.set_num_threads(2)
        start.wait()
        side, x = made_[index]
        for _ in range(20):
            if not torch.allclose(cpu.coefficients(side, *cpu.encode(side, x)), wanted[index], atol=1e-3):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
