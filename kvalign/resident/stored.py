"""A resident plan as the artifact holds it: bases in int8, from which the working matrices are computed.

Only the synthesis is stored, all its rows, and the analysis is its inverse: what rounding does to the one the other
makes good, so that int8 costs a slightly tilted basis and no error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvalign.geometry import KINDS, Kind, LayerGeometry
from kvalign.resident.layout import MAX_WIDTH, Codebook
from kvalign.resident.plan import BasisKind, GroupPlan, LayerPlan, ResidentPlan, SidePlan

# Int8 rows that depend on each other have an inverse all the same, of rounding.
_INVERSE_TOLERANCE = 1e-6

Books = Mapping[Kind, Mapping[int, Codebook]]


@dataclass(frozen=True, eq=False)
class StoredSide:
    """Keys or values of one group of heads.

    mean       [P] float32
    rows       [P, P] int8, times row_scale [P] float32: synthesis of every coefficient, those not coded last
    deviation  [P] float32: root mean square of each coefficient over its token's scale, before it was made one
    widths     [P] uint8, falling; 0 for a coefficient that is not coded
    """

    mean: Tensor
    rows: Tensor
    row_scale: Tensor
    deviation: Tensor
    widths: Tensor

    @classmethod
    def of(cls, mean: Tensor, synthesis: Tensor, deviation: Tensor, widths: Tensor) -> "StoredSide":
        """Rounded; synthesis [P, P] float, its rows in any order, with their deviation and width."""
        order = torch.argsort(widths.double() + deviation / deviation.max() / 2, descending=True, stable=True)
        ordered = synthesis[order]
        scale = ordered.abs().amax(1) / 127
        return cls(
            mean.float(),
            (ordered / scale[:, None]).round().to(torch.int8),
            scale.float(),
            deviation[order].float(),
            widths[order].to(torch.uint8),
        )

    def side(self, books: Mapping[int, Codebook]) -> SidePlan:
        """The working matrices. Raises ValueError where the rows have no inverse."""
        widths = tuple(int(width) for width in self.widths if width)
        rank = len(widths)
        rows = self.rows.double()
        inverse, info = torch.linalg.inv_ex(rows)
        identity = torch.eye(rows.shape[0], dtype=rows.dtype)
        if int(info) or not (inverse @ rows - identity).abs().max() < _INVERSE_TOLERANCE:
            raise ValueError("a resident basis has no inverse")
        energy = self.deviation[:rank].square()
        analysis = (inverse / self.row_scale.double())[:, :rank].float().contiguous()
        synthesis = (rows * self.row_scale.double()[:, None])[:rank].float().contiguous()
        energy = energy / energy.sum()
        if not all(x.isfinite().all() for x in (analysis, synthesis, energy)):
            raise ValueError("a resident basis is out of range")
        return SidePlan(
            mean=self.mean,
            analysis=analysis,
            synthesis=synthesis,
            energy=energy,
            widths=widths,
            books={width: books[width] for width in set(widths)},
        )

    def tensors(self) -> dict[str, Tensor]:
        return {
            "mean": self.mean,
            "rows": self.rows.contiguous(),
            "row_scale": self.row_scale,
            "deviation": self.deviation,
            "widths": self.widths,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], features: int) -> "StoredSide":
        """Checked; raises ValueError for tensors that do not fit each other."""
        wanted = {
            "mean": ((features,), torch.float32),
            "rows": ((features, features), torch.int8),
            "row_scale": ((features,), torch.float32),
            "deviation": ((features,), torch.float32),
            "widths": ((features,), torch.uint8),
        }
        for name, (shape, dtype) in wanted.items():
            found = tensors[name]
            if tuple(found.shape) != shape or found.dtype != dtype:
                raise ValueError(f"resident {name} is {found.dtype} {tuple(found.shape)}, not {dtype} {shape}")
            if dtype == torch.float32 and not found.isfinite().all():
                raise ValueError(f"resident {name} is not finite")
        widths = tensors["widths"].int()
        if widths.max() > MAX_WIDTH or not widths[0] or (widths.diff() > 0).any():
            raise ValueError(f"resident widths are not 1 to {MAX_WIDTH} falling to 0")
        if (tensors["row_scale"] <= 0).any() or (tensors["deviation"] < 0).any() or not tensors["deviation"][0] > 0:
            raise ValueError("resident scales are not positive")
        return cls(**{name: tensors[name] for name in wanted})


@dataclass(frozen=True, eq=False)
class StoredGroup:
    """Heads first_head..end_head of a layer."""

    first_head: int
    end_head: int
    sides: Mapping[Kind, StoredSide]


@dataclass(frozen=True, eq=False)
class StoredResident:
    """Everything that is stored of the resident form.

    bits    bits for each number of a coded token, scales included, as asked for
    layers  by index
    """

    bits: float
    basis: BasisKind
    books: Books
    geometry: Mapping[int, LayerGeometry]
    layers: Mapping[int, tuple[StoredGroup, ...]]

    def plan(self, sink_tokens: int, recent_tokens: int) -> ResidentPlan:
        """What a cache works with: an inverse for each side. Raises ValueError where one does not exist."""
        layers = {}
        for index, groups in self.layers.items():
            shape = self.geometry[index]
            layers[index] = LayerPlan(
                shape.kv_heads,
                shape.key_dim,
                shape.value_dim,
                tuple(
                    GroupPlan(
                        group.first_head,
                        group.end_head,
                        *(group.sides[kind].side(self.books[kind]) for kind in KINDS),
                    )
                    for group in groups
                ),
            )
        return ResidentPlan(self.bits, self.basis, layers, sink_tokens, recent_tokens)

    def tensors(self) -> dict[str, Tensor]:
        """By name, as the artifact writes them."""
        return {
            f"resident.{index}.{group.first_head}.{kind}.{name}": tensor
            for index, groups in self.layers.items()
            for group in groups
            for kind in KINDS
            for name, tensor in group.sides[kind].tensors().items()
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "bits": self.bits,
            "basis": self.basis,
            "layers": sorted(self.layers),
            "books": {
                kind: [[book.width, book.gain, book.bend] for _, book in sorted(self.books[kind].items())]
                for kind in KINDS
            },
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], tensors: Mapping[str, Tensor], geometry: tuple[LayerGeometry, ...]
    ) -> "StoredResident":
        """Checked; raises ValueError or KeyError for parts that do not fit each other."""
        basis: BasisKind = data["basis"]
        if basis not in ("joint", "head"):
            raise ValueError(f"unknown resident basis {str(basis)[:40]!r}")
        books: dict[Kind, dict[int, Codebook]] = {}
        for kind in KINDS:
            books[kind] = {}
            for width, gain, bend in data["books"][kind]:
                book = Codebook(_whole(width), float(gain), float(bend))
                if not 1 <= book.width <= MAX_WIDTH or book.width in books[kind] or not book.rises():
                    raise ValueError("a resident codebook does not rise, or comes twice")
                books[kind][book.width] = book
        indices = [_whole(index) for index in data["layers"]]
        if any(not 0 <= index < len(geometry) for index in indices) or len(set(indices)) < len(indices):
            raise ValueError("the resident form is of layers that the model does not have, or of one twice")
        bits = float(data["bits"])
        if not 0 < bits <= 2 * MAX_WIDTH:
            raise ValueError(f"resident bits are {bits}")
        layers = {}
        for index in indices:
            shape = geometry[index]
            spans = [(0, shape.kv_heads)] if basis == "joint" else [(h, h + 1) for h in range(shape.kv_heads)]
            groups = []
            for first, end in spans:
                sides = {}
                for kind in KINDS:
                    prefix = f"resident.{index}.{first}.{kind}."
                    own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
                    sides[kind] = StoredSide.from_tensors(own, (end - first) * shape.head_dim(kind))
                    missing = {int(width) for width in sides[kind].widths if width} - set(books[kind])
                    if missing:
                        raise ValueError(f"no resident codebook of {sorted(missing)} bits")
                groups.append(StoredGroup(first, end, sides))
            layers[index] = tuple(groups)
        return cls(bits, basis, books, {index: geometry[index] for index in indices}, layers)


def _whole(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError(f"{str(number)[:40]!r} is not a whole number")  # noqa: TRY004  JSON that does not fit
    return number
