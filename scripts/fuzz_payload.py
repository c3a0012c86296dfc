"""Throw damaged payloads at the decoder for as long as asked: each must decode, or be refused by PayloadInvalid.

    pip install atheris && python scripts/fuzz_payload.py -max_total_time=180

Starts from the golden payloads. Every second input has its checksums put right, so that damage reaches what lies behind
them. Not part of CI: tests/property does the same in small with Hypothesis.
"""

import struct
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import atheris

# Compiled functions cannot be instrumented, so that their module comes first, as it is.
import kvalign.transform  # noqa: F401

with atheris.instrument_imports(include=["kvalign.container", "kvalign.codec", "kvalign.verbatim"]):
    from kvalign import container
    from kvalign.artifact import load_artifact
    from kvalign.capture import load_model
    from kvalign.codec import Codec
    from kvalign.errors import PayloadInvalid

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
CODECS: list[Codec] = []
SEEDS: list[bytes] = []


def one_input(data: bytes) -> None:
    """A golden payload with a stretch replaced by fuzzed bytes."""
    provider = atheris.FuzzedDataProvider(data)
    number = provider.ConsumeIntInRange(0, len(SEEDS) - 1)
    seed = bytearray(SEEDS[number])
    for _ in range(provider.ConsumeIntInRange(1, 4)):
        at = provider.ConsumeIntInRange(0, len(seed))
        change = provider.ConsumeBytes(provider.ConsumeIntInRange(0, 24))
        seed[at : at + provider.ConsumeIntInRange(0, 24)] = change
    payload = bytes(seed)
    if provider.ConsumeBool():
        payload = with_sound_checksums(payload)
    with suppress(PayloadInvalid):
        CODECS[number].decode(payload)


def with_sound_checksums(payload: bytes) -> bytes:
    """The payload with each CRC-32 recomputed, as far as its header makes sense."""
    out = bytearray(payload)
    header, row_size, block_size = container._HEADER, container._ROW.size, container._BLOCK.size
    if len(out) < header.size:
        return payload
    rows = header.unpack_from(out)[11]
    table_end = header.size + rows * row_size
    if rows > 64 or table_end > len(out):
        return payload
    blocks = sum(struct.unpack_from("<I", out, header.size + row * row_size + 4)[0] for row in range(rows))
    table_end += blocks * block_size
    if blocks > 4096 or table_end + 4 > len(out):
        return payload
    at = len(out)
    for block in reversed(range(blocks)):
        entry = table_end - (blocks - block) * block_size
        size = struct.unpack_from("<I", out, entry)[0] & ((1 << 30) - 1)
        start = max(table_end + 4, at - size)
        struct.pack_into("<I", out, entry + 4, zlib.crc32(out[start:at]))
        at = start
    if rows == 1:
        struct.pack_into("<I", out, header.size + 16, zlib.crc32(out[table_end + 4 : at]))
    struct.pack_into("<I", out, table_end, zlib.crc32(out[:table_end]))
    return bytes(out)


def main() -> None:
    """Load the golden codecs and begin."""
    for folder in sorted(GOLDEN.glob("format-*")):
        model = load_model(folder / "model") if (folder / "model").is_dir() else None
        codec = load_artifact(folder).codec(model)
        for path in sorted(folder.glob("*.kv")):
            CODECS.append(codec)
            SEEDS.append(path.read_bytes())
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
