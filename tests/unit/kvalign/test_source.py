"""Checks of local model folders: a sound one, and every way we know for one to be bad."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from kvalign.errors import KvalignError, SourceInvalid, SourceNotFound, SourceUnsupported, WeightsUnsafe
from kvalign.safetensors_header import HEADER_LIMIT_BYTES, header_bytes, parse_header, parse_index
from kvalign.source import CONFIG_LIMIT_BYTES, TOKENIZER_LIMIT_BYTES, check_source, model_sizes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 16,
}
WEIGHTS = {
    "model.embed_tokens.weight": np.zeros((16, 8), np.float32),
    "model.layers.0.self_attn.k_proj.weight": np.zeros((4, 8), np.float16),
    "model.layers.1.self_attn.k_proj.weight": np.zeros((4, 8), np.float16),
}
PARAMETERS = 16 * 8 + 2 * 4 * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model folder of one weight file."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    save_file(WEIGHTS, model / "model.safetensors", metadata={"format": "pt"})
    return model


def shard(folder: Path) -> dict[str, str]:
    """Turn the single weight file into two shards with an index; returns the weight map."""
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((list(WEIGHTS)[:1], list(WEIGHTS)[1:]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: WEIGHTS[name] for name in names}, folder / file)
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_weights(folder: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def set_config(**changes: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))

    return write


def test_a_sound_folder_passes(folder: Path) -> None:
    facts = check_source(folder)
    assert facts.files == ("model.safetensors",)
    assert facts.parameters == PARAMETERS
    assert facts.weight_bytes == (folder / "model.safetensors").stat().st_size


def test_a_sound_sharded_folder_passes(folder: Path) -> None:
    shard(folder)
    facts = check_source(folder)
    assert len(facts.files) == 2
    assert facts.parameters == PARAMETERS


def test_links_into_a_download_cache_pass(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert check_source(linked).parameters == PARAMETERS


def test_causal_masks_of_old_checkpoints_pass(folder: Path) -> None:
    masks = {"model.layers.0.attn.bias": np.ones((1, 1, 4, 4), np.bool_)}
    save_file(WEIGHTS | masks, folder / "model.safetensors")
    assert check_source(folder).parameters == PARAMETERS


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_dim"),
    [
        (CONFIG, 2, 2),
        (CONFIG | {"head_dim": 128}, 2, 128),
        (CONFIG | {"num_key_value_heads": None}, 4, 2),
        ({"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257, "n_inner": None}, 12, 64),
        (CONFIG | {"num_key_value_heads": None, "num_kv_heads": 4, "multi_query": True}, 1, 2),
        (CONFIG | {"multi_query": True, "new_decoder_architecture": True}, 2, 2),
        ({"num_layers": 4, "d_model": 64, "attention_heads": 4, "vocab_size": 99}, 4, 16),
    ],
)
def test_sizes_under_every_spelling(config: dict[str, Any], kv_heads: int, head_dim: int) -> None:
    sizes = model_sizes(config)
    assert (sizes.kv_heads, sizes.head_dim) == (kv_heads, head_dim)


def test_a_header_larger_than_the_first_read_passes(folder: Path) -> None:
    save_file(WEIGHTS, folder / "model.safetensors", metadata={"note": "x" * 300_000})
    assert check_source(folder).parameters == PARAMETERS


@pytest.mark.parametrize(
    ("spoil", "error", "named"),
    [
        (lambda f: (f / "config.json").unlink(), SourceNotFound, "config.json"),
        (lambda f: (f / "config.json").write_text("{"), SourceInvalid, "not sound JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe"), SourceInvalid, "not sound JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), SourceInvalid, "not sound JSON"),
        (lambda f: (f / "config.json").write_text("[]"), SourceInvalid, "not a JSON object"),
        (
            lambda f: os.truncate(f / "config.json", CONFIG_LIMIT_BYTES + 1),
            SourceInvalid,
            "the limit is 2000000",
        ),
        (set_config(num_hidden_layers=1_000_000), SourceInvalid, "num_hidden_layers = 1000000"),
        (set_config(num_hidden_layers=0), SourceInvalid, "num_hidden_layers = 0"),
        (set_config(num_hidden_layers=True), SourceInvalid, "num_hidden_layers = True"),
        (set_config(num_hidden_layers=None), SourceInvalid, "does not give num_hidden_layers"),
        (set_config(vocab_size=10**12), SourceInvalid, "vocab_size"),
        (set_config(hidden_size="8"), SourceInvalid, "hidden_size"),
        (set_config(head_dim=-1), SourceInvalid, "head_dim"),
        (set_config(max_position_embeddings=2**40), SourceInvalid, "max_position_embeddings"),
        (set_config(num_key_value_heads=3), SourceInvalid, "4 attention heads"),
        (set_config(num_hidden_layers=3), SourceInvalid, "promises 3 layers; the weights hold 2"),
        (set_config(vocab_size=17), SourceInvalid, "promises 17 tokens"),
        (set_config(model_type="t5"), SourceUnsupported, "t5"),
        (set_config(model_type="own", auto_map={"AutoModel": "x.Y"}), SourceUnsupported, "auto_map"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), SourceUnsupported, "adapter"),
        (lambda f: (f / "model.safetensors").unlink(), SourceInvalid, "neither model.safetensors"),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            WeightsUnsafe,
            "pickles only.*pytorch_model.bin",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "model.gguf"), SourceUnsupported, "GGUF"),
        (lambda f: (f / "model.safetensors").rename(f / "tf_model.h5"), SourceUnsupported, "does not read"),
        (lambda f: (f / "tokenizer.json").unlink(), SourceInvalid, "no tokenizer"),
        (
            lambda f: os.truncate(f / "tokenizer.json", TOKENIZER_LIMIT_BYTES + 1),
            SourceInvalid,
            "tokenizer.json has",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 600), SourceInvalid, "is truncated"),
        (lambda f: os.truncate(f / "model.safetensors", 5), SourceInvalid, "holds 5 bytes"),
        (lambda f: os.truncate(f / "model.safetensors", 2000), SourceInvalid, "longer than its header says"),
        (
            lambda f: (f / "model.safetensors").write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
            ),
            SourceInvalid,
            "Git LFS pointer",
        ),
    ],
)
def test_refuses(folder: Path, spoil: Callable[[Path], Any], error: type[KvalignError], named: str) -> None:
    spoil(folder)
    with pytest.raises(error, match=named) as caught:
        check_source(folder)
    assert caught.value.remedy


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="is not a folder"):
        check_source(tmp_path / "nothing")


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"\x00", "not sound JSON"),
        (b"{" * 1000, "not sound JSON"),
        (b'{"a":' * 199_000, "not sound JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a":[' + b"[]," * 500_000 + b"[]]}", "more than 200000 tensors"),
        (b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "key appears twice"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"__metadata__": []}, "__metadata__"),
        ({"../a": entry()}, "names a tensor"),
        ({"a\n": entry()}, "names a tensor"),
        ({"": entry()}, "names a tensor"),
        ({"a": [1]}, "without dtype"),
        ({"a": entry(extra=1)}, "without dtype"),
        ({"a": entry(dtype="F7")}, "unknown dtype"),
        ({"a": entry(dtype=["F32"])}, "unknown dtype"),
        ({"a": entry(shape=[-2])}, "the shape"),
        ({"a": entry(shape=[True, 2])}, "the shape"),
        ({"a": entry(shape=[2.0])}, "the shape"),
        ({"a": entry(shape=[1] * 9 + [2])}, "the shape"),
        ({"a": entry(shape=[2**64])}, "the shape"),
        ({"a": entry(shape=[2**40, 2**40])}, "bytes for shape"),
        ({"a": entry(data_offsets=[8, 0])}, "bytes for shape"),
        ({"a": entry(data_offsets=[0])}, "the offsets"),
        ({"a": entry(data_offsets=[-8, 0])}, "the offsets"),
        ({"a": entry(data_offsets=[8, 16])}, "begins at byte 8"),
        ({"a": entry(), "b": entry()}, "begins at byte 0, where byte 8"),
        ({"a": entry(), "b": entry(data_offsets=[12, 20])}, "begins at byte 12"),
        ({"a": entry(shape=[4], data_offsets=[0, 16])}, "is truncated"),
        ({}, "longer than its header says"),
    ],
)
def test_refuses_a_header(folder: Path, header: Any, named: str) -> None:
    write_weights(folder, header, b"\0" * 8)
    with pytest.raises(SourceInvalid, match=named):
        check_source(folder)


def test_refuses_a_header_length_over_the_limit(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((HEADER_LIMIT_BYTES + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(SourceInvalid, match="the limit is 25000000"):
        check_source(folder)


@pytest.mark.parametrize(("dtype", "name"), [("I8", "q.weight"), ("U8", "q.weight"), ("F8_E4M3", "q.bias")])
def test_refuses_quantized_weights(folder: Path, dtype: str, name: str) -> None:
    write_weights(folder, {name: entry(dtype=dtype, shape=[8])}, b"\0" * 8)
    with pytest.raises(SourceUnsupported, match=f"{name} is stored as {dtype}"):
        check_source(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "model.bin",
        "a\n.safetensors",
        "",
        7,
        None,
    ],
)
def test_refuses_an_index_entry_that_is_not_a_plain_name(folder: Path, name: Any) -> None:
    write_index(folder, shard(folder) | {"model.layers.0.self_attn.k_proj.weight": name})
    with pytest.raises(SourceInvalid, match="not a plain safetensors file name"):
        check_source(folder)


@pytest.mark.parametrize("weight_map", [{}, [], None, "model.safetensors"])
def test_refuses_an_index_without_a_weight_map(folder: Path, weight_map: Any) -> None:
    shard(folder)
    write_index(folder, weight_map)
    with pytest.raises(SourceInvalid, match="has no weight_map"):
        check_source(folder)


def test_refuses_an_index_of_too_many_files(folder: Path) -> None:
    shard(folder)
    write_index(folder, {f"t{number}": f"m{number}.safetensors" for number in range(501)})
    with pytest.raises(SourceInvalid, match="501 tensors in 501 files; the limits are"):
        check_source(folder)


def test_refuses_headers_that_are_too_large_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(folder)
    monkeypatch.setattr("kvalign.source._HEADERS_LIMIT_BYTES", 200)
    with pytest.raises(SourceInvalid, match="exceed 200 bytes together"):
        check_source(folder)


def test_refuses_a_shard_that_is_not_there(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SourceInvalid, match="which is not there"):
        check_source(folder)


def test_refuses_an_index_that_contradicts_its_shards(folder: Path) -> None:
    weight_map = shard(folder)
    first = next(iter(weight_map))
    write_index(folder, weight_map | {first: "model-00002-of-00002.safetensors"})
    with pytest.raises(SourceInvalid, match=f"{first}, which the index"):
        check_source(folder)


@given(st.binary(max_size=200), st.integers(0, 400))
@example(save({"a": np.zeros(3, np.float32)}), 80)
def test_random_bytes_raise_only_our_errors(raw: bytes, file_bytes: int) -> None:
    try:
        size = header_bytes(raw, "w.safetensors", file_bytes)
        parse_header(raw[8 : 8 + size], "w.safetensors", file_bytes)
    except SourceInvalid:
        pass


_TEXT = st.text("ab./\0\né", max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)
_ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F4", "?"]) | _JSON, "shape": _JSON, "data_offsets": _JSON}
)


@given(st.dictionaries(st.sampled_from(["a", "b.c", "__metadata__"]), _JSON | _ENTRY), st.integers(0, 400))
def test_random_headers_raise_only_our_errors(header: Any, file_bytes: int) -> None:
    with contextlib.suppress(SourceInvalid):
        parse_header(json.dumps(header).encode(), "w.safetensors", file_bytes)


@given(_JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(_TEXT, _JSON)}))
def test_random_indexes_raise_only_our_errors(index: Any) -> None:
    with contextlib.suppress(SourceInvalid):
        parse_index(json.dumps(index).encode(), "i.json", {"a.safetensors"})


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_.]{1,12}", fullmatch=True),
        st.tuples(st.sampled_from([np.float16, np.float32, np.float64]), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
def test_every_file_that_safetensors_writes_is_read(tensors: dict[str, Any]) -> None:
    arrays = {name: np.zeros(shape, dtype) for name, (dtype, shape) in tensors.items()}
    raw = save(arrays)
    size = header_bytes(raw, "w.safetensors", len(raw))
    entries = parse_header(raw[8 : 8 + size], "w.safetensors", len(raw))
    assert {entry.name: entry.shape for entry in entries} == {name: array.shape for name, array in arrays.items()}
    assert sum(entry.elements for entry in entries) == sum(array.size for array in arrays.values())


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_flipped_byte_in_a_header_is_refused_or_harmless(position: int, flip: int) -> None:
    raw = bytearray(save({"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float16)}))
    raw[position % len(raw)] ^= flip
    try:
        size = header_bytes(bytes(raw), "w.safetensors", len(raw))
        entries = parse_header(bytes(raw[8 : 8 + size]), "w.safetensors", len(raw))
    except SourceInvalid:
        return
    assert sum(entry.elements for entry in entries) <= len(raw)
