"""The resident cache as transformers sees it: a Cache whose full-attention layers hold codes.

    cache = codec.cache(model)
    model.generate(**inputs, cache=cache)

Layers of other types are transformers' own. With the attention implementation "kvalign" a layer hands attention its
state (interface.py); with any other it hands over keys and values of full length, correct and dear.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    get_layer_types_and_kwargs,
)

from kvalign.accounting import ResidentSizes
from kvalign.errors import ConfigInvalid, SourceUnsupported
from kvalign.geometry import KINDS
from kvalign.resident.attention import Counters
from kvalign.resident.plan import LayerPlan, ResidentPlan
from kvalign.resident.state import LayerState

IMPLEMENTATION = "kvalign"
# Attention implementations that take a layer's state: ours, and what records queries on top of it (watch.py).
reads_codes = {IMPLEMENTATION}
_CODED_TYPE = "full_attention"
_COMPARED_NUMBERS = 64
_ROUNDING = 1e-2  # models of one revision may be loaded in different dtypes


class Handle:
    """What attention receives in place of keys or values: the layer's state, and what is new, unrounded.

    Looks like the tensor [B, H, slots, D] as far as models look at it before attention.
    """

    def __init__(self, layer: "ResidentLayer", fresh: Tensor) -> None:
        self.layer = layer
        self.fresh = fresh

    @property
    def shape(self) -> torch.Size:
        rows, heads, _, dim = self.fresh.shape
        return torch.Size((rows, heads, self.layer.state.slots, dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.fresh.dtype

    @property
    def device(self) -> torch.device:
        return self.fresh.device


class Pass:
    """The forward pass that is under way, as the model announced it; shared by a cache's layers.

    padding  [B] int64: slots before each row's first token, as far as they are known
    """

    def __init__(self) -> None:
        self.announced = False
        self.padding: Tensor | None = None

    def begin(self, attention_mask: Any) -> None:
        self.announced = True
        if not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 2):
            self.padding = None  # what layers hold says it
            return
        seen = attention_mask.bool()
        first = seen.int().argmax(1)
        padding = torch.where(seen.any(1), first, torch.full_like(first, seen.shape[1]))
        # The same tensor while it says the same: layers derive from it only what is new.
        if self.padding is None or not torch.equal(padding, self.padding):
            self.padding = padding


class _Shared:
    """A model's config, which copies of a cache share: the model goes on changing it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


class ResidentLayer(CacheLayerMixin):
    """One full-attention layer."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(
        self, plan: LayerPlan, resident: ResidentPlan, config: Any, own_pass: Pass, counters: Counters
    ) -> None:
        super().__init__()
        self.state = LayerState(plan, resident.sink_tokens, resident.recent_tokens)
        self.counters = counters
        self.is_initialized = True
        self._config = _Shared(config)
        self._pass = own_pass

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the state begins with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take new tokens; returns what the model's attention reads.

        Raises ConfigInvalid when the model is not the one that the cache was made for.
        """
        if not self._pass.announced:
            raise ConfigInvalid(
                "The cache is used by a model that it was not made for.", "Make one with codec.cache(model) for it."
            )
        _refuse_latent(self._config.config)
        self.state.settle()
        padding = self._pass.padding
        if padding is None or padding.numel() != key_states.shape[0]:
            # No mask was given: what is held says it, and where nothing is held there is none.
            padding = self.state.padding if self.state.rows else torch.zeros(key_states.shape[0], dtype=torch.int64)
        self.state.append(key_states, value_states, padding.to(key_states.device))
        if self._config.config._attn_implementation in reads_codes:
            return Handle(self, key_states), Handle(self, value_states)
        self.counters.dense += 1
        self.counters.saw(self.state.slots)
        keys, values = (self.state.dense(kind, key_states.dtype) for kind in KINDS)
        keys[:, :, -key_states.shape[2] :] = key_states
        values[:, :, -value_states.shape[2] :] = value_states
        self.state.settle()
        return keys, values

    def get_seq_length(self) -> int:
        return self.state.slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.slots + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number, as transformers counts."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the tokens to remove as a negative number, not {tokens_to_remove}.")
        self.state.crop(-tokens_to_remove)

    def reset(self) -> None:
        self.state.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if not self.state.is_empty:
            self.state.change_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.state.is_empty:
            self.state.change_rows(lambda rows: rows[indices.to(rows.device)])

    def offload(self) -> None:
        """Nothing: what is held is small already."""

    def prefetch(self) -> None:
        """Nothing: nothing was offloaded."""


class ResidentCache(Cache):
    """A cache whose full-attention layers hold codes.

    plan   as fitted for the model
    model  that will fill it, and no other

    Raises SourceUnsupported for a layer type that neither kvalign nor transformers' cache holds, ConfigInvalid when
    the plan is another model's.
    """

    def __init__(self, plan: ResidentPlan, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        self.counters = Counters({})
        self._pass = Pass()
        types, kwargs = get_layer_types_and_kwargs(config)
        _check_types(types, plan.layers, config)
        super().__init__(
            layers=[
                ResidentLayer(plan.layers[index], plan, config, self._pass, self.counters)
                if kind == _CODED_TYPE
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**own)
                for index, (kind, own) in enumerate(zip(types, kwargs, strict=True))
            ]
        )
        self._model = weakref.ref(model.get_decoder())
        _announce_passes(model.get_decoder())

    def begin(self, model: nn.Module, attention_mask: Any) -> None:
        """Called before each pass of a model that was given this cache."""
        if model is not self._model():
            raise ConfigInvalid(
                f"The cache was made for another model than this {type(model).__name__}.",
                "Make one with codec.cache(model) for each model.",
            )
        held = {layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)}
        if len(held) > 1:
            raise ConfigInvalid(
                f"An earlier pass with this cache ended midway: its layers hold {min(held)} to {max(held)} tokens.",
                "Call reset() on it, or make a new one with codec.cache(model).",
            )
        self._pass.begin(attention_mask)

    def end(self) -> None:
        """Called after each pass, whether it came to its end or not."""
        self._pass.announced = False

    def coded_layers(self) -> dict[int, ResidentLayer]:
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, ResidentLayer)}

    @property
    def values_per_token(self) -> int:
        """Numbers that one token leaves in the coded layers."""
        return sum(layer.state.plan.values_per_token for layer in self.coded_layers().values())

    def sizes(self) -> ResidentSizes:
        """Bytes really held, and tokens."""
        states = [layer.state for layer in self.coded_layers().values()]
        held = [state.held_bytes() for state in states]
        other = sum(_tensor_bytes(layer) for layer in self.layers if not isinstance(layer, ResidentLayer))
        return ResidentSizes(
            coded=sum(part["coded"] for part in held),
            verbatim=sum(part["verbatim"] for part in held),
            other=other,
            coded_tokens=max((state.coded_tokens * state.rows for state in states), default=0),
            tokens=max((state.slots * state.rows for state in states), default=0),
        )


def coded_layers(model: Any) -> list[int]:
    """Layers of a model that a resident cache codes: those of full attention."""
    types, _ = get_layer_types_and_kwargs(model.config.get_text_config(decoder=True))
    return [index for index, kind in enumerate(types) if kind == _CODED_TYPE]


def _check_types(types: list[str], layers: Mapping[int, LayerPlan], config: Any) -> None:
    for index, kind in enumerate(types):
        if kind != _CODED_TYPE and kind not in DYNAMIC_LAYER_TYPE_MAPPING:
            raise SourceUnsupported(
                f"Layer {index} is of type {kind!r}, which no cache layer is known for.",
                "kvalign codes full attention and leaves sliding, chunked, convolution and linear layers as they are.",
            )
    coded = {index for index, kind in enumerate(types) if kind == _CODED_TYPE}
    if not coded <= set(layers):
        raise ConfigInvalid(
            f"The codec has a resident form for layers {sorted(layers)[:8]}...; this model has full attention in"
            f" {sorted(coded)[:8]}... ({len(coded)} in all).",
            "Use the codec of this model.",
        )
    _refuse_latent(config)


def _refuse_latent(config: Any) -> None:
    if getattr(config, "kv_lora_rank", None) and config._attn_implementation in reads_codes:
        raise SourceUnsupported(
            "The model keeps latent keys (MLA), which its attention expands itself.",
            'Select another attention implementation: model.set_attn_implementation("sdpa").',
        )


_announced: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _announce_passes(model: nn.Module) -> None:
    """From now on the model tells a resident cache of each pass: a cache sees keys and values alone, and no padding."""
    if model in _announced:
        return
    _announced.add(model)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (cache := _resident(kwargs)) is not None:
            cache.begin(module, kwargs.get("attention_mask"))

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if (cache := _resident(kwargs)) is not None:
            cache.end()

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, with_kwargs=True, always_call=True)


def _resident(kwargs: dict[str, Any]) -> ResidentCache | None:
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    return cache if isinstance(cache, ResidentCache) else None


def _tensor_bytes(layer: Any) -> int:
    """Bytes of the tensors that one of transformers' own layers holds."""
    found = 0
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        # Storages: a sliding layer keeps a view of more than its window until it is updated again.
        found += sum(part.untyped_storage().nbytes() for part in parts if isinstance(part, Tensor))
    return found


def uncompressed(cache: ResidentCache) -> DynamicCache:
    """A plain cache of all that a resident one holds, in the dtype that it was given.

    Raises ConfigInvalid when a layer keeps a window of its tokens only, or nothing was read yet.
    """
    plain = DynamicCache()
    tokens = cache.get_seq_length()
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, ResidentLayer) and not layer.state.is_empty:
            held: list[Any] = [layer.state.dense(kind, layer.state.dtype) for kind in KINDS]
        else:
            held = [getattr(layer, kind, None) for kind in KINDS]
        keys, values = held
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or keys.shape[-2] != tokens:
            raise ConfigInvalid(
                f"Layer {index} of the cache ({type(layer).__name__}) does not hold all {tokens} tokens.",
                "Read the text into a DynamicCache() without a config, whose layers keep every token, and encode that.",
            )
        plain.update(keys, values, index)
    return plain


def fill(cache: ResidentCache, tensors: list[tuple[Tensor, Tensor]], padding: Tensor) -> ResidentCache:
    """Everything that was read into a new cache, which is returned: (keys, values) of each layer, [B, H, T, D].

    padding  [B]: slots before each row's first token
    """
    for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
        if isinstance(layer, ResidentLayer):
            layer.state.append(keys, values, padding.to(keys.device))
            layer.state.settle()
        else:
            layer.update(keys, values)
    return cache


def same_weights(model: Any, other: Any) -> bool:
    """Whether two models look like one: the same parameters by name and shape, and a few numbers of each."""
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    if ours.keys() != theirs.keys():
        return False
    for name, weight in ours.items():
        if weight.shape != theirs[name].shape:
            return False
        stride = max(1, weight.numel() // _COMPARED_NUMBERS)
        a, b = (x.detach().flatten()[::stride].float().cpu() for x in (weight, theirs[name]))
        if not torch.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING * float(b.abs().max())):
            return False
    return True
