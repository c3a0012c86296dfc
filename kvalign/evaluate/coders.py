"""What each form of our codec leaves of a prefix: the one place where evaluation calls it."""

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvalign.accounting import PayloadSizes
from kvalign.capture import run
from kvalign.codec import Codec
from kvalign.evaluate.protocol import CacheCoder, Coder, PreparedWindow
from kvalign.evaluate.resident import CHUNK_TOKENS
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention

AT_REST, RESIDENT = "at rest", "resident"


def round_trip(codec: Codec, step: int | None = None) -> CacheCoder:
    """Through bytes at a step, the recommended one by default."""

    def coder(prepared: PreparedWindow) -> tuple[DynamicCache, PayloadSizes]:
        data = codec.encode(prepared.cache, input_ids=prepared.window.prefix[None], step=step, watched=prepared.watched)
        return codec.decode_dense(data), codec.sizes(data)

    return coder


def coders_of(model: Any, codec: Codec) -> dict[str, Coder]:
    """At rest: the bytes at the recommended step, decoded; resident, where there is such a form: read in chunks."""

    stored = round_trip(codec)

    def resident(window: PreparedWindow) -> Cache:
        assert codec.resident is not None
        cache = ResidentCache(codec.resident, model)
        with fused_attention(model):
            for part in window.window.prefix[None].split(CHUNK_TOKENS, dim=1):
                run(model, part, cache, logits_to_keep=1)
        return cache

    return {AT_REST: lambda window: stored(window)[0]} | (
        {RESIDENT: resident} if codec.resident and codec.resident.layers else {}
    )
