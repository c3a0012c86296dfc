"""The weight index of a repo whose weights are one file: keeps other engines from taking the codec for weights.

An engine without an index loads every *.safetensors it finds. Knows headers, not tensors.
"""

import json
from pathlib import Path

from safetensors import safe_open

INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"


def write_weight_index(source_dir: Path, out_dir: Path) -> None:
    """Write an index to out_dir that names the weights of source_dir/model.safetensors; nothing when it has its own."""
    weights = source_dir / _SINGLE_NAME
    if not weights.is_file() or (source_dir / INDEX_NAME).exists():
        return
    with safe_open(weights, "pt") as file:
        names = sorted(file.keys())
    index = {"metadata": {"total_size": weights.stat().st_size}, "weight_map": dict.fromkeys(names, _SINGLE_NAME)}
    (out_dir / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
