"""devhub as an operator runs it: options, imports, restarts; and transformers against it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from devhub_fixture import ME, DevHub, client_environment, hub_client, quiet_client, running_devhub

from devhub.cli import devhub
from devhub.importer import import_folder
from devhub.names import RepoId
from devhub.storage import HubStorage

__all__ = ["hub_client"]
pytestmark = [quiet_client, pytest.mark.usefixtures("hub_client")]

USER = ("--user", f"me:{ME}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a large file."""
    made = tmp_path / "folder"
    (made / "sub").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(b"\1" * 200_000)
    (made / "config.json").write_text("{}")
    (made / "sub" / "notes.txt").write_text("hi")
    (made / ".cache").mkdir()
    (made / ".cache" / "junk").write_text("no")
    return made


def test_import_private_and_gated(tmp_path: Path, folder: Path) -> None:
    imports = [word for repo in ("me/a", "me/b", "datasets/me/d", "gpt2") for word in ("--import", f"{repo}={folder}")]
    with running_devhub(tmp_path / "hub", *USER, *imports, "--private", "me/a", "--gated", "me/b") as hub:
        api = hub.api()
        assert api.list_repo_files("me/a") == [".gitattributes", "config.json", "model.safetensors", "sub/notes.txt"]
        assert api.model_info("me/a").private
        assert api.model_info("me/b").gated == "manual"
        assert api.dataset_info("me/d").id == "me/d"
        assert api.model_info("gpt2").author is None
        got = api.hf_hub_download("me/a", "model.safetensors", local_dir=tmp_path / "got")
        assert Path(got).read_bytes() == b"\1" * 200_000
        assert hub.get("/devhub/log").status_code == 404


def test_everything_survives_a_restart_even_an_upload_under_way(tmp_path: Path, folder: Path) -> None:
    root = tmp_path / "hub"
    with running_devhub(root, *USER, "--import", f"me/a={folder}") as hub:
        hub.api().create_tag("me/a", tag="v1")
        hub.api().move_repo("me/a", "me/moved")
        head = hub.api().model_info("me/a").sha
        upload = hub.storage.uploads.begin(RepoId("models", "me/moved"), "0" * 64, 10, part_bytes=None)
    with running_devhub(root) as hub:
        assert hub.api().model_info("me/a", revision="v1").sha == head
        assert hub.storage.uploads.get(upload.id) == upload


def test_same_folder_again_makes_no_commit_and_reads_no_large_file(tmp_path: Path, folder: Path) -> None:
    storage, repo = HubStorage(tmp_path / "hub"), RepoId("models", "me/again")
    first = import_folder(storage, repo, folder)
    weights = folder / "model.safetensors"
    stat = weights.stat()
    with weights.open("r+b") as file:
        file.write(b"\2" * 200_000)  # whoever read it now would see another file
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert import_folder(storage, repo, folder) == first
    (folder / "config.json").unlink()
    (folder / "new.txt").write_text("new")
    second = import_folder(storage, repo, folder)
    assert second.parents == (first.oid,)
    assert sorted(second.files) == [".gitattributes", "model.safetensors", "new.txt", "sub/notes.txt"]


def test_large_files_are_linked_not_copied(tmp_path: Path, folder: Path) -> None:
    storage = HubStorage(tmp_path / "hub")
    commit = import_folder(storage, RepoId("models", "me/linked"), folder)
    blob = storage.blobs.path(commit.files["model.safetensors"])
    assert blob.samefile(folder / "model.safetensors")


def test_changed_file_of_the_same_name_is_read_anew(tmp_path: Path, folder: Path) -> None:
    storage, repo = HubStorage(tmp_path / "hub"), RepoId("models", "me/changed")
    first = import_folder(storage, repo, folder)
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.write_bytes(b"\2" * 200_000)
    second = import_folder(storage, repo, folder)
    assert first.files["model.safetensors"] != second.files["model.safetensors"]
    assert storage.blobs.path(first.files["model.safetensors"]).read_bytes() == b"\1" * 200_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--import", "me/x=/nowhere"],
        ["--import", "no-equals"],
        ["--import", "a/b/c=."],
        ["--user", "me"],
        ["--user", "me:tok:admin"],
        ["--user", "bad name:tok"],
        ["--private", "me/none"],
        ["--port", "70000"],
    ],
)
def test_bad_options_are_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(devhub, ["--root", str(tmp_path / "hub"), *arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output


PUSH = """
import torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers
config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                                  num_key_value_heads=1, vocab_size=32, max_position_embeddings=64)
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(config)
inner = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?")
model.push_to_hub("me/tiny", max_shard_size="10KB", private=True)
tokenizer.push_to_hub("me/tiny")
transformers.LlamaForCausalLM(config).push_to_hub("me/tiny", revision="other/branch")
print(float(model.lm_head.weight.sum()))
"""
PULL = """
import transformers
config = transformers.AutoConfig.from_pretrained("me/tiny")
model, loaded = transformers.AutoModelForCausalLM.from_pretrained("me/tiny", output_loading_info=True)
assert config.num_key_value_heads == 1
assert not loaded["missing_keys"] and not loaded["unexpected_keys"], loaded
tokenizer = transformers.AutoTokenizer.from_pretrained("me/tiny")
assert tokenizer("a b c")["input_ids"] == [0, 1, 2]
other = transformers.AutoModelForCausalLM.from_pretrained("me/tiny", revision="other/branch")
assert (other.lm_head.weight != model.lm_head.weight).any()
print(float(model.lm_head.weight.sum()))
"""


def test_transformers_pushes_and_pulls(tmp_path: Path) -> None:
    with running_devhub(tmp_path / "hub", *USER) as hub:
        pushed = run_python(hub, PUSH, tmp_path / "home-of-push")
        pulled = run_python(hub, PULL, tmp_path / "home-of-pull")
        files = hub.api().list_repo_files("me/tiny")
    assert pushed == pulled
    assert "model.safetensors.index.json" in files
    assert "tokenizer.json" in files


def run_python(hub: DevHub, code: str, home: Path) -> str:
    """The last line a fresh interpreter prints, whose Hub is `hub`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=client_environment(hub, home, ME),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
