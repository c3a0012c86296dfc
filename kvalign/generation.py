"""Generate from a resident cache that went through bytes, and from the uncompressed one, side by side."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvalign import accounting
from kvalign.accounting import PayloadSizes
from kvalign.capture import cache_argument, run
from kvalign.codec import Codec
from kvalign.errors import ConfigInvalid
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention
from kvalign.watch import watch


@dataclass(frozen=True)
class Continuation:
    """What the model went on to say after one prompt.

    text                from the resident cache, after the prompt's cache was stored as bytes and read back
    text_uncompressed   with the cache as it was; None when not asked for
    kernels             calls of each fused kernel while the text was made; empty for a codec without a resident form
    held_ratio          bf16 bytes of the cache over bytes held at the end, sinks and newest tokens included
    """

    text: str
    text_uncompressed: str | None
    prompt_tokens: int
    sizes: PayloadSizes
    coded_ratio: float
    cache_ratio: float
    kernels: dict[str, int]
    held_ratio: float | None


def prompt_tokens(tokenizer: Any, prompt: str) -> Tensor:
    """[1, T] int64: the prompt as a user's turn where the tokenizer has a chat template, else as plain text."""
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return torch.as_tensor(ids["input_ids"])
    return torch.as_tensor(tokenizer(prompt, return_tensors="pt")["input_ids"])


@torch.no_grad()
def continue_prompt(
    model: Any,
    tokenizer: Any,
    codec: Codec,
    prompt: str,
    *,
    max_new_tokens: int,
    side_by_side: bool = True,
    **target: Any,
) -> Continuation:
    """Greedy continuation of a prompt whose cache was encoded and decoded.

    target   as Codec.encode takes it: max_kl, ratio or step
    Raises ConfigInvalid for a prompt too short to have a cache.
    """
    tokens = prompt_tokens(tokenizer, prompt)
    if tokens.shape[1] < 2:
        raise ConfigInvalid("The prompt has fewer than two tokens.", "Give a longer prompt.")
    # generate wants at least one token that the cache does not hold yet.
    with watch(model, codec.shape.recomputed - 1) as watched:
        _, cache = run(model, tokens[:, :-1], logits_to_keep=1)
    data = codec.encode(cache, input_ids=tokens[:, :-1], watched=watched, **target)
    sizes = codec.sizes(data)
    restored = codec.decode(data) if codec.resident is not None else codec.decode_dense(data)
    with fused_attention(model):
        text = _generate(model, tokenizer, tokens, restored, max_new_tokens)
    plain = _generate(model, tokenizer, tokens, cache, max_new_tokens) if side_by_side else None
    geometry = codec.shape.geometry
    return Continuation(
        text,
        plain,
        tokens.shape[1],
        sizes,
        accounting.coded_ratio(geometry, sizes) if sizes.body_tokens else 1.0,
        accounting.cache_ratio(geometry, sizes),
        *_held(restored),
    )


def _held(cache: Cache) -> tuple[dict[str, int], float | None]:
    if not isinstance(cache, ResidentCache):
        return {}, None
    return dict(cache.counters.fused), accounting.resident_cache_ratio(cache.values_per_token, cache.sizes())


def _generate(model: Any, tokenizer: Any, tokens: Tensor, cache: Cache, max_new_tokens: int) -> str:
    pad = model.generation_config.pad_token_id
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=pad if pad is not None else tokenizer.eos_token_id,
        **{cache_argument(model): cache},
    )
    return str(tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True))
