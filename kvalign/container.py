"""The byte format of an encoded cache (docs/format.md is normative). Parses hostile input safely; no tensor maths.

header | row table | block table | checksum of all before | token ids and verbatim tokens of each row | blocks
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from kvalign.errors import PayloadInvalid

MAGIC = b"KVAL"
VERSION = 1
CODEC_ID_BYTES = 16
ID_BYTES = (0, 2, 4)

_HEADER = struct.Struct("<4sHBBBBhHIIII16s")
_ROW = struct.Struct("<IIQI")
_BLOCK = struct.Struct("<II")
_CHECKSUM = struct.Struct("<I")
_RAW_FLAG = 1 << 31
_SHIFTED_FLAG = 1 << 30
_SIZE_MASK = _SHIFTED_FLAG - 1
_MAX_ROWS = 1 << 16
_MAX_TOKENS = 1 << 26
# Padding takes no byte of a payload and as much memory as any token.
_PADDED_FOR_EACH_HELD, _PADDED_ANYWAY = 16, 4096
_MAX_POSITION = 1 << 32
_FETCH_AGAIN = "Fetch the payload again, or encode the cache again."


@dataclass(frozen=True)
class Row:
    """One sequence of the batch.

    padding   left-padded positions that hold nothing
    position  rotary position of the first token that is not padding
    ids       token ids of all tokens that are not padding, id_bytes each; empty when no layer is recomputed
    verbatim  sink and recent tokens, 16 bits a number
    blocks    body tokens in blocks that decode alone
    """

    padding: int
    position: int
    ids: bytes
    verbatim: bytes
    blocks: tuple["Block", ...]

    @property
    def plain(self) -> bytes:
        """What is stored as it is."""
        return self.ids + self.verbatim


@dataclass(frozen=True)
class Block:
    """Coded body tokens.

    raw      16 bits a number, because coding would not have made them smaller
    shifts   signed byte for each token: its step's shift in quarter octaves; empty when no token's step is shifted
    """

    data: bytes
    raw: bool = False
    shifts: bytes = b""

    @property
    def stored(self) -> bytes:
        return self.shifts + self.data


@dataclass(frozen=True)
class Payload:
    """An encoded cache, parsed.

    dtype_code           of the cache: see codec.DTYPES
    verbatim_dtype_code  of verbatim tokens and raw blocks
    id_bytes             of one token id: 2 or 4, or 0 when no layer is recomputed
    step                 sixteenths of an octave
    block_tokens         body tokens a block; the last of a row may hold fewer
    tokens               T, padding included; the same for every row
    """

    codec_id: bytes
    dtype_code: int
    verbatim_dtype_code: int
    id_bytes: int
    step: int
    block_tokens: int
    tokens: int
    sink_tokens: int
    recent_tokens: int
    rows: tuple[Row, ...]

    @property
    def table_bytes(self) -> int:
        """Everything that is neither block nor verbatim."""
        blocks = sum(len(row.blocks) for row in self.rows)
        return _HEADER.size + len(self.rows) * _ROW.size + blocks * _BLOCK.size + _CHECKSUM.size


def pack(payload: Payload) -> bytes:
    """The payload's bytes."""
    blocks = [block for row in payload.rows for block in row.blocks]
    head = _HEADER.pack(
        MAGIC,
        VERSION,
        payload.dtype_code,
        payload.verbatim_dtype_code,
        payload.id_bytes,
        0,
        payload.step,
        payload.block_tokens,
        payload.tokens,
        payload.sink_tokens,
        payload.recent_tokens,
        len(payload.rows),
        payload.codec_id,
    )
    rows = b"".join(
        _ROW.pack(row.padding, len(row.blocks), row.position, zlib.crc32(row.plain)) for row in payload.rows
    )
    lengths = b"".join(_BLOCK.pack(len(block.stored) | _flags(block), zlib.crc32(block.stored)) for block in blocks)
    table = head + rows + lengths
    plain = b"".join(row.plain for row in payload.rows)
    data = b"".join(block.stored for block in blocks)
    return table + _CHECKSUM.pack(zlib.crc32(table)) + plain + data


def unpack(data: bytes, *, values_per_token: int) -> Payload:
    """Parse and check every byte; no length is trusted before it is checked. Raises PayloadInvalid.

    values_per_token  numbers a token leaves in the stored layers: verbatim tokens take two bytes each
    """
    reader = _Reader(data)
    fields = _HEADER.unpack(reader.take(_HEADER.size))
    magic, version, dtype, verbatim_dtype, id_bytes, zero, step = fields[:7]
    block_tokens, tokens, sink, recent, row_count, codec_id = fields[7:]
    if magic != MAGIC:
        raise PayloadInvalid("These bytes are not an encoded KV cache.", "Give bytes made by Codec.encode.")
    if version != VERSION:
        raise PayloadInvalid(
            f"The payload has format version {version}; this kvalign reads version {VERSION}.",
            "Update kvalign.",
        )
    bounded = 1 <= row_count <= _MAX_ROWS and 1 <= tokens <= _MAX_TOKENS and block_tokens >= 1
    if not (bounded and id_bytes in ID_BYTES and zero == 0):
        raise PayloadInvalid("The payload's header is out of bounds.", _FETCH_AGAIN)
    row_fields = list(_ROW.iter_unpack(reader.take(row_count * _ROW.size)))
    block_count = sum(blocks for _, blocks, _, _ in row_fields)
    block_fields = list(_BLOCK.iter_unpack(reader.take(block_count * _BLOCK.size)))
    table = data[: reader.at]
    (checksum,) = _CHECKSUM.unpack(reader.take(_CHECKSUM.size))
    if checksum != zlib.crc32(table):
        raise PayloadInvalid("The payload's header does not match its checksum.", _FETCH_AGAIN)
    if not padding_is_bounded(tokens, [padding for padding, *_ in row_fields]):
        raise PayloadInvalid("The payload is almost nothing but padding.", _FETCH_AGAIN)
    shape = _TokenShape(tokens, sink, recent, block_tokens)
    plain = []
    for padding, blocks, _, crc in row_fields:
        verbatim_bytes = 2 * values_per_token * shape.verbatim(padding, blocks)
        ids_end = id_bytes * (tokens - padding)
        data_of_row = reader.checked(ids_end + verbatim_bytes, crc)
        plain.append((data_of_row[:ids_end], data_of_row[ids_end:]))
    rows = []
    entries = iter(block_fields)
    for (padding, blocks, position, _), (ids, kept) in zip(row_fields, plain, strict=True):
        if position > _MAX_POSITION:
            raise PayloadInvalid("A row of the payload begins at a position out of bounds.", _FETCH_AGAIN)
        held = shape.block_sizes(padding, blocks)
        own = islice(entries, blocks)
        coded = [_block(reader, size, block_crc, n) for (size, block_crc), n in zip(own, held, strict=True)]
        rows.append(Row(padding, position, ids, kept, tuple(coded)))
    reader.finish()
    return Payload(codec_id, dtype, verbatim_dtype, id_bytes, step, block_tokens, tokens, sink, recent, tuple(rows))


def padding_is_bounded(tokens: int, paddings: Sequence[int]) -> bool:
    """Whether a batch of rows of `tokens` each may be stored: its size in memory must follow from what it holds."""
    held = sum(max(0, tokens - padding) for padding in paddings)
    return tokens * len(paddings) <= _PADDED_FOR_EACH_HELD * held + _PADDED_ANYWAY


@dataclass(frozen=True)
class _TokenShape:
    tokens: int
    sink_tokens: int
    recent_tokens: int
    block_tokens: int

    def verbatim(self, padding: int, blocks: int) -> int:
        """Verbatim tokens of a row; raises when its block count does not fit its tokens."""
        held = self.tokens - padding
        if held < 0:
            raise PayloadInvalid("A row of the payload has more padding than tokens.", _FETCH_AGAIN)
        kept = min(held, self.sink_tokens + self.recent_tokens)
        if blocks != -(-(held - kept) // self.block_tokens):
            raise PayloadInvalid(
                "A row of the payload has another number of blocks than its tokens need.", _FETCH_AGAIN
            )
        return kept

    def block_sizes(self, padding: int, blocks: int) -> list[int]:
        """Tokens of each block of a row."""
        held = self.tokens - padding
        body = held - min(held, self.sink_tokens + self.recent_tokens)
        return [min(self.block_tokens, body - index * self.block_tokens) for index in range(blocks)]


def _flags(block: Block) -> int:
    return (_RAW_FLAG if block.raw else 0) | (_SHIFTED_FLAG if block.shifts else 0)


def _block(reader: "_Reader", size_and_flags: int, crc: int, tokens: int) -> Block:
    data = reader.checked(size_and_flags & _SIZE_MASK, crc)
    shifted = tokens if size_and_flags & _SHIFTED_FLAG else 0
    if shifted > len(data):
        raise PayloadInvalid("A block of the payload is shorter than its token shifts.", _FETCH_AGAIN)
    return Block(data[shifted:], bool(size_and_flags & _RAW_FLAG), data[:shifted])


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise PayloadInvalid(
                f"The payload is cut short: {len(self._data):,} bytes, at least {self.at + size:,} expected.",
                _FETCH_AGAIN,
            )
        part = self._data[self.at : self.at + size]
        self.at += size
        return part

    def checked(self, size: int, crc: int) -> bytes:
        part = self.take(size)
        if zlib.crc32(part) != crc:
            raise PayloadInvalid(f"The payload is damaged before byte {self.at:,}.", _FETCH_AGAIN)
        return part

    def finish(self) -> None:
        if self.at != len(self._data):
            raise PayloadInvalid(f"The payload has {len(self._data) - self.at:,} bytes too many.", _FETCH_AGAIN)
