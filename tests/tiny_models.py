"""Tiny random models of many families with a byte-level tokenizer, as folders that transformers loads.

Seeded, so that every run builds the same weights. Knows no test and nothing of kvalign.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as token_models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BOS, EOS = 256, 257
POSITIONS = 256

SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 258,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "initializer_range": 0.2,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_MAMBA: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}


def _rope(kind: str, **settings: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **settings}}


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

# name: (model type, settings). All but gpt2 and mamba have 4 query heads on 2 KV heads of 8 channels.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama_linear": ("llama", SHAPE | _rope("linear", factor=4.0)),
    "llama_llama3": ("llama", SHAPE | _rope("llama3", **_LLAMA3)),
    "llama_yarn": ("llama", SHAPE | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "qwen2": ("qwen2", SHAPE),
    "gpt2": ("gpt2", _GPT2),
    "phi": ("phi", SHAPE | {"partial_rotary_factor": 0.5}),
    "cohere": ("cohere", SHAPE),
    "smollm3": ("smollm3", SHAPE | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "mamba": ("mamba", _MAMBA),
}


def build(family: str) -> Any:
    """The model in memory, in float32."""
    model_type, settings = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(sum(family.encode()))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
        if family == "qwen2":
            for layer in model.model.layers:
                # As in the real ones: a few channels whose mean dwarfs their spread.
                torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=20.0)
    return model.eval().requires_grad_(False)


def save(family: str, folder: Path, *, adds_bos: bool = True) -> Path:
    """Weights, config and tokenizer in one folder, which is returned."""
    build(family).save_pretrained(folder)
    tokenizer(adds_bos=adds_bos).save_pretrained(folder)
    return folder


def tokenizer(*, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, then <s> and </s>; with or without <s> before every text."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(token_models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<s>", "</s>"])
    if adds_bos:
        plain.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="</s>")
