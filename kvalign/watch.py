"""Keep the last queries of every layer while a model reads, to judge later which tokens it attends to.

Knows transformers' attention interface; nothing of codecs. Models that do not use that interface leave nothing here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

KEPT_QUERIES = 64
_NAME = "kvalign_watched_sdpa"


class RecentQueries:
    """The last KEPT_QUERIES queries of each layer, rotated, as attention saw them."""

    def __init__(self) -> None:
        self._queries: dict[int, Tensor] = {}
        self._scaling: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._queries)

    def record(self, layer: int, queries: Tensor, scaling: float | None) -> None:
        """queries [B, QH, T, D], of the newest T tokens."""
        kept = self._queries.get(layer)
        newest = queries.detach()[:, :, -KEPT_QUERIES:]
        if kept is not None and newest.shape[2] < KEPT_QUERIES and kept.shape[0] == newest.shape[0]:
            newest = torch.cat([kept, newest], dim=2)[:, :, -KEPT_QUERIES:]
        self._queries[layer] = newest.clone()
        self._scaling[layer] = scaling if scaling is not None else queries.shape[-1] ** -0.5

    def attention(self, layer: int, keys: Tensor, row: int, padding: int) -> Tensor | None:
        """Mean over query heads and kept queries of the squared attention that each token received: [T] float32.

        keys     [B, H, T, D] as cached
        padding  positions of this row that hold nothing
        None when this layer was not watched. QH x KEPT_QUERIES x T x D multiplications.
        """
        if layer not in self._queries:
            return None
        queries = self._queries[layer][row].float()
        known = keys[row, :, padding:].float()
        tokens = known.shape[1]
        queries = queries[:, -tokens:]
        scores = queries @ known.repeat_interleave(queries.shape[0] // known.shape[0], dim=0).mT * self._scaling[layer]
        unseen = torch.ones(queries.shape[1], tokens, dtype=torch.bool).triu(tokens - queries.shape[1] + 1)
        received = scores.masked_fill(unseen, float("-inf")).softmax(-1).square().mean(dim=(0, 1))
        return torch.cat([torch.zeros(padding), received])


@contextmanager
def watch_queries(model: Any) -> Iterator[RecentQueries]:
    """While the block runs, the model's attention leaves its last queries in what this yields.

    Works with the attention implementation `sdpa`; another one is left alone, and nothing is recorded.
    """
    queries = RecentQueries()
    if model.config._attn_implementation != "sdpa":
        yield queries
        return

    def watched(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        queries.record(module.layer_idx, query, kwargs.get("scaling"))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    name = f"{_NAME}_{id(queries)}"
    AttentionInterface.register(name, watched)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    try:
        yield queries
    finally:
        model.set_attn_implementation("sdpa")
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)
