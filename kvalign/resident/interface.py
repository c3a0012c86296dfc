"""The attention implementation "kvalign" of transformers: attention straight on a resident cache.

    model.set_attn_implementation("kvalign")

Layers that hold no codes, and passes without a cache, get ordinary attention. Whatever a model hands to attention is
honoured or refused by name, never passed over.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvalign.errors import ConfigInvalid, SourceUnsupported
from kvalign.kernels import reference
from kvalign.resident.attention import Mask, attend
from kvalign.resident.cache import IMPLEMENTATION, Handle, reads_codes

# What models pass along without meaning it for attention.
_NOT_FOR_ATTENTION = {
    "cache",
    "cache_position",
    "kwargs",
    "layer_idx",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "token_type_ids",
    "use_cache",
}


def register() -> None:
    """Make "kvalign" an attention implementation that models can be set to, with its masks."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


@contextmanager
def fused_attention(model: Any) -> Iterator[bool]:
    """While the block runs, the model's attention reads codes; yields False for a model that cannot be set to it."""
    before = model.config.get_text_config(decoder=True)._attn_implementation
    register()
    if before in reads_codes:
        yield True
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_attn_implementation(IMPLEMENTATION)
    able = model.config.get_text_config(decoder=True)._attn_implementation == IMPLEMENTATION
    try:
        yield able
    finally:
        if able:
            model.set_attn_implementation(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Handle,
    value: Tensor | Handle,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: query [B, QH, Q, D]; returns [B, Q, QH, DV].

    Raises SourceUnsupported for an argument whose meaning is not known, ConfigInvalid for one that cannot be met.
    """
    _refuse_unknown(kwargs, dropout if module.training else 0.0)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if not isinstance(key, Handle):
        return _on_tensors(module, query, key, value, attention_mask, scaling, softcap, s_aux, causal), None
    if sliding_window is not None:
        raise SourceUnsupported(
            f"A layer of full attention was given a sliding window of {sliding_window}.",
            'Select another attention implementation: model.set_attn_implementation("sdpa").',
        )
    layer = key.layer
    assert isinstance(value, Handle)
    fresh = (key.fresh, value.fresh)
    if layer.state.slots == query.shape[2]:
        # Nothing was held before: attention on what is there, uncompressed, of this one layer.
        found = _on_tensors(module, query, *fresh, attention_mask, scaling, softcap, s_aux, causal)
        layer.state.settle()
        return found, None
    out = attend(
        layer.state,
        query,
        Mask.of(attention_mask, causal),
        layer.counters,
        scaling=scaling,
        softcap=softcap,
        sink_logits=s_aux,
        fresh=fresh,
    )
    layer.state.settle()
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(kwargs: dict[str, Any], dropout: float) -> None:
    for name, given in kwargs.items():
        if name in _NOT_FOR_ATTENTION or given is None or given is False:
            continue
        if name == "output_attentions":
            raise ConfigInvalid(
                "Attention weights were asked for, which attention on codes never has whole.",
                'Select another attention implementation: model.set_attn_implementation("eager").',
            )
        raise SourceUnsupported(
            f"The model hands {name!r} to attention; the implementation 'kvalign' does not know what it means.",
            'Select another attention implementation: model.set_attn_implementation("eager").',
        )
    if dropout:
        raise ConfigInvalid(f"Attention dropout {dropout} was asked for.", "Put the model into eval mode.")


def _on_tensors(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Any,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    causal: bool,
) -> Tensor:
    """Ordinary attention, [B, Q, QH, DV]."""
    if softcap is None and sink_logits is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, is_causal=causal)[0]
    mask = Mask.of(attention_mask, causal)
    visible = mask.visible
    if visible is None and causal and query.shape[2] > 1:
        slots = torch.arange(key.shape[2], device=query.device)
        visible = slots[None] <= slots[key.shape[2] - query.shape[2] :, None]
    found = reference.attend(
        query, key, value, visible, scaling=scaling, softcap=softcap, sink_logits=sink_logits, bias=mask.bias
    )
    return found.transpose(1, 2).contiguous()
