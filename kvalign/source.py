"""Checks of a model's files before anything loads them: config, weights, tokenizer.

Must not import torch, and knows neither the Hub nor a job: it reads through SourceFiles, which is a
folder here and a remote repo in the worker's preflight.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvalign.errors import SourceInvalid, SourceNotFound, SourceUnsupported, WeightsUnsafe
from kvalign.safetensors_header import (
    HEADER_LIMIT_BYTES,
    LENGTH_BYTES,
    TensorEntry,
    header_bytes,
    parse_header,
    parse_index,
)
from kvalign.support import check_architecture

CONFIG = "config.json"
SINGLE_WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

CONFIG_LIMIT_BYTES = 2_000_000
TOKENIZER_LIMIT_BYTES = 64_000_000
_HEADERS_LIMIT_BYTES = 4 * HEADER_LIMIT_BYTES


class SourceFiles(Protocol):
    """A model's files, wherever they lie."""

    def sizes(self) -> Mapping[str, int]:
        """Bytes of every file, by name relative to the model."""

    def read(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; fewer only at the end of the file."""


@dataclass(frozen=True)
class ModelSizes:
    """What config.json says of the model's shape; counts. `positions` is 2**31 where it gives no limit."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int = 2**31


@dataclass(frozen=True)
class WeightFacts:
    """What the headers say of the weights, nothing of them read.

    files         the safetensors files that hold them
    parameters    elements of floating tensors
    weight_bytes  size of those files
    """

    files: tuple[str, ...]
    parameters: int
    weight_bytes: int


def check_source(folder: Path) -> WeightFacts:
    """Check a local model folder; returns what its weight headers say.

    Raises SourceNotFound, SourceInvalid, SourceUnsupported or WeightsUnsafe, naming file and fact.
    Reads config.json and headers only: cost does not grow with the weights.
    """
    if not folder.is_dir():
        raise SourceNotFound(f"{folder} is not a folder.", "Give the folder that holds config.json and the weights.")
    files = FolderFiles(folder)
    config = read_config(files)
    check_architecture(config)
    sizes = model_sizes(config)
    names = find_weights(files)
    facts = check_weights(files, names, sizes)
    check_tokenizer(files)
    return facts


class FolderFiles:
    """SourceFiles of a local folder, its top level only: a model has no other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> Mapping[str, int]:
        return {path.name: path.stat().st_size for path in self._folder.iterdir() if path.is_file()}

    def read(self, name: str, start: int, length: int) -> bytes:
        with (self._folder / name).open("rb") as file:
            file.seek(start)
            return file.read(length)


def read_config(files: SourceFiles) -> dict[str, Any]:
    """config.json as plain data; raises SourceNotFound, or SourceInvalid when too large or no object."""
    size = files.sizes().get(CONFIG)
    if size is None:
        raise SourceNotFound("The model has no config.json.", "Give a transformers model.")
    if size > CONFIG_LIMIT_BYTES:
        raise SourceInvalid(f"{CONFIG} has {size} bytes; the limit is {CONFIG_LIMIT_BYTES}.", _ANOTHER_REVISION)
    try:
        config = json.loads(files.read(CONFIG, 0, size).decode())
    except (ValueError, RecursionError) as error:
        raise SourceInvalid(f"{CONFIG} is not sound JSON ({str(error)[:120]}).", _ANOTHER_REVISION) from None
    if not isinstance(config, dict):
        raise SourceInvalid(f"{CONFIG} is not a JSON object.", _ANOTHER_REVISION)
    return config


_ANOTHER_REVISION = "Correct the file, or choose another revision."


def model_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """The shape in config.json, bounded before anything is allocated by it; raises SourceInvalid."""
    layers = _size(config, ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 1024)
    hidden = _size(config, ("hidden_size", "n_embd", "d_model"), 131_072)
    query_heads = _size(config, ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), 4096)
    kv_heads = _size(config, ("num_key_value_heads", "num_kv_heads"), 4096, query_heads)
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        kv_heads = 1
    head_dim = _size(config, ("head_dim",), 4096, max(1, hidden // query_heads))
    vocabulary = _size(config, ("vocab_size",), 4_194_304)
    _size(config, ("intermediate_size", "n_inner", "ffn_dim"), 2**31, 1)
    if query_heads % kv_heads:
        raise SourceInvalid(
            f"{CONFIG} gives {query_heads} attention heads, not a multiple of {kv_heads} key-value heads.",
            _ANOTHER_REVISION,
        )
    positions = _size(config, ("max_position_embeddings", "n_positions"), 2**31, 2**31)
    return ModelSizes(layers, hidden, query_heads, kv_heads, head_dim, vocabulary, positions)


def _size(config: Mapping[str, Any], names: tuple[str, ...], limit: int, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= limit:
            raise SourceInvalid(
                f"{CONFIG} gives {name} = {str(value)[:40]}; it must be a whole number from 1 to {limit}.",
                _ANOTHER_REVISION,
            )
        return value
    if default is None:
        raise SourceInvalid(f"{CONFIG} does not give {names[0]}.", _ANOTHER_REVISION)
    return default


def find_weights(files: SourceFiles) -> dict[str, str] | None:
    """Where the weights lie: the weight map of an index, or None for one model.safetensors.

    Chooses as transformers does: the single file first. Raises WeightsUnsafe when only pickles are there,
    SourceUnsupported for other formats and adapters, SourceInvalid for none or a bad index.
    """
    sizes = files.sizes()
    if "adapter_config.json" in sizes:
        raise SourceUnsupported(
            "This is an adapter (adapter_config.json), not a whole model.",
            "Merge it into its base model first.",
        )
    if SINGLE_WEIGHTS in sizes:
        return None
    if WEIGHTS_INDEX in sizes:
        size = sizes[WEIGHTS_INDEX]
        raw = files.read(WEIGHTS_INDEX, 0, min(size, HEADER_LIMIT_BYTES + 1))
        return parse_index(raw, WEIGHTS_INDEX, sizes.keys())
    for suffixes, error, what in _OTHER_FORMATS:
        found = sorted(name for name in sizes if name.endswith(suffixes))
        if found:
            raise error(f"{what}: {', '.join(found[:3])}.", _SAVE_AS_SAFETENSORS)
    raise SourceInvalid(f"There is neither {SINGLE_WEIGHTS} nor {WEIGHTS_INDEX}.", _SAVE_AS_SAFETENSORS)


_SAVE_AS_SAFETENSORS = "Choose a revision with safetensors weights, or save the model as safetensors."
_OTHER_FORMATS: tuple[tuple[tuple[str, ...], Callable[[str, str], Exception], str], ...] = (
    (
        (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"),
        WeightsUnsafe,
        "The weights are pickles only, which can run code on loading",
    ),
    ((".gguf",), SourceUnsupported, "The weights are in GGUF only"),
    (
        (".h5", ".msgpack", ".onnx"),
        SourceUnsupported,
        "The weights are in a format that kvalign does not read",
    ),
)


def check_weights(files: SourceFiles, weight_map: Mapping[str, str] | None, sizes: ModelSizes) -> WeightFacts:
    """Check every weight header against its file, the index and config.json.

    Raises SourceInvalid for damage or contradiction, SourceUnsupported for quantized weights.
    """
    names = sorted({*weight_map.values()}) if weight_map is not None else [SINGLE_WEIGHTS]
    tensors: dict[str, TensorEntry] = {}
    headers_bytes = 0
    for name in names:
        found, size = read_header(files, name)
        headers_bytes += size
        if headers_bytes > _HEADERS_LIMIT_BYTES:
            raise SourceInvalid(
                f"The headers of the weight files exceed {_HEADERS_LIMIT_BYTES} bytes together.", _ANOTHER_REVISION
            )
        entries = {entry.name: entry for entry in found}
        _check_placement(entries, name, weight_map)
        tensors.update(entries)
    _check_dtypes(tensors.values())
    _check_against_config(tensors, sizes)
    parameters = sum(entry.elements for entry in tensors.values() if entry.dtype in _FLOATING)
    return WeightFacts(tuple(names), parameters, sum(files.sizes()[name] for name in names))


def read_header(files: SourceFiles, name: str) -> tuple[list[TensorEntry], int]:
    """The tensors of one safetensors file, and the bytes of its header; reads nothing else."""
    file_bytes = files.sizes()[name]
    start = files.read(name, 0, min(file_bytes, _FIRST_READ_BYTES))
    wanted = LENGTH_BYTES + header_bytes(start, name, file_bytes)
    if wanted > len(start):
        start += files.read(name, len(start), wanted - len(start))
    if len(start) < wanted:
        raise SourceInvalid(f"{name} ends within its header.", _ANOTHER_REVISION)
    return parse_header(start[LENGTH_BYTES:wanted], name, file_bytes), wanted


_FIRST_READ_BYTES = 131_072  # holds most headers whole: one request where reading is remote


def _check_placement(entries: Mapping[str, TensorEntry], file: str, weight_map: Mapping[str, str] | None) -> None:
    if weight_map is None:
        return
    promised = {tensor for tensor, shard in weight_map.items() if shard == file}
    if odd := sorted(promised ^ entries.keys()):
        where = "the index places there" if odd[0] in promised else "the index does not place there"
        fact = "lacks" if odd[0] in promised else "holds"
        raise SourceInvalid(f"{file} {fact} tensor {odd[0]}, which {where}.", _ANOTHER_REVISION)


_FLOATING = {"F16", "BF16", "F32", "F64"}
_MASK_DTYPES = {"BOOL", "U8", "I64"}
_MASKS = ("bias", "masked_bias", "position_ids")  # old checkpoints store causal masks under these names


def _check_dtypes(tensors: Iterable[TensorEntry]) -> None:
    for entry in tensors:
        is_mask = entry.dtype in _MASK_DTYPES and entry.name.rpartition(".")[2] in _MASKS
        if entry.dtype not in _FLOATING and not is_mask:
            raise SourceUnsupported(
                f"Tensor {entry.name} is stored as {entry.dtype}: the weights are already quantized.",
                "Choose the original model in 16 or 32 bits.",
            )


def _check_against_config(tensors: Mapping[str, TensorEntry], sizes: ModelSizes) -> None:
    layers = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    if layers and max(layers) + 1 < sizes.layers:
        raise SourceInvalid(
            f"{CONFIG} promises {sizes.layers} layers; the weights hold {max(layers) + 1}.", _ANOTHER_REVISION
        )
    for name, entry in tensors.items():
        if name.endswith(_EMBEDDINGS) and entry.shape[:1] != (sizes.vocabulary,):
            raise SourceInvalid(
                f"{CONFIG} promises {sizes.vocabulary} tokens; {name} has shape {list(entry.shape)}.",
                _ANOTHER_REVISION,
            )


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


def check_tokenizer(files: SourceFiles) -> None:
    """A tokenizer must be there, of bounded size; loading judges its content. Raises SourceInvalid."""
    sizes = files.sizes()
    if not any(all(name in sizes for name in kind) for kind in _TOKENIZERS):
        raise SourceInvalid(
            "The model has no tokenizer (tokenizer.json, tokenizer.model, or vocab.json with merges.txt).",
            "Add the tokenizer's files to the model.",
        )
    for name in {name for kind in _TOKENIZERS for name in kind} | {
        "tokenizer_config.json",
        "added_tokens.json",
    }:
        if sizes.get(name, 0) > TOKENIZER_LIMIT_BYTES:
            raise SourceInvalid(
                f"{name} has {sizes[name]} bytes; the limit is {TOKENIZER_LIMIT_BYTES}.", _ANOTHER_REVISION
            )


_TOKENIZERS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("vocab.txt",),
)
