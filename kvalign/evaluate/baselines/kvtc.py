"""KVTC as published: principal components over all layers and heads, groups from dynamic programming, DEFLATE.

    keys before rotary positions, values -> (x - mean) U -> groups of components, a scale and a shift each -> DEFLATE

No sensitivity weights, one budget for keys and values together. Staniszewski and Lancucki, ICLR 2026,
arXiv 2511.01815. Where the paper leaves a choice, the one that serves KVTC best is taken: components are ordered, and
errors measured, on calibration text that the basis has not seen; scales and shifts follow all codes, which DEFLATE then
makes 2 % smaller than group by group; and how much an error in values counts against one in keys can be tried.
"""

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvalign.align.basis import fit_basis
from kvalign.capture import CacheShape, Captured
from kvalign.errors import PayloadInvalid
from kvalign.evaluate.baselines.fp8 import E4M3_MAX
from kvalign.evaluate.baselines.kvtc_plan import BITS, Allocation, Errors, Group, shared_budget
from kvalign.evaluate.baselines.packing import pack_bits, packed_bytes, unpack_bits
from kvalign.evaluate.baselines.stored import Body, Layers, Reader, to_bytes
from kvalign.geometry import KINDS, Kind
from kvalign.statistics import Statistics

_DEFLATE_LEVEL = 6
_ERROR_TOKENS = 512
_HALF_MAX = 65504.0
_PLAN_BYTES = 5  # start, size and type of a group


@dataclass(frozen=True)
class PrincipalBasis:
    """mean [P]; directions [P, P], columns by falling variance, rounded to the 16 bits they are stored in."""

    mean: Tensor
    directions: Tensor


class Kvtc:
    """KVTC at one budget: a body coder."""

    def __init__(
        self, shape: CacheShape, bases: dict[Kind, PrincipalBasis], plans: dict[Kind, tuple[Group, ...]]
    ) -> None:
        self._shape = shape
        self._bases = bases
        self._plans = plans

    def encode(self, layers: Layers, body: Body) -> bytes:
        packed = []
        for kind in KINDS:
            y = (self._matrix(layers, kind, body) - self._bases[kind].mean) @ self._directions(kind)
            packed += [
                encode_group(y[:, group.start : group.start + group.size], group.type) for group in self._plans[kind]
            ]
        codes, scales = b"".join(part for part, _ in packed), b"".join(part for _, part in packed)
        return zlib.compress(codes + scales, _DEFLATE_LEVEL)

    def decode(self, data: bytes, body: Body) -> Layers:
        try:
            plain = zlib.decompress(data)
        except zlib.error as error:
            raise PayloadInvalid(f"The payload does not inflate: {error}.", "Encode the cache again.") from error
        groups = [group for kind in KINDS for group in self._plans[kind]]
        cut = sum(packed_bytes(BITS[group.type], group.size * body.tokens) for group in groups)
        codes, scales = Reader(plain[:cut]), Reader(plain[cut:])
        keys, values = (self._decoded(codes, scales, kind, body) for kind in KINDS)
        return list(zip(keys, values, strict=True))

    @property
    def artifact_bytes(self) -> int:
        """What decoding needs besides the payload: means, the directions that are used in 16 bit, the plan."""
        directions = sum(2 * self._directions(kind).numel() for kind in KINDS)
        means = 4 * self._shape.geometry.values_per_token
        return directions + means + _PLAN_BYTES * sum(len(plan) for plan in self._plans.values())

    def _directions(self, kind: Kind) -> Tensor:
        """[P, R]: up to the last component that is stored."""
        plan = self._plans[kind]
        return self._bases[kind].directions[:, : plan[-1].start + plan[-1].size if plan else 0]

    def _matrix(self, layers: Layers, kind: Kind, body: Body) -> Tensor:
        """[T, P]: keys before rotary positions, or values."""
        columns = []
        for (keys, values), rope in zip(layers, self._shape.ropes, strict=True):
            x = rope.undo(keys, body.positions, body.dtype) if kind == "keys" else values
            columns.append(x.transpose(0, 1).flatten(1))
        return torch.cat(columns, dim=1)

    def _decoded(self, codes: Reader, scales: Reader, kind: Kind, body: Body) -> list[Tensor]:
        """[H, T, D] of each layer."""
        directions = self._directions(kind)
        y = torch.zeros(body.tokens, directions.shape[1])
        for group in self._plans[kind]:
            y[:, group.start : group.start + group.size] = decode_group(codes, scales, group, body.tokens)
        x = torch.addmm(self._bases[kind].mean, y, directions.T)
        offsets = self._shape.geometry.offsets(kind)
        layers = []
        for index, rope in enumerate(self._shape.ropes):
            heads = self._shape.geometry.layers[index].kv_heads
            part = x[:, offsets[index] : offsets[index + 1]].unflatten(1, (heads, -1)).transpose(0, 1)
            layers.append(rope.redo(part, body.positions, body.dtype) if kind == "keys" else part)
        return layers


def encode_group(y: Tensor, number_type: str) -> tuple[bytes, bytes]:
    """Coefficients [T, S] of one group: packed codes component by component; scales and then shifts in float16.

    Integers span least to largest; fp8 is centred on the mean and spans the largest distance from it.
    """
    if not y.numel():
        return b"", b""
    low, high = y.amin(1, keepdim=True), y.amax(1, keepdim=True)
    if number_type == "fp8":
        shift = _half(y.mean(1, keepdim=True))
        scale = _half(torch.maximum(high - shift.float(), shift.float() - low))
        unit = scale.float().clamp_min(1e-30) / E4M3_MAX
        codes = ((y - shift.float()) / unit).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        largest = (1 << BITS[number_type]) - 1
        shift, scale = _half(low), _half((high - low) / largest)
        steps = ((y - shift.float()) / scale.float().clamp_min(1e-30)).round()
        codes = steps.clamp(0, largest).to(torch.uint8)
    return pack_bits(codes.T.contiguous().numpy(), BITS[number_type]), to_bytes(scale) + to_bytes(shift)


def decode_group(codes: Reader, scales: Reader, group: Group, tokens: int) -> Tensor:
    """Inverse of encode_group: [T, S] float32."""
    if not tokens:
        return torch.zeros(0, group.size)
    bits, count = BITS[group.type], tokens * group.size
    packed = unpack_bits(codes.take(packed_bytes(bits, count)), bits, count).reshape(group.size, tokens)
    scale, shift = scales.numbers(torch.float16, (tokens, 1)), scales.numbers(torch.float16, (tokens, 1))
    numbers = torch.from_numpy(packed.copy())
    if group.type == "fp8":
        return numbers.view(torch.float8_e4m3fn).float().T * (scale.clamp_min(1e-30) / E4M3_MAX) + shift
    return numbers.float().T * scale + shift


def _half(x: Tensor) -> Tensor:
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


class KvtcFit:
    """Bases, and plans for every budget down to a smallest nominal ratio."""

    def __init__(
        self, shape: CacheShape, bases: dict[Kind, PrincipalBasis], errors: dict[Kind, Errors], smallest_ratio: float
    ) -> None:
        self._shape = shape
        self._bases = bases
        largest = self._budget_bits(smallest_ratio)
        self._allocations = {kind: Allocation(errors[kind], largest) for kind in KINDS}

    def at(self, ratio: float, value_weight: float = 1.0) -> Kvtc:
        """KVTC with a budget of 16 bits a number over `ratio`, before DEFLATE; ratio >= the smallest fitted for.

        value_weight  of squared error in values against squared error in keys, when the budget is shared; 1 is one
                      allocation over both, and on SmolLM2 4 takes a third off KL at 8x, 16 and equal shares less
        """
        keys, values = self._allocations["keys"], self._allocations["values"]
        shares = shared_budget(keys, values, self._budget_bits(ratio), value_weight)
        plans: dict[Kind, tuple[Group, ...]] = {"keys": keys.plan(shares[0]), "values": values.plan(shares[1])}
        return Kvtc(self._shape, self._bases, plans)

    def _budget_bits(self, ratio: float) -> int:
        return int(16 * self._shape.geometry.values_per_token / ratio)


def fit_kvtc(
    statistics: Statistics,
    shape: CacheShape,
    kept_aside: Sequence[Captured],
    *,
    sink_tokens: int = 4,
    smallest_ratio: float = 4.0,
) -> KvtcFit:
    """Fit KVTC on the sums and on the sequences that our own codec is fitted on.

    kept_aside  calibration sequences that are not in the statistics, to measure errors on
    Cost: an eigendecomposition for each feature group, and some seconds of roundings for each kind.
    """
    bases: dict[Kind, PrincipalBasis] = {}
    coefficients: list[NDArray[np.float32]] = []
    for kind in KINDS:
        rows = torch.cat([captured.of(kind)[sink_tokens:] for captured in kept_aside])
        bases[kind] = _principal_basis(statistics, kind, rows)
        picked = rows[torch.linspace(0, len(rows) - 1, min(len(rows), _ERROR_TOKENS)).long()]
        coefficients.append(((picked - bases[kind].mean) @ bases[kind].directions).numpy())
    with ThreadPoolExecutor(len(KINDS)) as pool:
        errors = dict(zip(KINDS, pool.map(Errors.measured, coefficients), strict=True))
    return KvtcFit(shape, bases, errors, smallest_ratio)


def _principal_basis(statistics: Statistics, kind: Kind, rows: Tensor) -> PrincipalBasis:
    """Unweighted components of one kind, of all feature groups together, by their variance on rows [T, P].

    The sums hold sinks, whose size puts directions first that the coded tokens do not use; the rows hold none.
    """
    parts = []
    for group in statistics.groups:
        if group.kind == kind:
            layers = statistics.geometry.layers[group.first_layer : group.end_layer]
            plain = tuple(torch.eye(layer.head_dim(kind)).repeat(layer.kv_heads, 1, 1) for layer in layers)
            parts.append(fit_basis(statistics, group, plain))
    mean = torch.cat([part.intercept for part in parts])
    directions = torch.block_diag(*(part.directions for part in parts)).half().float()
    order = ((rows - mean) @ directions).square().mean(0).argsort(descending=True, stable=True)
    return PrincipalBasis(mean, directions[:, order].contiguous())
