"""What is left of a prefix by each form of our codec: for tasks that read on from it."""

from typing import Any

from transformers.cache_utils import Cache

from kvalign.capture import run
from kvalign.codec import Codec
from kvalign.evaluate.protocol import Coder, PreparedWindow
from kvalign.evaluate.resident import CHUNK_TOKENS
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention

AT_REST, RESIDENT = "at rest", "resident"


def coders_of(model: Any, codec: Codec) -> dict[str, Coder]:
    """At rest: the bytes at the recommended step, decoded; resident, where there is such a form: read in chunks."""

    def at_rest(window: PreparedWindow) -> Cache:
        data = codec.encode(window.cache, input_ids=window.window.prefix[None], watched=window.watched)
        return codec.decode_dense(data)

    def resident(window: PreparedWindow) -> Cache:
        assert codec.resident is not None
        cache = ResidentCache(codec.resident, model)
        with fused_attention(model):
            for part in window.window.prefix[None].split(CHUNK_TOKENS, dim=1):
                run(model, part, cache, logits_to_keep=1)
        return cache

    return {AT_REST: at_rest} | ({RESIDENT: resident} if codec.resident and codec.resident.layers else {})
