"""A resident plan at rest: what rounding does to a basis, what comes back, and what damage is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from resident_plans import codebook
from torch import Tensor

from kvalign.geometry import KINDS, LayerGeometry
from kvalign.resident.plan import BasisKind, ResidentPlan, SidePlan
from kvalign.resident.stored import StoredGroup, StoredResident, StoredSide

GEOMETRY = (LayerGeometry(2, 3, 4), LayerGeometry(1, 3, 3), LayerGeometry(2, 4, 3))
BOOKS = {kind: {width: codebook(width) for width in (8, 4, 2, 1)} for kind in KINDS}


def skewed(features: int, generator: torch.Generator) -> Tensor:
    """A basis far from orthogonal, its rows of very different lengths."""
    rows = torch.randn(features, features, generator=generator) + 2 * torch.eye(features)
    return rows * torch.logspace(-3, 3, features)[:, None]


def stored_side(features: int = 6, seed: int = 0, widths: tuple[int, ...] = (2, 8, 0, 4, 4, 1)) -> StoredSide:
    generator = torch.Generator().manual_seed(seed)
    turns = torch.tensor([widths[index % len(widths)] for index in range(features)])
    deviation = torch.rand(features, generator=generator) + 0.1
    mean = torch.randn(features, generator=generator)
    return StoredSide.of(mean, skewed(features, generator), deviation, turns)


def stored(basis: BasisKind = "joint", indices: tuple[int, ...] = (0, 2)) -> StoredResident:
    layers = {}
    for index in indices:
        shape = GEOMETRY[index]
        spans = [(0, shape.kv_heads)] if basis == "joint" else [(h, h + 1) for h in range(shape.kv_heads)]
        layers[index] = tuple(
            StoredGroup(
                first,
                end,
                {
                    kind: stored_side((end - first) * shape.head_dim(kind), seed=10 * index + 2 * first + number)
                    for number, kind in enumerate(KINDS)
                },
            )
            for first, end in spans
        )
    return StoredResident(4.25, basis, BOOKS, {index: GEOMETRY[index] for index in indices}, layers)


def again(made: StoredResident) -> StoredResident:
    return StoredResident.from_json(json.loads(json.dumps(made.to_json())), made.tensors(), GEOMETRY)


def assert_equal_sides(ours: SidePlan, theirs: SidePlan) -> None:
    for name in ("mean", "analysis", "synthesis", "energy"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert ours.widths == theirs.widths
    assert dict(ours.books) == dict(theirs.books)


def assert_equal_plans(ours: ResidentPlan, theirs: ResidentPlan) -> None:
    assert (ours.bits, ours.basis, ours.sink_tokens) == (theirs.bits, theirs.basis, theirs.sink_tokens)
    assert ours.recent_tokens == theirs.recent_tokens
    assert list(ours.layers) == list(theirs.layers)
    for index, layer in ours.layers.items():
        other = theirs.layers[index]
        assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (other.kv_heads, other.key_dim, other.value_dim)
        for group, same in zip(layer.groups, other.groups, strict=True):
            assert (group.first_head, group.end_head) == (same.first_head, same.end_head)
            for kind in KINDS:
                assert_equal_sides(group.side(kind), same.side(kind))


def assert_inverse(left: Tensor, right: Tensor) -> None:
    """Left times right is one, as near as two numbers rounded to float32 can be."""
    assert ((left @ right - torch.eye(len(left))).abs() <= 2**-22 * (left.abs() @ right.abs())).all()


# ---- one side


@pytest.mark.parametrize("features", [1, 2, 6, 48])
def test_rounding_leaves_the_analysis_the_inverse_of_the_synthesis(features: int) -> None:
    side = stored_side(features, widths=(3, 8, 5)).side({3: codebook(3), 8: codebook(8), 5: codebook(5)})
    assert_inverse(side.analysis.double(), side.synthesis.double())
    assert_inverse(side.synthesis.double(), side.analysis.double())


def test_what_is_not_coded_is_lost_and_nothing_else() -> None:
    side = stored_side(6).side(BOOKS["keys"])
    assert len(side.widths) == 5
    assert_inverse(side.synthesis.double(), side.analysis.double())


def test_rows_are_the_basis_within_half_a_step_of_int8() -> None:
    generator = torch.Generator().manual_seed(3)
    basis = skewed(8, generator)
    widths = torch.tensor([4, 8, 1, 4, 0, 8, 2, 0])
    deviation = torch.tensor([1.0, 0.5, 3.0, 2.0, 0.1, 0.7, 1.0, 0.2])
    order = [5, 1, 3, 0, 6, 2, 7, 4]
    made = StoredSide.of(torch.arange(8.0), basis, deviation, widths)
    assert made.widths.tolist() == [8, 8, 4, 4, 2, 1, 0, 0]
    assert made.deviation.tolist() == deviation[order].tolist()
    assert torch.equal(made.mean, torch.arange(8.0))
    back = made.rows.float() * made.row_scale[:, None]
    assert ((back - basis[order]).abs() <= 0.5001 * made.row_scale[:, None]).all()
    assert (made.rows.abs().amax(1) == 127).all()
    assert (made.rows.dtype, made.widths.dtype) == (torch.int8, torch.uint8)


def test_a_side_takes_its_numbers_from_what_is_stored() -> None:
    made = stored_side(6)
    side = made.side(BOOKS["keys"])
    assert side.widths == (8, 4, 4, 2, 1)
    assert set(side.books) == {8, 4, 2, 1}
    torch.testing.assert_close(side.synthesis, made.rows[:5].float() * made.row_scale[:5, None])
    torch.testing.assert_close(side.energy, made.deviation[:5] ** 2 / (made.deviation[:5] ** 2).sum())
    assert float(side.energy.sum()) == pytest.approx(1)
    assert side.analysis.is_contiguous()
    assert side.synthesis.is_contiguous()


def test_a_basis_without_an_inverse_is_refused() -> None:
    made = stored_side(6)
    made.rows[3] = 0
    with pytest.raises(ValueError, match="no inverse"):
        made.side(BOOKS["keys"])


def test_a_width_without_a_codebook_is_refused() -> None:
    with pytest.raises(KeyError):
        stored_side(6).side({8: codebook(8)})


# ---- the whole


@pytest.mark.parametrize("basis", ["joint", "head"])
@pytest.mark.parametrize("indices", [(0, 2), (1,), (0, 1, 2), ()])
def test_what_was_stored_comes_back(basis: BasisKind, indices: tuple[int, ...]) -> None:
    made = stored(basis, indices)
    found = again(made)
    assert found.to_json() == made.to_json()
    assert found.tensors().keys() == made.tensors().keys()
    assert all(torch.equal(found.tensors()[name], tensor) for name, tensor in made.tensors().items())
    assert_equal_plans(found.plan(4, 64), made.plan(4, 64))


def test_a_plan_has_the_shape_of_the_model() -> None:
    plan = stored("head").plan(3, 65)
    assert (plan.bits, plan.basis, plan.sink_tokens, plan.recent_tokens) == (4.25, "head", 3, 65)
    assert list(plan.layers) == [0, 2]
    layer = plan.layers[2]
    assert (layer.kv_heads, layer.key_dim, layer.value_dim) == (2, 4, 3)
    assert [(group.first_head, group.end_head) for group in layer.groups] == [(0, 1), (1, 2)]
    assert [group.keys.mean.numel() for group in layer.groups] == [4, 4]
    assert [group.values.mean.numel() for group in layer.groups] == [3, 3]
    (group,) = stored("joint").plan(3, 65).layers[2].groups
    assert (group.first_head, group.end_head, group.keys.mean.numel(), group.values.mean.numel()) == (0, 2, 8, 6)


def test_tensors_have_names_of_their_layer_head_and_kind() -> None:
    names = set(stored("head").tensors())
    assert len(names) == 2 * 2 * 2 * 5
    assert "resident.2.1.values.row_scale" in names
    assert all(tensor.is_contiguous() for tensor in stored("head").tensors().values())


def test_layers_ten_and_one_do_not_mix() -> None:
    geometry = (LayerGeometry(1, 2, 2),) * 12
    layers = {
        index: (StoredGroup(0, 1, {kind: stored_side(2, seed=index, widths=(4, 2)) for kind in KINDS}),)
        for index in (1, 10, 11)
    }
    made = StoredResident(4.0, "joint", BOOKS, dict(enumerate(geometry)), layers)
    found = StoredResident.from_json(made.to_json(), made.tensors(), geometry)
    for index in (1, 10, 11):
        assert torch.equal(found.layers[index][0].sides["keys"].rows, layers[index][0].sides["keys"].rows)


# ---- damage to tensors

Damage = Callable[[dict[str, Tensor]], None]
AT = "resident.0.0.keys."


def _set(name: str, *at: Any) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        changed = tensors[AT + name].clone()
        changed[at[:-1]] = at[-1]
        tensors[AT + name] = changed

    return damage


def _to(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[AT + name] = change(tensors[AT + name])

    return damage


DAMAGED: dict[str, tuple[Damage, str]] = {
    "a mean that is not a number": (_set("mean", 2, float("nan")), "not finite"),
    "an infinite mean": (_set("mean", 2, float("inf")), "not finite"),
    "an infinite scale": (_set("row_scale", 1, float("inf")), "not finite"),
    "a deviation that is not a number": (_set("deviation", 1, float("nan")), "not finite"),
    "a scale of nothing": (_set("row_scale", 1, 0.0), "not positive"),
    "a negative scale": (_set("row_scale", 5, -1.0), "not positive"),
    "a negative deviation": (_set("deviation", 5, -1.0), "not positive"),
    "a first deviation of nothing": (_set("deviation", 0, 0.0), "not positive"),
    "a width of nine": (_set("widths", 0, 9), "falling to 0"),
    "a width of 255": (_set("widths", 0, 255), "falling to 0"),
    "widths that rise": (_set("widths", 3, 5), "falling to 0"),
    "widths that rise from nothing": (_set("widths", 2, 0), "falling to 0"),
    "no width": (_to("widths", torch.zeros_like), "falling to 0"),
    "a width without a codebook": (_set("widths", 0, 7), r"no resident codebook of \[7\] bits"),
    "rows too few": (_to("rows", lambda x: x[:-1]), "resident rows is"),
    "rows too short": (_to("rows", lambda x: x[:, :-1]), "resident rows is"),
    "a mean too long": (_to("mean", lambda x: torch.cat([x, x[:1]])), "resident mean is"),
    "a mean of one more dimension": (_to("mean", lambda x: x[None]), "resident mean is"),
    "scales too few": (_to("row_scale", lambda x: x[:-1]), "resident row_scale is"),
    "deviations too few": (_to("deviation", lambda x: x[:-1]), "resident deviation is"),
    "widths too few": (_to("widths", lambda x: x[:-1]), "resident widths is"),
    "rows in float": (_to("rows", Tensor.float), "resident rows is"),
    "rows without a sign": (_to("rows", lambda x: x.view(torch.uint8)), "resident rows is"),
    "widths in int64": (_to("widths", Tensor.long), "resident widths is"),
    "a mean in float64": (_to("mean", Tensor.double), "resident mean is"),
    "a mean in bfloat16": (_to("mean", Tensor.bfloat16), "resident mean is"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    damage, message = DAMAGED[name]
    made = stored()
    tensors = made.tensors()
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        StoredResident.from_json(made.to_json(), tensors, GEOMETRY)


@pytest.mark.parametrize("name", ["mean", "rows", "row_scale", "deviation", "widths"])
@pytest.mark.parametrize("place", ["0.0.keys", "2.0.values"])
def test_a_missing_tensor_is_refused(name: str, place: str) -> None:
    made = stored()
    tensors = made.tensors()
    del tensors[f"resident.{place}.{name}"]
    with pytest.raises(KeyError, match=name):
        StoredResident.from_json(made.to_json(), tensors, GEOMETRY)


def test_rows_of_nothing_are_refused_when_the_plan_is_made() -> None:
    made = stored()
    tensors = made.tensors()
    tensors[AT + "rows"] = torch.zeros_like(tensors[AT + "rows"])
    with pytest.raises(ValueError, match="no inverse"):
        StoredResident.from_json(made.to_json(), tensors, GEOMETRY).plan(4, 64)


# ---- damage to the description

DESCRIPTIONS: dict[str, tuple[str, Any]] = {
    "another basis": ("basis", "whole"),
    "a basis that is a list": ("basis", ["joint"]),
    "no basis": ("basis", None),
    "a layer beyond the last": ("layers", [0, 3]),
    "a layer before the first": ("layers", [-1]),
    "a layer of no tensors": ("layers", [0, 1, 2]),
    "a layer that is a word": ("layers", ["first"]),
    "bits that are a word": ("bits", "four"),
    "books that fall": ("books", {"keys": [[8, -1.0, 0.0]], "values": []}),
    "books that are flat": ("books", {"keys": [[8, 0.0, 0.0]], "values": []}),
    "books that bend back": ("books", {"keys": [[8, 1.0, -1.0]], "values": []}),
    "books that are not numbers": ("books", {"keys": [[8, float("nan"), 0.0]], "values": []}),
    "books without end": ("books", {"keys": [[8, float("inf"), 0.0]], "values": []}),
    "books of nine bits": ("books", {"keys": [[9, 1.0, 0.0]], "values": []}),
    "books of no bits": ("books", {"keys": [[0, 1.0, 0.0]], "values": []}),
    "books of a billion bits": ("books", {"keys": [[10**9, 1.0, 0.0]], "values": []}),
    "books of two numbers": ("books", {"keys": [[8, 1.0]], "values": []}),
    "no books": ("books", {"keys": [], "values": []}),
    "books for one kind": ("books", {"keys": [[width, 1.0, 0.0] for width in (8, 4, 2, 1)]}),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_descriptions_that_do_not_fit_are_refused(name: str) -> None:
    key, changed = DESCRIPTIONS[name]
    made = stored()
    with pytest.raises((ValueError, KeyError)):
        StoredResident.from_json(made.to_json() | {key: changed}, made.tensors(), GEOMETRY)


@pytest.mark.parametrize("key", ["bits", "basis", "layers", "books"])
def test_a_description_that_lacks_a_part_is_refused(key: str) -> None:
    made = stored()
    data = {name: part for name, part in made.to_json().items() if name != key}
    with pytest.raises(KeyError):
        StoredResident.from_json(data, made.tensors(), GEOMETRY)


def test_another_basis_than_that_of_the_tensors_is_refused() -> None:
    made = stored("joint")
    with pytest.raises((ValueError, KeyError)):
        StoredResident.from_json(made.to_json() | {"basis": "head"}, made.tensors(), GEOMETRY)
    made = stored("head")
    with pytest.raises((ValueError, KeyError)):
        StoredResident.from_json(made.to_json() | {"basis": "joint"}, made.tensors(), GEOMETRY)


def test_another_models_geometry_is_refused() -> None:
    made = stored()
    with pytest.raises(ValueError, match="resident mean is"):
        StoredResident.from_json(made.to_json(), made.tensors(), (LayerGeometry(2, 4, 4), *GEOMETRY[1:]))
