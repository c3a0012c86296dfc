"""Tiny random models of many families, and resident plans measured on them. Knows no test.

Weights are large (deviation 0.2), so that attention is far from uniform and a fault in it shows in the logits.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from kvalign.capture import cache_argument
from kvalign.resident.cache import IMPLEMENTATION, ResidentCache
from kvalign.resident.fit import fit_codebook
from kvalign.resident.plan import GroupPlan, LayerPlan, ResidentPlan, SidePlan

WINDOW = 64
_MEASURED_TOKENS = 160
_SHAPE: dict[str, Any] = tiny_models.SHAPE | {"head_dim": 8, "max_position_embeddings": 1024}
_FOUR = _SHAPE | {"num_hidden_layers": 4}
_SLIDING_AND_FULL = _FOUR | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
# Every token goes to every expert: a choice between experts would make logits jump at the least difference.
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_GPT2 = {
    "vocab_size": 258,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_FALCON = {
    "vocab_size": 258,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "alibi": False,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_OPT = {
    "vocab_size": 258,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "word_embed_proj_dim": 32,
    "init_std": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 1,
}
_LATENT = _SHAPE | {
    "num_key_value_heads": 4,
    "head_dim": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

# name: (model type, settings)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SHAPE),
    "qwen2": ("qwen2", _SHAPE),
    "qwen3": ("qwen3", _SHAPE),
    "gemma2": ("gemma2", _SLIDING_AND_FULL | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", _SLIDING_AND_FULL),
    "gpt_oss": ("gpt_oss", _SLIDING_AND_FULL | _EXPERTS | {"rope_parameters": _YARN}),
    "phi3": ("phi3", _SHAPE),
    "mistral": ("mistral", _SHAPE | {"sliding_window": None}),
    "gpt_neox": ("gpt_neox", _SHAPE),
    "opt": ("opt", _OPT),
    "gpt2": ("gpt2", _GPT2),
    "qwen3_next": ("qwen3_next", _FOUR | _LINEAR),
    "smollm3": ("smollm3", _FOUR | {"no_rope_layer_interval": 2}),
    "cohere2": ("cohere2", _SLIDING_AND_FULL),
    "falcon": ("falcon", _FALCON),
    "deepseek_v3": ("deepseek_v3", _LATENT),
}
# Their attention is their own code, or takes apart what the cache hands over.
DENSE_ONLY = ("falcon", "deepseek_v3")


def fresh(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A new model, which a test may change."""
    model_type, usual = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(usual | settings)))
        if family == "gpt_oss":
            for layer in model.model.layers:
                # Learned sinks that take a good part of the weight.
                torch.nn.init.normal_(layer.self_attn.sinks, mean=2.0)
    return model.to(dtype).eval().requires_grad_(False)


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model, one for all tests; they must leave it as it was."""
    return fresh(family, dtype=dtype)


@cache
def plan_of(family: str, dtype: torch.dtype = torch.float32, *, width: int = 8, joint: bool = True) -> ResidentPlan:
    """A plan for model_of(family, dtype)."""
    return measured_plan(model_of(family, dtype), width=width, joint=joint)


def random_ids(rows: int, tokens: int, seed: int = 1) -> Tensor:
    """[rows, tokens] int64, without the special ones."""
    return torch.randint(2, 256, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def measured_plan(
    model: Any, *, width: int = 8, joint: bool = True, sink_tokens: int = 4, recent_tokens: int = 16
) -> ResidentPlan:
    """A plan in which nothing is dropped: every coefficient of a random rotation has `width` bits.

    Means, deviations and codebooks are measured on random tokens, keys and values where the cache holds them.
    """
    held = DynamicCache(config=model.config)
    model(random_ids(4, _MEASURED_TOKENS, seed=99), **{cache_argument(model): held}, use_cache=True)
    layers = {
        index: _layer_plan(layer.keys, layer.values, width, joint, index)
        for index, layer in enumerate(held.layers)
        if type(layer) is DynamicLayer
    }
    return ResidentPlan(float(width), "joint" if joint else "head", layers, sink_tokens, recent_tokens)


@contextmanager
def attention(model: Any, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """The model with another attention implementation for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def feed(model: Any, held: Any, ids: Tensor, chunks: Sequence[int], mask: Tensor | None = None) -> Tensor:
    """Logits [B, sum(chunks), vocab] of the next tokens of `ids`, in float32.

    ids   [B, T], tokens that are held already included
    mask  [B, T], zero where there is padding; positions count from behind it
    """
    seen = held.get_seq_length()
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    takes_positions = model.config.model_type != "opt"  # which counts the mask itself
    found = []
    for count in chunks:
        span = slice(seen, seen + count)
        own = {"position_ids": positions[:, span]} if takes_positions else {}
        given = {cache_argument(model): held, "attention_mask": mask[:, : span.stop], "use_cache": True}
        found.append(model(ids[:, span], **given, **own).logits.float())
        seen += count
    return torch.cat(found, dim=1)


def twin(held: ResidentCache, model: Any) -> ResidentCache:
    """A copy that shares nothing but the model's config and its plan."""
    plans = {id(layer.state.plan): layer.state.plan for layer in held.coded_layers().values()}
    config = model.config.get_text_config(decoder=True)
    return copy.deepcopy(held, {id(config): config, **plans})


def relative(a: Tensor, b: Tensor, where: Tensor | None = None) -> float:
    """Largest difference of logits over the deviation of b, over rows and tokens `where` is not zero."""
    if where is not None:
        a, b = a[where.bool()], b[where.bool()]
    return float((a - b).abs().max() / b.std())


def spread(a: Tensor, b: Tensor) -> float:
    """Root of the mean squared difference of logits over the deviation of b."""
    return float((a - b).square().mean().sqrt() / b.std())


def _layer_plan(keys: Tensor, values: Tensor, width: int, joint: bool, seed: int) -> LayerPlan:
    heads = keys.shape[1]
    spans = [(0, heads)] if joint else [(head, head + 1) for head in range(heads)]
    generator = torch.Generator().manual_seed(seed)
    groups = tuple(
        GroupPlan(first, end, *(_side_plan(x[:, first:end].float(), width, generator) for x in (keys, values)))
        for first, end in spans
    )
    return LayerPlan(heads, keys.shape[3], values.shape[3], groups)


def _side_plan(x: Tensor, width: int, generator: torch.Generator) -> SidePlan:
    """x [B, H, T, D] measured keys or values of a group of heads."""
    tokens = x.transpose(1, 2).flatten(2).flatten(0, 1)  # [B T, P]
    mean = tokens.mean(0)
    rotation = torch.linalg.qr(torch.randn(tokens.shape[1], tokens.shape[1], generator=generator))[0]
    rotated = (tokens - mean) @ rotation
    deviation = rotated.std(0).clamp_min(1e-6)
    energy = deviation.square() / deviation.square().sum()
    z = rotated / deviation
    scale = (z.square() * energy).sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    sample = (z / scale).double().flatten().sort().values
    return SidePlan(
        mean=mean,
        analysis=(rotation / deviation).contiguous(),
        synthesis=(rotation * deviation).T.contiguous(),
        energy=energy,
        widths=(width,) * tokens.shape[1],
        books={width: fit_codebook(sample, width)},
    )
