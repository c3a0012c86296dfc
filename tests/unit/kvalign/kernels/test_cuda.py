"""The Triton kernels against the reference and against Numba's; interpreted where there is no graphics processor."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from resident_plans import layer_plan, side_plan
from torch import Tensor

from kvalign.geometry import KINDS
from kvalign.kernels import reference
from kvalign.resident.attention import Counters, Mask, attend, fused_by_triton
from kvalign.resident.layout import PAGE_TOKENS, pack, unpack
from kvalign.resident.plan import GroupPlan, LayerPlan
from kvalign.resident.state import LayerState

NAME = "kvalign.kernels.cuda"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = (8, 3, 5, 1, 7, 2, 6, 4, 3)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not os.environ.get("CI"), reason="triton is not installed"
)


@pytest.fixture(scope="module")
def cuda() -> Iterator[ModuleType]:
    """The kernels; without a graphics processor made anew for the interpreter, whoever imported Triton before."""
    if DEVICE == "cuda":
        yield importlib.import_module(NAME)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, NAME, raising=False)
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        for name in ("max", "sum"):  # Triton's own, in Triton too, and compiled if it was imported before
            own = getattr(tl, name)
            if not isinstance(own, InterpretedFunction):
                patch.setattr(tl, name, InterpretedFunction(own.fn))
        yield importlib.import_module(NAME)


# ---- states, and attention on them


def filled(
    plan: LayerPlan,
    *,
    steps: Sequence[int] = (300,),
    padding: Sequence[int] = (0, 30),
    dtype: torch.dtype = torch.bfloat16,
    sinks: int = 3,
    recent: int = 5,
) -> LayerState:
    """Steps above 0 append as many tokens, those below forget as many."""
    generator = torch.Generator().manual_seed(1)
    state = LayerState(plan, sinks, recent)
    for step in steps:
        if step < 0:
            state.crop(-step)
            continue
        sizes = (plan.key_dim, plan.value_dim)
        keys, values = (
            torch.randn(len(padding), plan.kv_heads, step, size, generator=generator).to(dtype) for size in sizes
        )
        state.append(keys, values, torch.tensor(padding))
        state.settle()
    return state


def some_queries(state: LayerState, shared: int, seed: int = 2) -> Tensor:
    """[B, QH, DK], scaled: enough for probabilities to differ a thousandfold."""
    generator = torch.Generator().manual_seed(seed)
    plan = state.plan
    return 0.5 * torch.randn(state.rows, shared * plan.kv_heads, plan.key_dim, generator=generator)


def attended(
    cuda: ModuleType,
    state: LayerState,
    queries: Tensor,
    visible: Tensor | None = None,
    *,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """[B, QH, DV] by the kernels. visible: [B, slots]."""
    slots, hidden = state.raw_slots(), None
    seen = slots >= 0
    if visible is not None:
        seen &= visible.gather(1, slots.clamp_min(0))
        hidden = ~visible[:, : state.coded_tokens]
    shared = queries.shape[1] // state.plan.kv_heads
    found = []
    for group, pages in zip(state.plan.groups, state.pages, strict=True):
        heads, own = slice(group.first_head * shared, group.end_head * shared), slice(group.first_head, group.end_head)
        found.append(
            cuda.attend_one(
                group.to(DEVICE),
                queries[:, heads].to(DEVICE),
                *((pages[kind].codes.to(DEVICE), pages[kind].scales.to(DEVICE)) for kind in KINDS),
                torch.tensor(state.counts, dtype=torch.int32, device=DEVICE),
                state.first_coded.to(DEVICE),
                None if hidden is None else hidden.to(DEVICE),
                *(state.raw(kind)[:, own].to(DEVICE) for kind in KINDS),
                seen.to(DEVICE),
                softcap=softcap,
                sink_logits=None if sink_logits is None else sink_logits[heads].to(DEVICE),
            ).cpu()
        )
    return torch.cat(found, dim=1)


def truth(
    state: LayerState,
    queries: Tensor,
    visible: Tensor | None = None,
    *,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    seen = torch.arange(state.slots) >= state.padding[:, None]
    if visible is not None:
        seen = seen & visible
    keys, values = (state.dense(kind, torch.float32) for kind in KINDS)
    found = reference.attend(
        queries[:, :, None],
        keys,
        values,
        seen[:, None, None],
        scaling=1.0,
        softcap=softcap or None,
        sink_logits=sink_logits,
    )
    return found[:, :, 0]


def assert_near(found: Tensor, wanted: Tensor) -> None:
    """Sums of thousands of float32 in other orders, and powers within 2^-22, stay ten times below this."""
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


# ---- unpacking


@pytest.mark.parametrize("widths", [*([width] for width in range(1, 9)), MIXED], ids=str)
def test_coefficients_are_the_reference_s(cuda: ModuleType, widths: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    side = side_plan([widths[index % len(widths)] for index in range(19)], 20, generator)
    pages = torch.randint(0, 256, (2, 3, side.layout.page_bytes), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (2, 3, PAGE_TOKENS), dtype=torch.uint8, generator=generator)
    wanted = reference.coefficients(side, pages, scales)
    found = cuda.coefficients(side.to(DEVICE), pages.to(DEVICE), scales.to(DEVICE)).cpu()
    # Each level within float32's rounding of a cubic whose terms are up to eight times as large as it.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (0,), (2, 0), (0, 2), (2, 1, 2)], ids=str)
def test_coefficients_take_any_batch_and_no_pages(cuda: ModuleType, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    side = side_plan([6, 3, 1], 3, generator)
    pages = torch.randint(0, 256, (*shape, side.layout.page_bytes), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (*shape, PAGE_TOKENS), dtype=torch.uint8, generator=generator)
    wanted = reference.coefficients(side, pages, scales)
    found = cuda.coefficients(side.to(DEVICE), pages.to(DEVICE), scales.to(DEVICE)).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_coefficients_read_pages_where_they_are(cuda: ModuleType) -> None:
    generator = torch.Generator().manual_seed(3)
    side = side_plan([6, 3, 1], 3, generator)
    pages = torch.randint(0, 256, (3, 5, side.layout.page_bytes), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 150, (3, 5, PAGE_TOKENS), dtype=torch.uint8, generator=generator)
    wanted = reference.coefficients(side, pages[1:, 1::2], scales[1:, 1::2])
    found = cuda.coefficients(side.to(DEVICE), pages.to(DEVICE)[1:, 1::2], scales.to(DEVICE)[1:, 1::2]).cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# ---- attention


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "head"])
@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ((37,), []),
        ((140,), [128]),
        ((411,), [128, 128, 128]),
        ((300, -94, 141), [128, 78, 128]),
        ((300, -171, 131, -130), [128, 1]),
    ],
    ids=str,
)
def test_attention_is_the_reference_s(
    cuda: ModuleType, joint: bool, steps: Sequence[int], counts: Sequence[int]
) -> None:
    state = filled(layer_plan(2, 24, 10, widths=MIXED, joint=joint), steps=steps)
    assert state.counts == counts
    queries = some_queries(state, 3)
    assert_near(attended(cuda, state, queries), truth(state, queries))


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "head"])
@pytest.mark.parametrize(
    ("softcap", "sinks", "hides"),
    [(1.5, False, False), (0.0, True, False), (0.0, False, True), (1.5, True, True)],
    ids=["softcap", "sinks", "hidden", "all"],
)
def test_softcap_sinks_and_hidden_slots(
    cuda: ModuleType, joint: bool, softcap: float, sinks: bool, hides: bool
) -> None:
    state = filled(layer_plan(2, 12, 20, widths=(4, 3, 2), joint=joint), steps=(300, -94, 141), padding=(0, 150))
    queries = some_queries(state, 2)
    visible = torch.rand(2, state.slots, generator=torch.Generator().manual_seed(4)) < 0.3 if hides else None
    logits = torch.tensor([-2.0, 3.0, 0.0, 30.0]) if sinks else None
    found = attended(cuda, state, queries, visible, softcap=softcap, sink_logits=logits)
    assert_near(found, truth(state, queries, visible, softcap=softcap, sink_logits=logits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attention_is_numba_s(cuda: ModuleType, dtype: torch.dtype) -> None:
    state = filled(layer_plan(2, 24, 10, widths=MIXED), dtype=dtype, steps=(300, -94, 141))
    queries = some_queries(state, 3)
    visible = torch.rand(2, state.slots, generator=torch.Generator().manual_seed(4)) < 0.5
    sinks = torch.linspace(-1, 2, 6)
    counters = Counters({})
    wanted = attend(
        state,
        queries[:, :, None],
        Mask(visible[:, None, None]),
        counters,
        scaling=1.0,
        softcap=4.0,
        sink_logits=sinks,
    )
    assert counters.fused == {"numba": 1}
    assert_near(attended(cuda, state, queries, visible, softcap=4.0, sink_logits=sinks), wanted[:, :, 0])


@pytest.mark.parametrize(("key_rank", "value_rank"), [(1, 70), (37, 5), (72, 72)])
def test_any_rank(cuda: ModuleType, key_rank: int, value_rank: int) -> None:
    generator = torch.Generator().manual_seed(5)
    sides = [
        side_plan([MIXED[index % len(MIXED)] for index in range(rank)], 72, generator)
        for rank in (key_rank, value_rank)
    ]
    state = filled(LayerPlan(3, 24, 24, (GroupPlan(0, 3, *sides),)), steps=(270,))
    queries = some_queries(state, 1)
    assert_near(attended(cuda, state, queries), truth(state, queries))


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize(("key_rank", "value_rank"), [(0, 4), (4, 0), (0, 0)])
def test_no_coefficients_and_no_rows(cuda: ModuleType, rows: int, key_rank: int, value_rank: int) -> None:
    """Values without coefficients are their mean; keys without them are all alike, so that values are averaged."""
    generator = torch.Generator().manual_seed(5)
    keys, values = (side_plan([4] * rank, 8, generator) for rank in (key_rank, value_rank))
    pages = [
        torch.randint(0, 256, (rows, 2, side.layout.page_bytes), dtype=torch.uint8, generator=generator)
        for side in (keys, values)
    ]
    scales = torch.full((rows, 2, PAGE_TOKENS), 130, dtype=torch.uint8)
    found = cuda.attend_one(
        GroupPlan(0, 2, keys, values).to(DEVICE),
        torch.randn(rows, 4, 4, generator=generator).to(DEVICE),
        *((codes.to(DEVICE), scales.to(DEVICE)) for codes in pages),
        torch.tensor([128, 5], dtype=torch.int32, device=DEVICE),
        torch.zeros(rows, dtype=torch.int64, device=DEVICE),
        None,
        *(torch.zeros(rows, 2, 0, 4, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)),
        torch.ones(rows, 0, dtype=torch.bool, device=DEVICE),
    ).cpu()
    assert found.shape == (rows, 4, 4)
    if rows and not key_rank:
        dense = reference.dense(values, pages[1], scales)[:, :133] if value_rank else values.mean.expand(rows, 1, 8)
        assert_near(found, dense.mean(1).unflatten(1, (2, 4)).repeat_interleave(2, dim=1))
    elif rows:
        assert_near(found, values.mean.view(2, 4).repeat_interleave(2, dim=0).expand(rows, -1, -1))


@pytest.mark.parametrize("shared", [1, 17, 70])
def test_any_number_of_queries(cuda: ModuleType, shared: int) -> None:
    state = filled(layer_plan(1, 8, 6, widths=(4, 3)), steps=(270,))
    queries = some_queries(state, shared)
    assert_near(attended(cuda, state, queries), truth(state, queries))


@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_any_number_of_ranges(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Queries point along the keys of single tokens, so that the largest score is on each page in turn."""
    state = filled(layer_plan(1, 24, 10, widths=(6, 4)), steps=(700,))
    keys = state.dense("keys", torch.float32)[:, 0]
    queries = torch.stack([0.2 * keys[:, at] for at in (40, 200, 300, 450, 600, 690)], dim=1)
    wanted = truth(state, queries)
    monkeypatch.setattr(cuda, "_programs", lambda device: programs)
    assert_near(attended(cuda, state, queries), wanted)


def test_rows_that_see_nothing_are_zero(cuda: ModuleType) -> None:
    """One row that sees nothing, one whose pages are all padding, one that sees a single token on a page."""
    state = filled(layer_plan(2, 12, 8, widths=(4, 3)), steps=(300,), padding=(0, 296, 0))
    queries = some_queries(state, 2)
    visible = torch.ones(3, state.slots, dtype=torch.bool)
    visible[0] = False
    visible[2] = False
    visible[2, 200] = True
    for logits in (None, torch.tensor([-2.0, 3.0, 0.0, 0.5])):
        found = attended(cuda, state, queries, visible, sink_logits=logits)
        assert found[0].eq(0).all()
        assert_near(found, truth(state, queries, visible, sink_logits=logits))


def test_what_holds_nothing_does_not_matter(cuda: ModuleType) -> None:
    """Lanes behind a cropped page's tokens, raw tokens that are not seen, and what lies around pages in memory."""
    state = filled(layer_plan(2, 12, 8, widths=MIXED), steps=(300, -94, 141), padding=(0, 320))
    queries = some_queries(state, 2)
    visible = torch.ones(2, state.slots, dtype=torch.bool)
    visible[:, -3:-1] = False
    wanted = attended(cuda, state, queries, visible)
    generator = torch.Generator().manual_seed(6)
    for kind in KINDS:
        pages, layout = state.pages[0][kind], state.plan.groups[0].side(kind).layout
        codes = unpack(pages.codes, layout)
        limits = torch.tensor([1 << width for width in layout.widths])[:, None]
        junk = torch.randint(0, 256, codes.shape, generator=generator) % limits
        codes[:, 1, :, state.counts[1] :] = junk[:, 1, :, state.counts[1] :].to(torch.uint8)
        around = torch.full((4, 5, layout.page_bytes), 255, dtype=torch.uint8)
        around[1:-1, 1:-1] = pack(codes, layout)
        scales = torch.full((4, 5, PAGE_TOKENS), 255, dtype=torch.uint8)
        scales[1:-1, 1:-1] = pages.scales
        scales[1:-1, 2, state.counts[1] :] = 255
        pages.codes, pages.scales = around[1:-1, 1:-1], scales[1:-1, 1:-1]
        slots, raw = state.raw_slots(), state.raw_buffer(kind)
        unseen = (slots < 0) | ~visible.gather(1, slots.clamp_min(0))
        assert unseen.any(1).all()
        raw[:, :, : slots.shape[1]].masked_fill_(unseen[:, None, :, None], float("nan"))
        raw[:, :, slots.shape[1] :] = float("nan")
    torch.testing.assert_close(attended(cuda, state, queries, visible), wanted, rtol=0, atol=0)


def test_hidden_slots_may_be_any_view(cuda: ModuleType) -> None:
    state = filled(layer_plan(1, 8, 6, widths=(4, 3)), steps=(270,))
    queries = some_queries(state, 2)
    visible = torch.rand(2 * state.slots, 2, generator=torch.Generator().manual_seed(4)).T[:, ::2] < 0.5
    assert not visible.is_contiguous()
    assert_near(attended(cuda, state, queries, visible), truth(state, queries, visible))


def test_attention_hands_the_kernels_what_they_ask_for(cuda: ModuleType) -> None:
    state = filled(layer_plan(2, 8, 6, widths=(5, 3), joint=False), steps=(270,))
    queries = some_queries(state, 2)
    visible = torch.rand(2, state.slots, generator=torch.Generator().manual_seed(4)) < 0.5
    if DEVICE == "cuda":
        pytest.skip("the dispatch itself runs on a graphics processor")
    found = fused_by_triton(cuda, state, queries[:, :, None], Mask(visible[:, None, None]), 0.5, None, None)
    assert_near(found[:, :, 0], attended(cuda, state, queries * 0.5, visible))


# ---- without a graphics processor

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvalign.kernels import cuda

POINTERS = {
    **dict.fromkeys(("pages", "scales", "hidden"), "*u8"),
    **dict.fromkeys(("widths", "offsets", "planes", "counts"), "*i32"),
    **dict.fromkeys(("starts", "first"), "*i64"),
    **dict.fromkeys(("absorbed", "polynomials", "scores", "found", "tops", "weights", "sums"), "*fp32"),
    "softcap": "fp32",
}
for kernel, constants in (
    (cuda._coefficients, {"BLOCK": 16}),
    (cuda._score_pages, {"CAPPED": True, "TILE": 16, "BLOCK": 16}),
    (cuda._score_pages, {"CAPPED": False, "TILE": 64, "BLOCK": 16, "hidden": None}),
    (cuda._sum_values, {"TILE": 16, "BLOCK": 16, "TOKENS": 32}),
):
    types = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, types, constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, **cuda._OPTIONS})
    assert made.asm["ptx"]
print("compiled")
"""


def test_kernels_are_imported_and_compiled_without_a_graphics_processor(tmp_path: Path) -> None:
    """The interpreter lets pass what the compiler refuses: types that change in a branch or a loop."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr
