"""From calibration to a resident plan: bases after rotary position, codebooks, bits. Knows no model and no file.

    covariance and sensitivity of each layer, keys turned to the positions they will stand at
      -> basis of each layer (joint over its heads, or each head its own)
      -> coefficients of text kept aside -> codebooks of each width -> distortion of each width
      -> bits for each coefficient: the least total distortion over the whole model

Distortion is squared error weighed by sensitivity, as at rest: one unit for keys, values and all layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvalign.align.basis import matrix_root
from kvalign.capture import CacheShape, Captured
from kvalign.geometry import KINDS, Kind
from kvalign.resident.layout import MAX_WIDTH, SCALE_STEPS, Codebook, nearest
from kvalign.resident.plan import BasisKind
from kvalign.resident.stored import Books, StoredGroup, StoredResident, StoredSide
from kvalign.rope import Rope
from kvalign.statistics import Statistics

_POSITIONS = 96  # places over which a key's turns are averaged
_NEAR = 1024  # half of them among the first
_SAMPLED_TOKENS = 1536
_DISTORTED_TOKENS = 512
_BOOK_SAMPLES = 60_000
_BOOK_ROUNDS = 16
_GRID_SAMPLES = 3_000
_BENDS = (0.0, 0.15, 0.4, 1.0, 2.5)
_SMALLEST = 1e-12
# Joint bases make attention multiply each query with all heads' coefficients: below this gain it is not worth it.
_BITS_WORTH_A_HEAD = 0.05


@dataclass
class _Space:
    """One group of heads while it is fitted; z are coefficients over their token's scale.

    synthesis  [P, P] float64: rows of the basis
    y          [T, P] float32: coefficients of the text kept aside
    scale      [T, 1]
    """

    kind: Kind
    layer: int
    first_head: int
    end_head: int
    mean: Tensor
    synthesis: Tensor
    y: Tensor
    scale: Tensor
    deviation: Tensor

    @property
    def z(self) -> Tensor:
        return self.y / self.scale / self.deviation


def fit_resident(
    statistics: Statistics,
    shape: CacheShape,
    kept_aside: Sequence[Captured],
    *,
    bits: float,
    sink_tokens: int,
    layers: Sequence[int],
    position_limit: int,
) -> StoredResident:
    """The resident form of the given layers.

    statistics      sums of calibration over all layers
    kept_aside      text that the sums have not seen
    bits            for each number of a coded token, scales included
    position_limit  longest sequence that the model takes

    About a second for each ten layers and each kind of basis tried, at 200 features a layer on two cores.
    """
    if not layers:
        return StoredResident(bits, "joint", {kind: {} for kind in KINDS}, {}, {})
    tried: dict[BasisKind, tuple[float, StoredResident]] = {}
    kinds: list[BasisKind] = ["joint"]
    heads = max(shape.geometry.layers[layer].kv_heads for layer in layers)
    if heads > 1:
        kinds.append("head")
    for basis in kinds:
        spaces = _spaces(statistics, shape, kept_aside, sink_tokens, layers, position_limit, basis)
        books = _fit_books(spaces)
        widths, distortion = _allocate(spaces, books, bits)
        tried[basis] = (distortion, _stored(spaces, widths, books, shape, layers, bits, basis))
    if len(tried) == 1:
        return tried["joint"][1]
    gain = 0.5 * math.log2(tried["head"][0] / max(tried["joint"][0], _SMALLEST))
    return tried["joint" if gain >= _BITS_WORTH_A_HEAD * heads else "head"][1]


# ---- bases


def _spaces(
    statistics: Statistics,
    shape: CacheShape,
    kept_aside: Sequence[Captured],
    sink_tokens: int,
    layers: Sequence[int],
    position_limit: int,
    basis: BasisKind,
) -> list[_Space]:
    places = _places(position_limit)
    found = []
    for kind in KINDS:
        outer = {layer: _sensitivity(statistics, shape, kind, layer, places) for layer in layers}
        mean = torch.cat([f.diagonal(dim1=1, dim2=2).flatten() for f in outer.values()]).mean().clamp_min(_SMALLEST)
        for layer in layers:
            weights = float(mean) ** 0.5 * matrix_root(outer[layer] / mean).double()
            centre, covariance = _turned(
                *statistics.layer_moments(kind, layer), _rope(shape, kind, layer), places, shape, kind, layer
            )
            x = _kept_aside(kept_aside, shape, kind, layer, sink_tokens, position_limit)
            heads, dim = weights.shape[:2]
            spans = [(0, heads)] if basis == "joint" else [(head, head + 1) for head in range(heads)]
            for first, end in spans:
                own = slice(first * dim, end * dim)
                w = torch.block_diag(*weights[first:end])
                _, directions = torch.linalg.eigh(w @ covariance[own, own] @ w)
                synthesis = directions.T @ torch.linalg.inv(w)
                y = ((x[:, own].double() - centre[own]) @ (w @ directions)).float()
                found.append(_space(kind, layer, first, end, centre[own], synthesis, y))
    return found


def _space(kind: Kind, layer: int, first: int, end: int, mean: Tensor, synthesis: Tensor, y: Tensor) -> _Space:
    power = y.square().sum(1, keepdim=True)
    scale = (power / power.mean().clamp_min(_SMALLEST)).sqrt().clamp_min(1e-4)
    scale = torch.exp2((scale.log2() * SCALE_STEPS).round() / SCALE_STEPS)
    deviation = (y / scale).square().mean(0).sqrt()
    deviation = deviation.clamp_min(float(deviation.max()) * 1e-5 + _SMALLEST)
    return _Space(kind, layer, first, end, mean, synthesis, y, scale, deviation)


def _places(position_limit: int) -> Tensor:
    """Positions to average turns over: half of them near, where most text is, half over all that the model takes."""
    near = torch.linspace(0, min(_NEAR, position_limit) - 1, _POSITIONS // 2)
    far = torch.linspace(0, position_limit - 1, _POSITIONS // 2)
    return torch.cat([near, far]).round().long()


def _rope(shape: CacheShape, kind: Kind, layer: int) -> Rope | None:
    rope = shape.ropes[layer]
    return rope if kind == "keys" and rope.pairing != "none" else None


def _sensitivity(statistics: Statistics, shape: CacheShape, kind: Kind, layer: int, places: Tensor) -> Tensor:
    """F of each head towards what the cache holds, [H, D, D] float64."""
    geometry = shape.geometry.layers[layer]
    if not statistics.gradient_weight:
        # Without gradients an error counts by the spread of its kind over the whole model.
        spread = torch.cat(
            [statistics.layer_moments(kind, i)[1].diagonal() for i in range(len(shape.geometry.layers))]
        ).mean()
        eye = torch.eye(geometry.head_dim(kind), dtype=torch.float64)
        return (eye / spread.double().clamp_min(_SMALLEST)).repeat(geometry.kv_heads, 1, 1)
    outer = statistics.sensitivity[f"{kind}.{layer}"].double() / statistics.gradient_weight
    rope = _rope(shape, kind, layer)
    # A gradient turns like the key that it belongs to, but for the factor on cos and sin, which cancels.
    return outer if rope is None else _averaged(outer, rope, places) / rope.scaling**4


def _turned(
    mean: Tensor, covariance: Tensor, rope: Rope | None, places: Tensor, shape: CacheShape, kind: Kind, layer: int
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of what the cache holds, float64: keys stand turned to any of the places."""
    mean, covariance = mean.double(), covariance.double()
    if rope is None:
        return mean, covariance
    heads, dim = shape.geometry.layers[layer].kv_heads, shape.geometry.layers[layer].key_dim
    second = covariance + torch.outer(mean, mean)
    blocks = second.view(heads, dim, heads, dim).transpose(1, 2)  # [H, H, D, D]
    turned = _averaged(blocks, rope, places).transpose(1, 2).reshape(heads * dim, heads * dim)
    centre = rope.redo(mean.view(heads, 1, dim).expand(-1, places.numel(), -1), places, torch.float64).mean(1).flatten()
    return centre, turned - torch.outer(centre, centre)


def _averaged(matrices: Tensor, rope: Rope, places: Tensor) -> Tensor:
    """Mean over places of R M R^T, M [..., D, D] float64, R the turn at a place."""
    total = torch.zeros_like(matrices)
    for place in places:
        at = place[None]

        def turn(rows: Tensor, at: Tensor = at) -> Tensor:
            return rope.redo(rows[..., None, :], at, torch.float64)[..., 0, :]

        total += turn(turn(matrices).mT).mT
    return total / places.numel()


def _kept_aside(
    kept_aside: Sequence[Captured], shape: CacheShape, kind: Kind, layer: int, sink_tokens: int, limit: int
) -> Tensor:
    """Tokens of one layer as a cache holds them, [T, P] float32: every second text far from the start."""
    offsets = shape.geometry.offsets(kind)
    geometry, rope = shape.geometry.layers[layer], _rope(shape, kind, layer)
    share = max(1, _SAMPLED_TOKENS // len(kept_aside))
    parts = []
    for index, captured in enumerate(kept_aside):
        x = captured.of(kind)[sink_tokens:, offsets[layer] : offsets[layer + 1]]
        positions = torch.arange(sink_tokens, sink_tokens + x.shape[0])
        if index % 2:
            positions = positions + max(
                0, (limit - positions.numel() - sink_tokens) * (index // 2 + 1) // len(kept_aside)
            )
        if rope is not None:
            heads = x.unflatten(1, (geometry.kv_heads, -1)).transpose(0, 1)
            x = rope.redo(heads, positions, torch.float32).transpose(0, 1).flatten(1)
        parts.append(x[:: max(1, x.shape[0] // share)])
    return torch.cat(parts)


# ---- codebooks


def _fit_books(spaces: Sequence[_Space]) -> Books:
    return {
        kind: {width: fit_codebook(sample, width) for width in range(1, MAX_WIDTH + 1)}
        for kind in KINDS
        for sample in [_sample([space.z for space in spaces if space.kind == kind])]
    }


def _sample(coefficients: Sequence[Tensor]) -> Tensor:
    """At most _BOOK_SAMPLES of all numbers, evenly picked, rising."""
    count = sum(z.numel() for z in coefficients)
    stride = max(1, count // _BOOK_SAMPLES)
    return torch.cat([z.flatten()[::stride] for z in coefficients]).double().sort().values


def fit_codebook(sample: Tensor, width: int) -> Codebook:
    """Gain and bend of least squared error on measured coefficients.

    sample  [N] float64, rising

    The best of a grid of reaches and bends, then nearest level and least squares in turn, as Lloyd's method does for
    free levels (Lloyd 1982).
    """
    middle = ((1 << width) - 1) / 2
    z = (torch.arange(1 << width, dtype=torch.float64) - middle) / middle  # -1 to 1
    columns = torch.stack([z, z**3], dim=1)
    thinned = sample[:: max(1, sample.numel() // _GRID_SAMPLES)].contiguous()
    spread = float(sample.square().mean().sqrt()) + _SMALLEST
    reaches = spread * torch.logspace(-0.3, math.log10(max(2.0, float(sample.abs().max()) / spread)), 14).double()
    tried = [
        torch.tensor([1.0, bend], dtype=torch.float64) * (reach / (1 + bend))
        for reach in reaches
        for bend in (_BENDS if width > 1 else (0.0,))
    ]
    best = min(tried, key=lambda weights: squared_error(thinned, columns @ weights))
    for _ in range(_BOOK_ROUNDS):
        levels = columns @ best
        code = nearest(sample, levels)
        held = torch.bincount(code, minlength=levels.numel()).double()
        total = torch.zeros_like(levels).index_add_(0, code, sample)
        used = columns if width > 1 else columns[:, :1]
        normal = used.T @ (held[:, None] * used)
        solved = torch.linalg.solve(normal + 1e-9 * normal.trace() * torch.eye(used.shape[1]), used.T @ total)
        solved = torch.cat([solved, solved.new_zeros(2 - solved.numel())])
        # Levels must rise from the middle on: otherwise what was found before stands.
        if not (solved[0] > 0 and solved[1] >= 0):
            break
        best = solved
    return Codebook(width, float(best[0]) / middle, float(best[1] / best[0]) / middle**2)


def squared_error(sample: Tensor, levels: Tensor) -> float:
    """Mean, of numbers to the nearest of rising levels."""
    return float((levels[nearest(sample, levels)] - sample).square().mean())


# ---- bits


def _allocate(spaces: Sequence[_Space], books: Books, bits: float) -> tuple[list[Tensor], float]:
    """Widths of each space's coefficients within the budget, and the distortion of a token that is left."""
    tables = [_distortions(space, books) for space in spaces]  # [MAX_WIDTH + 1, P] each
    together = torch.cat(tables, dim=1)
    budget = bits * together.shape[1] - 8 * len(spaces)
    widths = allocate_bits(together, budget)
    distortion = float(together.gather(0, widths[None])[0].sum())
    return list(widths.split([table.shape[1] for table in tables])), distortion


def _distortions(space: _Space, books: Books) -> Tensor:
    """Mean squared error of each coefficient at each width from 0 on, [MAX_WIDTH + 1, P] float64."""
    picked = slice(None, None, max(1, space.y.shape[0] // _DISTORTED_TOKENS))
    z = space.z[picked].contiguous()
    size = space.scale[picked] * space.deviation
    found = [(z * size).double().square().mean(0)]
    for width in range(1, MAX_WIDTH + 1):
        levels = books[space.kind][width].levels()
        error = (levels[nearest(z, levels)] - z) * size
        found.append(error.double().square().mean(0))
    return torch.stack(found)


def allocate_bits(distortions: Tensor, budget: float) -> Tensor:
    """Widths of least total distortion whose bits sum to at most the budget, [N] int64.

    distortions  [W, N]: of coefficient n at w bits

    Bisection of the price of a bit; what is left over is less than one coefficient's bits (Shoham and Gersho 1988).
    """
    widths = torch.arange(distortions.shape[0], dtype=torch.float64)[:, None]
    low, high = 1e-30, max(float(distortions.max()), 1e-20) * 10
    for _ in range(200):
        price = math.sqrt(low * high)
        if int((distortions + price * widths).argmin(0).sum()) > budget:
            low = price
        else:
            high = price
    return (distortions + high * widths).argmin(0)


def _stored(
    spaces: Sequence[_Space],
    widths: Sequence[Tensor],
    books: Books,
    shape: CacheShape,
    layers: Sequence[int],
    bits: float,
    basis: BasisKind,
) -> StoredResident:
    sides: dict[tuple[int, int, int], dict[Kind, StoredSide]] = {}
    for space, own in zip(spaces, widths, strict=True):
        if not own.any():
            own[space.deviation.argmax()] = 1
        at = (space.layer, space.first_head, space.end_head)
        synthesis = space.synthesis.float() * space.deviation[:, None]
        sides.setdefault(at, {})[space.kind] = StoredSide.of(space.mean, synthesis, space.deviation, own)
    groups: dict[int, list[StoredGroup]] = {layer: [] for layer in layers}
    for (layer, first, end), both in sides.items():
        groups[layer].append(StoredGroup(first, end, both))
    used: Mapping[Kind, set[int]] = {
        kind: {int(width) for both in sides.values() for width in both[kind].widths if width} for kind in KINDS
    }
    return StoredResident(
        bits,
        basis,
        {kind: {width: book for width, book in books[kind].items() if width in used[kind]} for kind in KINDS},
        {layer: shape.geometry.layers[layer] for layer in layers},
        {layer: tuple(found) for layer, found in groups.items()},
    )
