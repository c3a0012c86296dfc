"""Make the golden files of the current format: a codec, payloads, and what these must decode to for ever.

    PYTHONPATH=tests .venv/bin/python tests/golden/make.py

A released format never changes, so an existing folder is left alone; --again replaces one that was not released.
"""

import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from synthetic import CacheSource, fitted, fitted_to
from test_golden import MODEL_FOLDER, codec_of, decoded_tensors, stored_symbols
from transformers import LlamaConfig, LlamaForCausalLM

from kvalign.capture import CacheShape, load_model, run
from kvalign.codec import Codec
from kvalign.container import VERSION
from kvalign.geometry import Geometry, LayerGeometry
from kvalign.rope import NO_ROPE, Rope
from kvalign.watch import Watched

SHAPE = CacheShape(
    Geometry((LayerGeometry(2, 4, 4), LayerGeometry(1, 4, 2), LayerGeometry(1, 6, 2))),
    (Rope("half", torch.tensor([1.0, 0.1]), scaling=1.2), NO_ROPE, Rope("interleaved", torch.tensor([0.5, 0.05]))),
)


# 2 of whose 3 layers are recomputed.
MODEL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}


@click.command()
@click.option("--again", is_flag=True, help="Replace files that were not released.")
def main(again: bool) -> None:
    """Write tests/golden/format-VERSION and format-VERSION-recomputed."""
    plain = Path(__file__).parent / f"format-{VERSION}"
    recomputed = plain.with_name(f"{plain.name}-recomputed")
    for folder in (plain, recomputed):
        if folder.exists() and not again:
            raise click.ClickException(f"{folder} is there; a released format never changes.")
        shutil.rmtree(folder, ignore_errors=True)
    _make_plain(plain)
    _make_recomputed(recomputed)


def _make_plain(folder: Path) -> None:
    source = CacheSource(SHAPE)
    fitted(source, sink_tokens=1, recent_tokens=2).save(folder)
    codec = codec_of(folder)
    payloads = {}
    # Two rows, one padded on the left, in two blocks, whose tokens have steps of their own.
    batch = source.cache(140, paddings=(0, 9))
    mask = torch.ones(2, 140)
    mask[1, :9] = 0
    payloads["shifted"] = codec.encode(batch, step=0, attention_mask=mask, watched=_watched(batch))
    # A step so fine that symbols escape and send low bits raw, and one number far from all others.
    outlier = source.cache(20, seed=5, dtype=torch.float16)
    outlier.layers[1].values[0, 0, 9, 1] = 9000.0
    payloads["escaped"] = codec.encode(outlier, step=-40)
    # A block that coding does not shrink, in bfloat16.
    payloads["raw"] = codec.encode(source.cache(8, seed=6, dtype=torch.bfloat16), step=-400)
    # Sinks and recent tokens alone.
    payloads["verbatim"] = codec.encode(source.cache(3, seed=7))
    _write(folder, codec, payloads)


def _make_recomputed(folder: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder / MODEL_FOLDER)
    model = load_model(folder / MODEL_FOLDER)
    fitted_to(model, recomputed=2, sink_tokens=1, recent_tokens=2).save(folder)
    codec = codec_of(folder)
    ids = torch.randint(MODEL["vocab_size"], (2, 140), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 140, dtype=torch.int64)
    mask[1, :9] = 0
    with torch.no_grad(), codec.watch() as watched:
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        _, batch = run(codec._model, ids, attention_mask=mask, position_ids=positions)
    payloads = {
        "batch": codec.encode(batch, input_ids=ids, attention_mask=mask, watched=watched, step=codec.recommended),
        "raw": codec.encode(run(codec._model, ids[:1, :8])[1], input_ids=ids[:1, :8], step=-600),
    }
    _write(folder, codec, payloads)


def _write(folder: Path, codec: Codec, payloads: dict[str, bytes]) -> None:
    for name, data in payloads.items():
        (folder / f"{name}.kv").write_bytes(data)
        save_file(decoded_tensors(codec, data) | stored_symbols(codec, data), folder / f"{name}.safetensors")
    click.echo(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*.*')):,} bytes")


def _watched(cache: object) -> Watched:
    generator = torch.Generator().manual_seed(0)
    watched = Watched()
    for index, layer in enumerate(cache.layers):  # type: ignore[attr-defined]
        batch, heads, _, dim = layer.keys.shape
        watched.record(index, 3 * torch.randn(batch, heads, 32, dim, generator=generator), None)
    return watched


if __name__ == "__main__":
    main()
