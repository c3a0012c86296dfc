"""The innermost loops of attention on codes, in vectors written out: products of tiles, and levels looked up.

    add_scores   scores [G, T]  +=  queries [G, R]        x  levels [R, T]
    add_sums     sums   [G, R]  +=  probabilities [G, T]  x  levels [R, T] transposed
    look_up_*    levels [T]      =  table[codes [T]]
    widen_*      numbers [D]     =  16-bit numbers [D]
    largest      of numbers [T];  total: their sum

where *_at and *_step are the place of the first number in a flat array, and from one row to the next.

Left to itself LLVM loads and stores what a tile keeps in registers all along. A tile is GROUP queries by a few vectors
of tokens, or by four coefficients. Each function becomes instructions where a compiled loop calls it; arrays are flat,
positions and counts unsigned, at least one round is made, and nothing is checked. Must know no cache and no model.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvalign.compiled import WIDE_VECTORS

_FEATURES = binding.get_host_cpu_features()

GROUP = 3
"""Queries of a tile: as many share each level that is loaded."""

LANES = 16 if WIDE_VECTORS else 8 if _FEATURES.get("avx2") else 4
TILE_TOKENS = LANES * (2 if LANES == 8 and not _FEATURES.get("avx512f") else 4)  # as many as registers hold
CAN_LOOK_UP = WIDE_VECTORS
"""Whether registers are tables here; else look_up_* do not compile."""

_F, _I, _I8, _I16, _I32 = ir.FloatType(), ir.IntType(64), ir.IntType(8), ir.IntType(16), ir.IntType(32)
_V, _CODES = ir.VectorType(_F, LANES), ir.VectorType(_I32, LANES)

Builder = Any
Value = Any


def _score_tile(group: int) -> Any:
    @intrinsic
    def add_scores(typing, x, x_at, x_step, q, q_at, q_step, count, s, s_at, s_step):  # type: ignore[no-untyped-def]
        """scores s[g, t] += sum over r < count of queries q[g, r] * levels x[r, t], TILE_TOKENS tokens."""
        arguments = (x, x_at, x_step, q, q_at, q_step, count, s, s_at, s_step)

        def generate(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
            x, x_at, x_step = _array(context, b, signature, values, 0)
            q, q_at, q_step = _array(context, b, signature, values, 3)
            s, s_at, s_step = _array(context, b, signature, values, 7)
            spots = [(g, v) for g in range(group) for v in range(TILE_TOKENS // LANES)]
            where = [_plus(b, s_at, _times(b, s_step, g), v * LANES) for g, v in spots]

            def step(r: Value, sums: list[Value]) -> list[Value]:
                row = _plus(b, x_at, b.mul(x_step, r), 0)
                x_v = [_load(b, x, _plus(b, row, v * LANES)) for v in range(TILE_TOKENS // LANES)]
                q_g = [
                    _everywhere(b, b.load(b.gep(q, [_plus(b, q_at, _times(b, q_step, g), r)]))) for g in range(group)
                ]
                return [_multiply_add(b, q_g[g], x_v[v], total) for (g, v), total in zip(spots, sums, strict=True)]

            totals = _rounds(b, values[6], [_load(b, s, at) for at in where], step)
            for at, total in zip(where, totals, strict=True):
                _store(b, total, s, at)
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return add_scores


def _sum_tile(group: int) -> Any:
    @intrinsic
    def add_sums(typing, x, x_at, x_step, p, p_at, p_step, count, s, s_at, s_step):  # type: ignore[no-untyped-def]
        """sums s[g, r] += sum over t of probabilities p[g, t] * levels x[r, t], r < 4; count x LANES tokens."""
        arguments = (x, x_at, x_step, p, p_at, p_step, count, s, s_at, s_step)

        def generate(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
            x, x_at, x_step = _array(context, b, signature, values, 0)
            p, p_at, p_step = _array(context, b, signature, values, 3)
            s, s_at, s_step = _array(context, b, signature, values, 7)

            def step(i: Value, totals: list[Value]) -> list[Value]:
                t = _times(b, i, LANES)
                x_r = [_load(b, x, _plus(b, x_at, _times(b, x_step, r), t)) for r in range(4)]
                p_g = [_load(b, p, _plus(b, p_at, _times(b, p_step, g), t)) for g in range(group)]
                return [_multiply_add(b, p_g[i // 4], x_r[i % 4], total) for i, total in enumerate(totals)]

            totals = _rounds(b, values[6], [ir.Constant(_V, [0.0] * LANES)] * (4 * group), step)
            four = ir.VectorType(_F, 4)
            for g in range(group):
                where = b.bitcast(b.gep(s, [_plus(b, s_at, _times(b, s_step, g))]), four.as_pointer())
                held = b.load(where, align=4)
                b.store(b.fadd(held, _four_totals(b, totals[4 * g : 4 * g + 4])), where, align=4)
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return add_sums


add_scores, add_score = _score_tile(GROUP), _score_tile(1)
add_sums, add_sum = _sum_tile(GROUP), _sum_tile(1)


def _table(registers: int) -> Any:
    @intrinsic
    def look_up(typing, codes, code_at, table, table_at, levels, level_at, count):  # type: ignore[no-untyped-def]
        """levels[t] = table[codes[t]] for count x 16 tokens; a table of 16 numbers a register."""
        arguments = (codes, code_at, table, table_at, levels, level_at, count)

        def generate(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
            c, c_at, _ = _array(context, b, signature, values, 0)
            t, t_at, _ = _array(context, b, signature, values, 2)
            to, to_at, _ = _array(context, b, signature, values, 4)
            parts = [_load(b, t, _plus(b, t_at, 16 * i)) for i in range(registers)]
            codes_16 = ir.VectorType(_I8, 16).as_pointer()

            def step(i: Value, _: list[Value]) -> list[Value]:
                token = _times(b, i, 16)
                code = b.load(b.bitcast(b.gep(c, [_plus(b, c_at, token)]), codes_16), align=1)
                _store(b, _picked(b, parts, b.zext(code, _CODES)), to, _plus(b, to_at, token))
                return []

            _rounds(b, values[6], [], step)
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return look_up


look_up_16, look_up_32, look_up_64 = _table(1), _table(2), _table(4)


def _widening(bfloat16: bool) -> Any:
    @intrinsic
    def widen(typing, half, half_at, numbers, number_at, count):  # type: ignore[no-untyped-def]
        """numbers[d] = what the bits half[d] stand for, count x LANES of them."""
        arguments = (half, half_at, numbers, number_at, count)

        def generate(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
            h, h_at, _ = _array(context, b, signature, values, 0)
            x, x_at, _ = _array(context, b, signature, values, 2)
            bits = ir.VectorType(_I16, LANES)

            def step(i: Value, _: list[Value]) -> list[Value]:
                d = _times(b, i, LANES)
                found = b.load(b.bitcast(b.gep(h, [_plus(b, h_at, d)]), bits.as_pointer()), align=2)
                if bfloat16:
                    upper = b.shl(b.zext(found, _CODES), ir.Constant(_CODES, [16] * LANES))
                    number = b.bitcast(upper, _V)
                else:
                    number = b.fpext(b.bitcast(found, ir.VectorType(ir.HalfType(), LANES)), _V)
                _store(b, number, x, _plus(b, x_at, d))
                return []

            _rounds(b, values[4], [], step)
            return context.get_dummy_value()

        return types.void(*arguments), generate

    return widen


widen_float16, widen_bfloat16 = _widening(False), _widening(True)


def _reduction(operation: str, neutral: float) -> Any:
    @intrinsic
    def reduced(typing, numbers, at, count):  # type: ignore[no-untyped-def]
        """Of count x LANES numbers from numbers[at] on."""

        def generate(context: Any, b: Builder, signature: Any, values: Sequence[Value]) -> Value:
            x, x_at, count = _array(context, b, signature, values, 0)
            pair, one = ir.FunctionType(_V, [_V, _V]), ir.FunctionType(_F, [_V])

            def step(i: Value, held: list[Value]) -> list[Value]:
                new = _load(b, x, _plus(b, x_at, _times(b, i, LANES)))
                if operation == "fadd":
                    return [b.fadd(held[0], new)]
                name = f"llvm.maxnum.v{LANES}f32"
                return [
                    b.call(cgutils.get_or_insert_function(b.module, pair, name), [held[0], new], fastmath=("nnan",))
                ]

            lanes = _rounds(b, count, [ir.Constant(_V, [neutral] * LANES)], step)
            name = f"llvm.vector.reduce.{operation}.v{LANES}f32"
            if operation == "fadd":
                one = ir.FunctionType(_F, [_F, _V])
                return b.call(
                    cgutils.get_or_insert_function(b.module, one, name),
                    [ir.Constant(_F, -0.0), lanes[0]],
                    fastmath=("reassoc",),
                )
            return b.call(cgutils.get_or_insert_function(b.module, one, name), lanes, fastmath=("nnan",))

        return types.float32(numbers, at, count), generate

    return reduced


largest, total = _reduction("fmax", -1e30), _reduction("fadd", 0.0)


def _picked(b: Builder, parts: list[Value], code: Value) -> Value:
    """parts[code // 16][code % 16], lane by lane."""
    if len(parts) == 1:
        one = ir.FunctionType(_V, [_V, _CODES])
        return b.call(cgutils.get_or_insert_function(b.module, one, "llvm.x86.avx512.permvar.sf.512"), [parts[0], code])
    if len(parts) == 2:
        two = ir.FunctionType(_V, [_V, _CODES, _V])
        name = "llvm.x86.avx512.vpermi2var.ps.512"
        return b.call(cgutils.get_or_insert_function(b.module, two, name), [parts[0], code, parts[1]])
    half = len(parts) // 2
    low, high = _picked(b, parts[:half], code), _picked(b, parts[half:], code)
    return b.select(b.icmp_unsigned("<", code, ir.Constant(_CODES, [16 * half] * 16)), low, high)


# ---- what the above are made of


def _array(context: Any, b: Builder, signature: Any, values: Sequence[Value], first: int) -> tuple[Value, Value, Value]:
    """An array's data, and the two numbers that follow it: where to begin, and the next."""
    data = context.make_array(signature.args[first])(context, b, values[first]).data
    return data, values[first + 1], values[first + 2] if first + 2 < len(values) else None


def _rounds(
    b: Builder, count: Value, first: list[Value], step: Callable[[Value, list[Value]], list[Value]]
) -> list[Value]:
    """What `step(i, values)` makes of the first values after `count` rounds, at least one."""
    before, body, after = b.block, b.append_basic_block("body"), b.append_basic_block("after")
    b.branch(body)
    b.position_at_end(body)
    i = b.phi(_I)
    i.add_incoming(ir.Constant(_I, 0), before)
    held = [b.phi(value.type) for value in first]
    for phi, value in zip(held, first, strict=True):
        phi.add_incoming(value, before)
    new = step(i, held)
    following = b.add(i, ir.Constant(_I, 1))
    i.add_incoming(following, b.block)
    for phi, value in zip(held, new, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_unsigned("<", following, count), body, after)
    b.position_at_end(after)
    return new


def _plus(b: Builder, *terms: Value) -> Value:
    total = terms[0]
    for term in terms[1:]:
        total = b.add(total, ir.Constant(_I, term) if isinstance(term, int) else term)
    return total


def _times(b: Builder, value: Value, factor: int) -> Value:
    return b.mul(value, ir.Constant(_I, factor))


def _load(b: Builder, data: Value, at: Value) -> Value:
    return b.load(b.bitcast(b.gep(data, [at]), _V.as_pointer()), align=4)


def _store(b: Builder, value: Value, data: Value, at: Value) -> None:
    b.store(value, b.bitcast(b.gep(data, [at]), _V.as_pointer()), align=4)


def _everywhere(b: Builder, number: Value) -> Value:
    one = b.insert_element(ir.Constant(_V, ir.Undefined), number, ir.Constant(_I32, 0))
    return b.shuffle_vector(one, one, ir.Constant(_CODES, [0] * LANES))


def _multiply_add(b: Builder, x: Value, y: Value, z: Value) -> Value:
    function = ir.FunctionType(_V, [_V, _V, _V])
    return b.call(cgutils.get_or_insert_function(b.module, function, f"llvm.fmuladd.v{LANES}f32"), [x, y, z])


def _four_totals(b: Builder, vectors: list[Value]) -> Value:
    """The sums over the lanes of four vectors, as a vector of four."""
    quarters = range(0, LANES, 4)

    def picked(x: Value, y: Value, places: Sequence[int]) -> Value:
        """In each quarter: these places of that quarter of x, or from 4 on of y."""
        mask = [q + place if place < 4 else LANES + q + place - 4 for q in quarters for place in places]
        return b.shuffle_vector(x, y, ir.Constant(_CODES, mask))

    def folded(x: Value, y: Value) -> Value:  # x0 + x2, y0 + y2, x1 + x3, y1 + y3
        return b.fadd(picked(x, y, (0, 4, 1, 5)), picked(x, y, (2, 6, 3, 7)))

    one, two = folded(*vectors[:2]), folded(*vectors[2:])
    total = b.fadd(picked(one, two, (0, 1, 4, 5)), picked(one, two, (2, 3, 6, 7)))
    width = LANES
    while width > 4:
        width //= 2
        low, high = (
            b.shuffle_vector(total, total, ir.Constant(ir.VectorType(_I32, width), list(range(start, start + width))))
            for start in (0, width)
        )
        total = b.fadd(low, high)
    return total
