"""Reads safetensors headers and weight indexes as hostile bytes; allocates nothing by what they say.

Must not import torch, and never sees a weight: the API judges remote models with it.
Layout: https://github.com/huggingface/safetensors#format
"""

import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kvalign.errors import SourceInvalid

HEADER_LIMIT_BYTES = 25_000_000
LENGTH_BYTES = 8

_TENSORS_LIMIT = 200_000
_SHARDS_LIMIT = 500
_DIMENSIONS_LIMIT = 8
_TENSOR_NAME = re.compile(r"[\w.\-]{1,256}", re.ASCII)
_FILE_NAME = re.compile(r"[\w.\-]{1,128}\.safetensors", re.ASCII)

# Bits of one element; sub-byte types exist, and their tensors fill whole bytes.
_DTYPE_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as its header describes it; `elements` is the product of its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def header_bytes(start: bytes, file: str, file_bytes: int) -> int:
    """Size of a file's JSON header, from its first bytes; raises SourceInvalid on an impossible one."""
    if start.startswith(b"version https://git-lfs"):
        raise SourceInvalid(
            f"{file} is a Git LFS pointer, not the weights it points to.",
            "Fetch the files, for example by git lfs pull.",
        )
    if len(start) < LENGTH_BYTES:
        raise _damaged(file, f"holds {file_bytes} bytes, fewer than the {LENGTH_BYTES} of a header length")
    size = int.from_bytes(start[:LENGTH_BYTES], "little")
    if size > HEADER_LIMIT_BYTES:
        raise _damaged(file, f"claims a header of {size} bytes; the limit is {HEADER_LIMIT_BYTES}")
    if LENGTH_BYTES + size > file_bytes:
        raise _damaged(file, f"claims a header of {size} bytes, and the file holds {file_bytes}")
    return size


def parse_header(header: bytes, file: str, file_bytes: int) -> list[TensorEntry]:
    """The tensors of one file, in order of their bytes.

    header      the JSON header alone
    file_bytes  size of the whole file; the tensors must fill it exactly
    Raises SourceInvalid naming the file and the first thing wrong.
    """
    entries = _json_object(header, file)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "__metadata__ is not a map of strings")
    spans = sorted(_checked_entry(name, entry, file) for name, entry in entries.items())
    position = 0
    for begin, end, name, _ in spans:
        if begin != position:
            raise _damaged(file, f"tensor {name} begins at byte {begin}, where byte {position} was expected")
        position = end
    expected = LENGTH_BYTES + len(header) + position
    if expected != file_bytes:
        fact = "truncated" if file_bytes < expected else "longer than its header says"
        raise _damaged(file, f"is {fact}: {file_bytes} bytes where the header needs {expected}")
    return [entry for *_, entry in spans]


def parse_index(raw: bytes, file: str, present: Collection[str]) -> dict[str, str]:
    """The weight map of a model.safetensors.index.json: tensor name to the name of its file.

    present  names of the files that exist beside the index
    Raises SourceInvalid for a shard that is not a plain safetensors file name, or is not there.
    """
    weight_map = _json_object(raw, file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _damaged(file, "has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    if len(weight_map) > _TENSORS_LIMIT or len(shards) > _SHARDS_LIMIT:
        raise _damaged(
            file,
            f"names {len(weight_map)} tensors in {len(shards)} files; "
            f"the limits are {_TENSORS_LIMIT} and {_SHARDS_LIMIT}",
        )
    for tensor, shard in weight_map.items():
        if not _TENSOR_NAME.fullmatch(tensor):
            raise _damaged(file, f"names a tensor {tensor[:80]!r}")
        if not isinstance(shard, str) or not _FILE_NAME.fullmatch(shard):
            raise _damaged(file, f"places {tensor} in {str(shard)[:80]!r}, not a plain safetensors file name")
    missing = [shard for shard in shards if shard not in present]
    if missing:
        raise _damaged(file, f"names {', '.join(missing[:3])}, which {'is' if len(missing) == 1 else 'are'} not there")
    return weight_map


def _json_object(raw: bytes, file: str) -> dict[str, Any]:
    """Parse one JSON object whose size and nesting are bounded before a parser sees them."""
    if len(raw) > HEADER_LIMIT_BYTES:
        raise _damaged(file, f"has {len(raw)} bytes of JSON; the limit is {HEADER_LIMIT_BYTES}")
    if raw.count(b"{") > _TENSORS_LIMIT + 8 or raw.count(b"[") > 2 * _TENSORS_LIMIT + 8:
        raise _damaged(file, f"describes more than {_TENSORS_LIMIT} tensors")
    try:
        parsed = json.loads(raw.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"is not sound JSON ({str(error)[:120]})") from None
    if not isinstance(parsed, dict):
        raise _damaged(file, "is not a JSON object")
    return parsed


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise ValueError("a key appears twice")
    return parsed


def _checked_entry(name: str, entry: Any, file: str) -> tuple[int, int, str, TensorEntry]:
    if not _TENSOR_NAME.fullmatch(name):
        raise _damaged(file, f"names a tensor {name[:80]!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"describes tensor {name} without dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _damaged(file, f"gives tensor {name} the unknown dtype {str(dtype)[:40]!r}")
    if not _are_sizes(shape) or len(shape) > _DIMENSIONS_LIMIT:
        raise _damaged(file, f"gives tensor {name} the shape {str(shape)[:80]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file, f"gives tensor {name} the offsets {str(offsets)[:80]}")
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise _damaged(file, f"gives tensor {name} {end - begin} bytes for shape {shape} of {dtype}")
    return begin, end, name, TensorEntry(name, dtype, tuple(shape))


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**48 for value in values)


def _damaged(file: str, fact: str) -> SourceInvalid:
    return SourceInvalid(f"{file} {fact}.", "Upload the file again, or choose another revision.")
