"""The tiny models as Hub repos hold them, and damaged ones made of them. Knows no service and no test."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tiny_models import save
from torch import Tensor

MODELS = ("llama", "qwen2", "gpt2")  # grouped query heads; a bias on keys; no rotary positions
LICENCE = "apache-2.0"
_CARD = f"---\nlicense: {LICENCE}\nlanguage: en\n---\n# A tiny model\n"


def write_model(name: str, folder: Path) -> Path:
    """One of MODELS with a card, a licence, and files that no worker may fetch."""
    save(name, folder)
    (folder / "README.md").write_text(_CARD)
    (folder / "LICENSE").write_text("Do good.\n")
    (folder / "pytorch_model.bin").write_bytes(b"never to be opened")
    (folder / "modeling_surprise.py").write_text("raise SystemExit('this code must not run')\n")
    return folder


def damaged(sound: Path, damage: Callable[[Path], None], folder: Path) -> Path:
    """A copy of a llama's folder with one of the changes below."""
    shutil.copytree(sound, folder)
    damage(folder)
    return folder


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remote_code(folder: Path) -> None:
    _configure(
        folder,
        model_type="surprise",
        architectures=["SurpriseForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_surprise.SurpriseForCausalLM"},
    )


def encoder(folder: Path) -> None:
    _configure(folder, model_type="bert", architectures=["BertForMaskedLM"])


def recurrent(folder: Path) -> None:
    _configure(folder, model_type="mamba", architectures=["MambaForCausalLM"])


def broken_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def truncated_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) * 2 // 3])


def missing_layer(folder: Path) -> None:
    _reweigh(folder, lambda weights: {name: weight for name, weight in weights.items() if ".layers.1." not in name})


def missing_tensor(folder: Path) -> None:
    _reweigh(folder, lambda weights: {name: weight for name, weight in weights.items() if name != "model.norm.weight"})


def not_a_number(folder: Path) -> None:
    def spoil(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        spoiled = weights["model.layers.1.mlp.up_proj.weight"].clone()
        spoiled[3, 5] = float("nan")
        return {**weights, "model.layers.1.mlp.up_proj.weight": spoiled}

    _reweigh(folder, spoil)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Nonsense"}}')


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _reweigh(folder: Path, change: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
