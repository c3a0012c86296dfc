"""The index that layout `full` adds beside a single weight file."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvalign.weight_index import INDEX_NAME, write_weight_index


def test_names_every_weight_and_nothing_else(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    save_file({"b": torch.zeros(2), "a": torch.zeros(3)}, source / "model.safetensors")
    write_weight_index(source, out)
    index = json.loads((out / INDEX_NAME).read_text())
    assert index["weight_map"] == {"a": "model.safetensors", "b": "model.safetensors"}
    assert index["metadata"]["total_size"] == (source / "model.safetensors").stat().st_size


def test_leaves_an_index_of_the_source_alone(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    save_file({"a": torch.zeros(3)}, source / "model.safetensors")
    (source / INDEX_NAME).write_text("{}")
    write_weight_index(source, out)
    assert not (out / INDEX_NAME).exists()
