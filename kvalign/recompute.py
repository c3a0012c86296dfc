"""What a model's first layers make of token ids: computed again when a cache is decoded, instead of being stored.

The keys and values of the first n layers cost n - 1 layers of a prefill, and no byte beyond the token ids; the input
of layer n - 1's attention, from which its keys and values come, also predicts part of every later layer's.
Knows transformers' caches and attention modules; nothing of codecs.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign.capture import CacheShape, layer_tensors, probe_tokens, run, vocabulary
from kvalign.watch import attention_input, joined_inputs

# Decoding must stay far cheaper than prefill: one layer in ten.
_LAYERS_FOR_EACH = 10
_PROBE_TOKENS = 16
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_SAME_TOKENS = 0.2
_SAME_CODED_TOKENS = 0.7


class _EnoughError(Exception):
    """Ends a forward pass once the last wanted layer has handed in its keys and values."""


class _FirstLayersCache(DynamicCache):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self._wanted = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._wanted - 1:
            raise _EnoughError
        return found


@dataclass(frozen=True)
class Recomputed:
    """One sequence's first layers.

    layers    (keys as cached, values) of each, [1, H, T, D]
    features  [T, F] float32: input of the last one's attention
    """

    layers: list[tuple[Tensor, Tensor]]
    features: Tensor


class FirstLayers:
    """The first layers of a model, ready to run on token ids. `count` 0 computes nothing."""

    def __init__(self, model: Any, count: int) -> None:
        self._model = model
        self.count = count

    @property
    def vocabulary(self) -> int:
        """Token ids run from 0 to below this."""
        return vocabulary(self._model)

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Recomputed:
        """tokens [T] int64, from the start of the text. About (count - 1) / layers of a prefill."""
        if not self.count:
            return Recomputed([], torch.zeros(tokens.numel(), 0))
        cache = _FirstLayersCache(self.count)
        with attention_input(self._model, self.count - 1) as seen, suppress(_EnoughError):
            run(self._model, tokens[None].to(self._model.device), cache, logits_to_keep=1)
        return Recomputed(layer_tensors(cache)[: self.count], joined_inputs(seen, tokens.numel())[0])


def default_count(model: Any, shape: CacheShape) -> int:
    """How many layers to recompute: one in ten, at least one, never all; 0 where the model cannot do it."""
    layers = len(shape.geometry.layers)
    count = min(max(1, round(layers / _LAYERS_FOR_EACH)), layers - 1)
    return count if count > 0 and works(model, count) else 0


@torch.no_grad()
def works(model: Any, count: int) -> bool:
    """Whether the first layers, run alone, give what a whole pass gives."""
    tokens = probe_tokens(model, _PROBE_TOKENS)
    whole = layer_tensors(run(model, tokens[None].to(model.device), logits_to_keep=1)[1])
    try:
        again = FirstLayers(model, count).run(tokens)
    except Exception:  # whatever a family's own code raises when its later layers never run
        return False
    return (
        len(again.layers) == count
        and again.features.shape[0] == _PROBE_TOKENS
        and again.features.shape[1] > 0
        and disagreement(again.layers, whole) <= _TOLERANCE[whole[0][0].dtype]
    )


def disagreement(found: list[tuple[Tensor, Tensor]], cached: list[tuple[Tensor, Tensor]]) -> float:
    """Largest relative difference in norm over keys and values of the layers in `found`, [1, H, T, D] each."""
    pairs = [pair for ours, theirs in zip(found, cached, strict=False) for pair in zip(ours, theirs, strict=True)]
    return max(
        (float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-12)) for a, b in pairs), default=0.0
    )


def same_tokens(found: list[tuple[Tensor, Tensor]], cached: list[tuple[Tensor, Tensor]], exact: bool = True) -> bool:
    """Whether a cache can come from the tokens recomputed: far looser than rounding, far tighter than chance.

    exact  whether the cache is as the model made it; one that was coded meanwhile is further off, a wrong token further

    The first layer's keys and values of a token come from its own id: there a single wrong one shows.
    """
    limit = _SAME_TOKENS if exact else _SAME_CODED_TOKENS
    return max(disagreement(found, cached), _worst_token(found[:1], cached[:1])) <= limit


def _worst_token(found: list[tuple[Tensor, Tensor]], cached: list[tuple[Tensor, Tensor]]) -> float:
    """Largest difference in norm of one token's keys or values, relative to the root mean square of all tokens'."""
    worst = 0.0
    for ours, theirs in zip(found, cached, strict=False):
        for a, b in zip(ours, theirs, strict=True):
            off, whole = (x.float().square().sum(dim=(0, 1, 3)) for x in (a.float() - b.float(), b))
            worst = max(worst, float((off.max() / whole.mean().clamp_min(1e-24)).sqrt()))
    return worst
