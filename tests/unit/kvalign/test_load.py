"""Loading converted folders of either layout, and generating from decoded caches."""

import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from synthetic import CacheSource, fitted, fitted_to

from kvalign.accounting import raw_bytes
from kvalign.artifact import Artifact, BaseModel
from kvalign.capture import measure_shape, run
from kvalign.codec import Codec
from kvalign.errors import ArtifactInvalid, ConfigInvalid, HubUnavailable, SourceNotFound
from kvalign.generation import continue_prompt, prompt_tokens
from kvalign.load import describe, fetch, load

Folders = Callable[[str], Path]

PROMPT = "the shape of what was read stays with the reader; " * 2


@pytest.fixture(scope="module")
def artifact_of_llama(tiny_folder: Folders, tiny_model: Callable[[str], Any]) -> Artifact:
    """A codec of the tiny llama's shape, on made-up statistics; at a very fine step it stores blocks raw."""
    artifact = fitted(CacheSource(measure_shape(tiny_model("llama"))))
    return replace(artifact, base=BaseModel.of(tiny_folder("llama"), repo="org/llama", commit="c" * 40))


@pytest.fixture
def full(artifact_of_llama: Artifact, tiny_folder: Folders, tmp_path: Path) -> Path:
    """Layout full: base weights and codec in one folder."""
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "full"))
    artifact_of_llama.save(folder)
    return folder


@pytest.fixture
def bare(artifact_of_llama: Artifact, tmp_path: Path) -> Path:
    """Layout codec: the codec alone."""
    artifact_of_llama.save(tmp_path / "bare")
    return tmp_path / "bare"


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_layout_full_loads_from_one_folder(full: Path, artifact_of_llama: Artifact) -> None:
    model, tokenizer, codec = load(full)
    assert codec.codec_id == artifact_of_llama.codec_id
    assert tokenizer("a")["input_ids"][0] == tiny_models.BOS
    with torch.no_grad():
        _, cache = run(model, prompt_tokens(tokenizer, PROMPT))
    assert codec.decode_dense(codec.encode(cache)).get_seq_length() == cache.get_seq_length()


def test_a_codec_that_recomputes_layers_is_loaded_with_its_model(
    tiny_folder: Folders, tiny_model: Callable[[str], Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "full"))
    base = BaseModel.of(folder, repo="org/llama", commit="c" * 40)
    replace(fitted_to(tiny_model("llama")), base=base).save(folder)
    model, tokenizer, codec = load(folder)
    ids = prompt_tokens(tokenizer, PROMPT)
    with torch.no_grad(), codec.watch() as watched:
        _, cache = run(model, ids)
    data = codec.encode(cache, input_ids=ids, watched=watched)
    assert codec.decode_dense(data).get_seq_length() == ids.shape[1]
    assert continue_prompt(model, tokenizer, codec, PROMPT, max_new_tokens=2, step=-20).text is not None


def test_layout_codec_loads_with_its_base(bare: Path, tiny_folder: Folders) -> None:
    model, _, _ = load(bare, base=tiny_folder("llama"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_another_base_is_refused(bare: Path, full: Path, tiny_folder: Folders) -> None:
    with pytest.raises(ArtifactInvalid, match="not the one of org/llama at cccccccccccc"):
        load(bare, base=tiny_folder("qwen2"))
    with (full / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(ArtifactInvalid, match="another size"):
        load(full)


def test_a_folder_that_was_not_converted_is_refused(tiny_folder: Folders) -> None:
    with pytest.raises(ArtifactInvalid, match=r"holds no kvalign_config\.json"):
        load(tiny_folder("llama"))


def test_a_generation_config_of_another_cache_is_overruled(full: Path) -> None:
    settings = (full / "generation_config.json").read_text()
    (full / "generation_config.json").write_text(settings.replace("{", '{\n  "cache_implementation": "static",', 1))
    model, tokenizer, codec = load(full)
    assert continue_prompt(model, tokenizer, codec, PROMPT, max_new_tokens=2).text_uncompressed is not None


def test_names_that_are_no_folder_are_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(HubUnavailable, match="org/nowhere"):
        fetch("org/nowhere", endpoint=closed_port())
    with pytest.raises(SourceNotFound, match="neither a local folder nor a Hub repo"):
        fetch("no such//name", endpoint=closed_port())


def test_describe_reads_the_config_alone(bare: Path) -> None:
    config, folder = describe(bare)
    assert folder == bare
    assert config["base"]["repo"] == "org/llama"
    (bare / "kvalign_codec.safetensors").unlink()
    assert describe(bare)[0] == config


# ---- generation


@pytest.fixture(scope="module")
def codec(artifact_of_llama: Artifact) -> Codec:
    return artifact_of_llama.codec()


def test_a_cache_that_lost_nothing_goes_on_the_same(tiny_model: Callable[[str], Any], codec: Codec) -> None:
    """Raw blocks in 16 bit: the greedy continuation of a tiny model is that of the uncompressed cache."""
    tokenizer = tiny_models.tokenizer()
    found = continue_prompt(tiny_model("llama"), tokenizer, codec, PROMPT, max_new_tokens=8, step=-600)
    assert found.text == found.text_uncompressed
    assert found.prompt_tokens == 1 + len(PROMPT)
    assert found.cache_ratio == pytest.approx(1, abs=0.02)
    assert found.sizes.total > raw_bytes(codec.shape.geometry, len(PROMPT))


def test_the_uncompressed_continuation_is_the_models_own(tiny_model: Callable[[str], Any], codec: Codec) -> None:
    model, tokenizer = tiny_model("llama"), tiny_models.tokenizer()
    found = continue_prompt(model, tokenizer, codec, PROMPT, max_new_tokens=8)
    tokens = prompt_tokens(tokenizer, PROMPT)
    plain = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    assert found.text_uncompressed == tokenizer.decode(plain[0, tokens.shape[1] :], skip_special_tokens=True)


def test_a_coarse_cache_goes_on_differently(tiny_model: Callable[[str], Any], codec: Codec) -> None:
    """That the cases above can fail, and that generation reads the decoded cache."""
    tokenizer = tiny_models.tokenizer()
    texts = {
        continue_prompt(tiny_model("llama"), tokenizer, codec, PROMPT, max_new_tokens=8, step=step).text
        for step in (-600, 100, 400)
    }
    assert len(texts) > 1


def test_short_prompts(tiny_model: Callable[[str], Any], codec: Codec) -> None:
    model, tokenizer = tiny_model("llama"), tiny_models.tokenizer()
    with pytest.raises(ConfigInvalid, match="fewer than two tokens"):
        continue_prompt(model, tokenizer, codec, "", max_new_tokens=2)
    found = continue_prompt(model, tokenizer, codec, "a", max_new_tokens=2, side_by_side=False)
    assert (found.prompt_tokens, found.coded_ratio, found.text_uncompressed) == (2, 1.0, None)


def test_chat_templates_frame_the_prompt() -> None:
    tokenizer = tiny_models.tokenizer()
    plain = prompt_tokens(tokenizer, "ab")
    assert plain.shape == (1, 3)
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    framed = prompt_tokens(tokenizer, "ab")
    assert tokenizer.decode(framed[0]) == "<s><user>ab:"
