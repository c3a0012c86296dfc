"""Keep what an encoder will ask for while a model reads: every layer's last queries, and one attention's input.

The queries show which tokens the model attends to; the input is what later layers are predicted from. Knows
transformers' attention interface and modules; nothing of codecs. Models that do not use them leave nothing here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.pytorch_utils import Conv1D

from kvalign.resident.cache import reads_codes
from kvalign.resident.interface import attention

KEPT_QUERIES = 64
_NAME = "kvalign_watched"


class Watched:
    """The last KEPT_QUERIES queries of each layer, rotated, as attention saw them.

    inputs  [B, T, F] float32 for each pass: what entered the attention of the layer asked for
    ids     [B, T] int64 for each pass: the tokens that were read
    kept    queries to keep; None: all
    """

    def __init__(self, kept: int | None = KEPT_QUERIES) -> None:
        self._kept = kept
        self.inputs: list[Tensor] = []
        self.ids: list[Tensor] = []
        self._queries: dict[int, Tensor] = {}
        self._scaling: dict[int, float] = {}

    def __bool__(self) -> bool:
        return bool(self._queries)

    def features(self, row: int, padding: int, ids: Tensor) -> Tensor | None:
        """What entered the attention at a row's tokens, [T, F]; None unless these very tokens were read, and no others.

        padding  positions before them; ids [T]
        """
        if not (self.inputs and self.ids) or len({seen.shape[0] for seen in [*self.inputs, *self.ids]}) > 1:
            return None
        joined, read = torch.cat(self.inputs, dim=1), torch.cat(self.ids, dim=1)
        same = row < joined.shape[0] and joined.shape[:2] == read.shape and torch.equal(read[row, padding:], ids)
        return joined[row, padding:] if same else None

    def record(self, layer: int, queries: Tensor, scaling: float | None) -> None:
        """queries [B, QH, T, D], of the newest T tokens."""
        kept = self._queries.get(layer)
        most = self._kept or 1 << 30
        newest = queries.detach()[:, :, -most:]
        if kept is not None and newest.shape[2] < most and kept.shape[0] == newest.shape[0]:
            newest = torch.cat([kept, newest], dim=2)[:, :, -most:]
        self._queries[layer] = newest.clone()
        self._scaling[layer] = scaling if scaling is not None else queries.shape[-1] ** -0.5

    def queries(self, layer: int) -> tuple[Tensor, float] | None:
        """The kept queries of a layer, [B, QH, T, D], rotated, and the scale on their scores; None: not watched."""
        return (self._queries[layer], self._scaling[layer]) if layer in self._queries else None

    def attention(self, layer: int, keys: Tensor, row: int, padding: int) -> Tensor | None:
        """Mean over query heads and kept queries of the squared attention that each token received: [T] float32.

        keys     [B, H, T, D] as cached
        padding  positions of this row that hold nothing
        None when this layer was not watched. QH x KEPT_QUERIES x T x D multiplications.
        """
        if layer not in self._queries:
            return None
        known = keys[row, :, padding:]
        heads, tokens, _ = known.shape
        queries = self._queries[layer][row][:, -tokens:] * self._scaling[layer]
        count = queries.shape[1]
        # Query heads that share a KV head stand behind one another: no key is copied.
        scores = (queries.reshape(heads, -1, queries.shape[-1]) @ known.to(queries.dtype).mT).float()
        newest = scores.view(-1, count, tokens)[:, :, tokens - count :]
        newest.masked_fill_(torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1), float("-inf"))
        received = scores.softmax(-1).square_().mean(dim=(0, 1)).cpu()
        return torch.cat([torch.zeros(padding), received])


@contextmanager
def watch(model: Any, input_of: int = -1, *, kept: int | None = KEPT_QUERIES) -> Iterator[Watched]:
    """While the block runs, the model's attention leaves its last queries in what this yields.

    input_of   layer whose attention's input is kept too; -1: none
    kept       how many of the last queries; None: all

    Queries come with the attention implementations `sdpa` and `kvalign`; another one is left alone, and nothing is
    recorded.
    """
    watched = Watched(kept)
    with (
        attention_input(model, input_of) as watched.inputs,
        _read_tokens(model) as watched.ids,
        _recorded_queries(model, watched),
    ):
        yield watched


@contextmanager
def _read_tokens(model: Any) -> Iterator[list[Tensor]]:
    """While the block runs, the ids that enter the model's embeddings, [B, T] int64 for each pass."""
    read: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() == 2:
            read.append(args[0].detach().long().cpu())

    handle = model.get_input_embeddings().register_forward_pre_hook(record)
    try:
        yield read
    finally:
        handle.remove()


@contextmanager
def _recorded_queries(model: Any, queries: Watched) -> Iterator[None]:
    before = model.config._attn_implementation
    if before not in ("sdpa", *reads_codes):
        yield
        return
    inner = attention if before in reads_codes else sdpa_attention_forward

    def watched(
        module: Any, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        queries.record(module.layer_idx, query, kwargs.get("scaling"))
        return inner(module, query, key, value, attention_mask, **kwargs)

    name = f"{_NAME}_{id(queries)}"
    AttentionInterface.register(name, watched)
    AttentionMaskInterface.register(name, sdpa_mask)
    if inner is attention:
        reads_codes.add(name)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        reads_codes.discard(name)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@contextmanager
def attention_input(model: Any, layer: int) -> Iterator[list[Tensor]]:
    """While the block runs, what enters the attention of one layer, [B, T, F] float32 for each pass.

    Nothing is recorded for layer -1, or when no module says that it is the layer's attention.
    """
    seen: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            seen.append(hidden.detach().float().cpu())

    module = attention_module(model, layer)
    if module is None:
        yield seen
        return
    handle = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def joined_inputs(seen: list[Tensor], tokens: int) -> Tensor:
    """The passes of a batch behind one another, [B, T, F]; [1, T, 0] when nothing was recorded."""
    return torch.cat(seen, dim=1) if seen else torch.zeros(1, tokens, 0)


def output_projection(model: Any, layer: int) -> Tensor | None:
    """What a layer's attention multiplies its heads' outputs by, [hidden, QH x D]; None where none can be told.

    It is the last of the module's projections, in every family that transformers' attention interface serves.
    """
    module = attention_module(model, layer)
    children = list(module.children()) if module is not None else []
    projections = [child for child in children if isinstance(child, nn.Linear | Conv1D)]
    if not projections:
        return None
    weight = projections[-1].weight.detach()
    # transformers' Conv1D, as in GPT-2, holds the transpose of a Linear.
    return weight.T if isinstance(projections[-1], Conv1D) else weight


def attention_module(model: Any, layer: int) -> nn.Module | None:
    """The attention module of a layer: the first that names its index and holds projections of its own."""
    if layer < 0:
        return None
    for module in model.modules():
        if getattr(module, "layer_idx", None) == layer and "attention" in type(module).__name__.lower():
            return module
    return None
