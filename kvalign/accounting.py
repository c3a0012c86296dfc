"""The only place that makes a rate. Its parts sum to the bytes on disk; knows sizes, not tensors."""

from dataclasses import asdict, dataclass
from typing import TypeVar

from kvalign.geometry import Geometry

RAW_BYTES_PER_VALUE = 2  # bfloat16, whatever dtype the cache is held in


@dataclass(frozen=True)
class PayloadSizes:
    """Bytes of one encoded cache by purpose; `total` is its length.

    coded      entropy-coded blocks of body tokens, and blocks stored raw
    verbatim   sink and recent tokens in 16 bit
    side_info  header, positions, block table, token steps, checksums
    """

    coded: int
    verbatim: int
    side_info: int
    body_tokens: int
    verbatim_tokens: int

    @property
    def total(self) -> int:
        return self.coded + self.verbatim + self.side_info


def raw_bytes(geometry: Geometry, tokens: int) -> int:
    """Bytes of a bfloat16 cache of so many tokens."""
    return RAW_BYTES_PER_VALUE * geometry.values_per_token * tokens


def coded_ratio(geometry: Geometry, sizes: PayloadSizes) -> float:
    """bf16 bytes of the coded tokens / bytes they take, side information of the whole payload included."""
    return raw_bytes(geometry, sizes.body_tokens) / max(1, sizes.coded + sizes.side_info)


def cache_ratio(geometry: Geometry, sizes: PayloadSizes) -> float:
    """bf16 bytes of the whole cache / bytes of its payload, verbatim tokens included."""
    return raw_bytes(geometry, sizes.body_tokens + sizes.verbatim_tokens) / max(1, sizes.total)


def projected_cache_ratio(
    geometry: Geometry,
    coded_ratio: float,
    tokens: int,
    verbatim_tokens: int,
    artifact_share_bytes: float = 0.0,
) -> float:
    """Ratio of a whole cache of `tokens`, of which `verbatim_tokens` stay in 16 bit and the rest reach `coded_ratio`.

    artifact_share_bytes  part of the codec's own bytes laid to this cache
    """
    verbatim = min(tokens, verbatim_tokens)
    stored = raw_bytes(geometry, verbatim) + raw_bytes(geometry, tokens - verbatim) / coded_ratio
    return raw_bytes(geometry, tokens) / (stored + artifact_share_bytes)


def break_even_tokens(geometry: Geometry, artifact_bytes: int, coded_ratio: float) -> int:
    """Cached tokens from which codec and payloads together are smaller than the bf16 cache."""
    saved_per_token = raw_bytes(geometry, 1) * (1 - 1 / coded_ratio)
    return int(artifact_bytes / saved_per_token) + 1


@dataclass(frozen=True)
class ResidentSizes:
    """Bytes of memory that a resident cache holds, by purpose, over all rows.

    coded     pages of codes with their scales
    verbatim  sinks and newest tokens in 16 bit, and the room kept for them
    other     layers that are not coded
    """

    coded: int
    verbatim: int
    other: int
    coded_tokens: int
    tokens: int

    @property
    def total(self) -> int:
        return self.coded + self.verbatim + self.other


def resident_coded_ratio(values_per_token: int, sizes: ResidentSizes) -> float:
    """bf16 bytes of the tokens on pages / bytes of their pages, scales included, in the layers that are coded."""
    return RAW_BYTES_PER_VALUE * values_per_token * sizes.coded_tokens / max(1, sizes.coded)


def resident_cache_ratio(values_per_token: int, sizes: ResidentSizes) -> float:
    """bf16 bytes of the tokens held / bytes held for them, sinks and newest tokens included, in the coded layers."""
    return RAW_BYTES_PER_VALUE * values_per_token * sizes.tokens / max(1, sizes.coded + sizes.verbatim)


def projected_resident_ratio(
    values_per_token: int, bits_per_value: float, tokens: int, verbatim_tokens: float
) -> float:
    """Ratio of a resident cache of `tokens`, of which `verbatim_tokens` lie in 16 bit beside the pages."""
    raw = RAW_BYTES_PER_VALUE * values_per_token
    verbatim = min(float(tokens), verbatim_tokens)
    return raw * tokens / (raw * verbatim + (tokens - verbatim) * values_per_token * bits_per_value / 8)


Sizes = TypeVar("Sizes", PayloadSizes, ResidentSizes)


def merged(sizes: list[Sizes]) -> Sizes:
    """Sizes of several payloads, or of several resident caches, together; one at least."""
    parts = [asdict(item) for item in sizes]
    return type(sizes[0])(**{name: sum(part[name] for part in parts) for name in parts[0]})
