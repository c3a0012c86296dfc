"""The payload's bytes under attack: every truncation, every flipped bit, absurd lengths, random bytes."""

import contextlib
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvalign.container import ID_BYTES, MAGIC, VERSION, Block, Payload, Row, pack, unpack
from kvalign.errors import PayloadInvalid

VALUES = 3  # numbers a token leaves in the cache
HEADER = struct.Struct("<4sHBBBBhHIIII16s")
ROW = struct.Struct("<IIQI")
BLOCK = struct.Struct("<II")


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    block_tokens, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    id_bytes = draw(st.sampled_from(ID_BYTES))
    sink, recent = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        padding = draw(st.integers(0, tokens))
        held = tokens - padding
        verbatim = min(held, sink + recent)
        body = held - verbatim
        blocks = []
        for start in range(0, body, block_tokens):
            count = min(block_tokens, body - start)
            shifts = draw(st.one_of(st.just(b""), st.binary(min_size=count, max_size=count)))
            blocks.append(Block(draw(st.binary(max_size=12)), draw(st.booleans()), shifts))
        kept = draw(st.binary(min_size=2 * VALUES * verbatim, max_size=2 * VALUES * verbatim))
        ids = draw(st.binary(min_size=id_bytes * held, max_size=id_bytes * held))
        rows.append(Row(padding, draw(st.integers(0, 2**32)), ids, kept, tuple(blocks)))
    return Payload(
        codec_id=draw(st.binary(min_size=16, max_size=16)),
        dtype_code=draw(st.integers(0, 255)),
        verbatim_dtype_code=draw(st.integers(0, 255)),
        id_bytes=id_bytes,
        step=draw(st.integers(-(2**15), 2**15 - 1)),
        block_tokens=block_tokens,
        tokens=tokens,
        sink_tokens=sink,
        recent_tokens=recent,
        rows=tuple(rows),
    )


def small() -> Payload:
    """Two rows with their token ids, three blocks: one coded, one raw, one with shifted steps."""
    rows = (
        Row(0, 0, bytes(range(100, 112)), bytes(range(12)), (Block(b"coded!"), Block(b"rawraw", raw=True))),
        Row(2, 7, bytes(range(200, 208)), bytes(range(12)), (Block(b"more", shifts=b"\x01\xff"),)),
    )
    return Payload(b"sixteen bytes id", 0, 1, 2, -10, 2, 6, 1, 1, rows)


def read(data: bytes) -> Payload:
    return unpack(data, values_per_token=VALUES)


@given(payloads())
@settings(max_examples=200)
def test_payloads_round_trip(payload: Payload) -> None:
    data = pack(payload)
    assert read(data) == payload
    assert pack(read(data)) == data
    stored = sum(
        len(row.ids) + len(row.verbatim) + sum(len(block.stored) for block in row.blocks) for row in payload.rows
    )
    assert payload.table_bytes + stored == len(data)


def test_every_truncation_is_refused() -> None:
    data = pack(small())
    for length in range(len(data)):
        with pytest.raises(PayloadInvalid):
            read(data[:length])


def test_every_flipped_bit_is_refused() -> None:
    data = bytearray(pack(small()))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadInvalid):
            read(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    assert read(bytes(data)) == small()


@given(payloads(), st.data())
def test_no_run_of_damage_passes(payload: Payload, data: st.DataObject) -> None:
    """CRC-32 sees every burst of up to 32 bits."""
    packed = bytearray(pack(payload))
    at = data.draw(st.integers(0, len(packed) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=4).filter(any))
    for offset, mask in enumerate(damage[: len(packed) - at]):
        packed[at + offset] ^= mask
    if bytes(packed) == pack(payload):
        return
    with pytest.raises(PayloadInvalid):
        read(bytes(packed))


@given(payloads(), st.binary(min_size=1, max_size=40))
def test_bytes_behind_the_end_are_refused(payload: Payload, tail: bytes) -> None:
    with pytest.raises(PayloadInvalid, match="too many"):
        read(pack(payload) + tail)


@given(st.binary(max_size=400))
@example(b"")
@example(MAGIC)
def test_random_bytes_are_refused(data: bytes) -> None:
    for hostile in (data, MAGIC + VERSION.to_bytes(2, "little") + data):
        with pytest.raises(PayloadInvalid):
            read(hostile)


def test_other_formats_are_told_apart() -> None:
    data = pack(small())
    with pytest.raises(PayloadInvalid, match="not an encoded KV cache"):
        read(b"PK\x03\x04" + data[4:])
    with pytest.raises(PayloadInvalid, match="format version 2; this kvalign reads version 1"):
        read(data[:4] + b"\x02\0" + data[6:])


# ---- sound checksums around unsound numbers


def forged(
    rows: list[tuple[int, int, int]] | None = None, blocks: list[int] | None = None, tail: bytes = b"", **header: Any
) -> bytes:
    """A payload by hand, its checksum right; rows (padding, blocks, position), blocks size and flags."""
    numbers = {
        "id_bytes": 0,
        "zero": 0,
        "step": 0,
        "block_tokens": 2,
        "tokens": 4,
        "sink": 0,
        "recent": 0,
        "row_count": None,
        **header,
    }
    rows = [(0, 2, 0)] if rows is None else rows
    table = HEADER.pack(
        MAGIC,
        VERSION,
        0,
        1,
        numbers["id_bytes"],
        numbers["zero"],
        numbers["step"],
        numbers["block_tokens"],
        numbers["tokens"],
        numbers["sink"],
        numbers["recent"],
        len(rows) if numbers["row_count"] is None else numbers["row_count"],
        bytes(16),
    )
    table += b"".join(ROW.pack(padding, count, position, zlib.crc32(b"")) for padding, count, position in rows)
    table += b"".join(BLOCK.pack(size, zlib.crc32(b"")) for size in ([0, 0] if blocks is None else blocks))
    return table + zlib.crc32(table).to_bytes(4, "little") + tail


def test_the_forger_can_write_a_sound_payload() -> None:
    assert read(forged()).rows == (Row(0, 0, b"", b"", (Block(b""), Block(b""))),)


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        ({"row_count": 2**32 - 1}, "out of bounds"),
        ({"row_count": 2**16}, "cut short"),
        ({"row_count": 0, "rows": [], "blocks": []}, "out of bounds"),
        ({"tokens": 2**32 - 1}, "out of bounds"),
        ({"tokens": 0, "rows": [(0, 0, 0)], "blocks": []}, "out of bounds"),
        ({"block_tokens": 0}, "out of bounds"),
        *(({"id_bytes": size}, "out of bounds") for size in (1, 3, 5, 8, 255)),
        ({"zero": 1}, "out of bounds"),
        ({"id_bytes": 4}, "cut short"),
        ({"id_bytes": 2, "tail": bytes(8)}, "damaged"),
        (
            {"id_bytes": 4, "tokens": 2**26, "block_tokens": 2**15, "rows": [(0, 2**11, 0)], "blocks": [0] * 2**11},
            "cut",
        ),
        ({"rows": [(0, 2**32 - 1, 0)]}, "cut short"),
        ({"rows": [(0, 2**32 - 1, 0)] * 50}, "cut short"),
        ({"rows": [(0, 1, 0)], "blocks": [0]}, "another number of blocks"),
        ({"rows": [(0, 3, 0)], "blocks": [0] * 3}, "another number of blocks"),
        ({"rows": [(5, 2, 0)]}, "more padding than tokens"),
        ({"rows": [(2**32 - 1, 2, 0)]}, "more padding than tokens"),
        ({"rows": [(0, 2, 2**32 + 1)]}, "position out of bounds"),
        ({"rows": [(0, 2, 2**64 - 1)]}, "position out of bounds"),
        ({"sink": 2**32 - 1, "recent": 2**32 - 1, "rows": [(0, 0, 0)], "blocks": []}, "cut short"),
        ({"tokens": 2**26, "sink": 2**26, "rows": [(0, 0, 0)], "blocks": []}, "cut short"),
        ({"blocks": [2**30 - 1, 0]}, "cut short"),
        ({"blocks": [2**30 | 0, 0]}, "shorter than its token shifts"),
        ({"blocks": [2**31 | 2**30 | 1, 0], "tail": b"\0"}, "damaged"),
    ],
)
def test_absurd_numbers_are_refused_before_anything_is_allocated(hostile: dict[str, Any], message: str) -> None:
    data = forged(**hostile)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadInvalid, match=message):
            read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_many_rows_and_blocks_are_read_in_linear_time() -> None:
    rows = [(0, 2, 0)] * 20_000
    data = forged(rows=rows, blocks=[0] * 40_000)
    assert len(read(data).rows) == 20_000


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6), st.lists(st.integers(0, 2**32 - 1), max_size=3))
def test_forged_numbers_never_escape(numbers: list[int], blocks: list[int]) -> None:
    names = ("tokens", "sink", "recent")
    header = {name: numbers[index] % 2**27 for index, name in enumerate(names)}
    data = forged(rows=[(numbers[3], numbers[4] % 4, numbers[5])], blocks=blocks, **header)
    with contextlib.suppress(PayloadInvalid):
        read(data)
