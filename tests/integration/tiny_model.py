"""A model of a few hundred weights, as a Hub repo would hold it. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


def write_model(folder: Path, **config: Any) -> Path:
    """A llama; config changes what its config.json says."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    width, vocabulary = LLAMA["hidden_size"], LLAMA["vocab_size"]
    layer = "model.layers.0"
    square = np.zeros((width, width), np.float32)
    names = [f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"]
    names += [f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    tensors = dict.fromkeys(names, square)
    norms = [f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight", "model.norm.weight"]
    tensors |= {name: np.ones(width, np.float32) for name in norms}
    tensors |= {
        name: np.zeros((vocabulary, width), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
