"""How long a model says the same from a coded cache as from the uncompressed one, taking the likeliest token each time.

Also how a cache of any kind is read on from. Knows no codec.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvalign.capture import layer_tensors, position_limit, run
from kvalign.evaluate.protocol import Coder, PreparedWindow, copied, spread
from kvalign.resident.cache import ResidentCache
from kvalign.resident.interface import fused_attention

_WINDOWS = 4


@dataclass(frozen=True)
class GreedyResult:
    """What was measured, of one coder.

    new_tokens  the longest that a window can agree
    agreeing    a window each: tokens before the first that differs
    """

    new_tokens: int
    agreeing: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.agreeing) / len(self.agreeing)

    @property
    def identical(self) -> float:
        """Share of windows that agree to the end."""
        return sum(tokens == self.new_tokens for tokens in self.agreeing) / len(self.agreeing)


@torch.no_grad()
def measure_greedy(
    model: Any, prepared: Sequence[PreparedWindow], coders: Mapping[str, Coder], *, new_tokens: int = 48
) -> dict[str, GreedyResult]:
    """Continue every window from the uncompressed cache and from what each coder leaves, and compare; by coder.

    prepared    at least one window, their prefixes of one length; they are left as they were. Of many, about
                four spread over them are taken
    new_tokens  fewer are made where the model's positions end before

    Uncompressed caches are read on together, new_tokens passes for all of them; other kinds one window at a time.
    """
    prepared = spread(prepared, _WINDOWS)
    longest = max(window.window.prefix.numel() for window in prepared)
    new_tokens = max(0, min(new_tokens, position_limit(model) - longest))
    first = torch.stack([window.window.continuation[:1] for window in prepared])
    plain = _continued(model, [copied(window.cache) for window in prepared], first, new_tokens)
    found = {}
    for name, coder in coders.items():
        left = [coder(replace(window, cache=copied(window.cache))) for window in prepared]
        found[name] = GreedyResult(new_tokens, _agreeing(plain, _continued(model, left, first, new_tokens)))
    return found


@torch.no_grad()
def greedy(model: Any, cache: Cache, first: Tensor, new_tokens: int) -> Tensor:
    """The likeliest token, read in its turn, and so on: [B, new_tokens] int64. The cache is consumed.

    first  [B, 1] int64, the token to read first
    """
    found = [first[:, :0]]
    token = first
    with attention_for(model, cache):
        for _ in range(new_tokens):
            logits, _ = run(model, token, cache, logits_to_keep=1)
            token = logits[:, -1].argmax(-1, keepdim=True)
            found.append(token)
    return torch.cat(found, dim=1)


def attention_for(model: Any, cache: Cache) -> AbstractContextManager[Any]:
    """While the block runs, the model attends to a resident cache's codes as they are; to others in its usual way."""
    return fused_attention(model) if isinstance(cache, ResidentCache) else nullcontext()


def _continued(model: Any, caches: list[Cache], first: Tensor, new_tokens: int) -> Tensor:
    """[B, new_tokens], a row for each cache."""
    if all(type(cache) is DynamicCache for cache in caches) and len({cache.get_seq_length() for cache in caches}) == 1:
        return greedy(model, _stacked(caches), first, new_tokens)
    rows = [greedy(model, cache, own, new_tokens) for cache, own in zip(caches, first.split(1), strict=True)]
    return torch.cat(rows)


def _stacked(caches: list[Cache]) -> DynamicCache:
    """One cache with the rows of all."""
    result = DynamicCache()
    for index, layers in enumerate(zip(*map(layer_tensors, caches), strict=True)):
        keys, values = zip(*layers, strict=True)
        result.update(torch.cat(keys), torch.cat(values), index)
    return result


def _agreeing(plain: Tensor, coded: Tensor) -> tuple[int, ...]:
    """Tokens of each row before the first difference; [B, T] both."""
    return tuple((plain == coded).long().cumprod(dim=1).sum(dim=1).tolist())
