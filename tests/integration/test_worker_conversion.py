"""A real model through a real `kvalign worker`: nothing here is a stand-in."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from devhub_fixture import DevHub, devhub_process, devhub_server, hub_client
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from worker_harness import wait_for

from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from kvalign.config import ConversionConfig
from worker.jobs import JobState
from worker.store import JobStore

__all__ = ["devhub_process", "devhub_server", "hub_client"]

TOKEN = "hf_me_writes"


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """Two layers of random weights and a tokenizer of single bytes."""
    folder = tmp_path / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0]).save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    return folder


@pytest.fixture
def worker(tmp_path: Path, redis_url: str, secret_key: str, devhub_server: DevHub) -> Iterator[subprocess.Popen[bytes]]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVALIGN_", "HF_"))}
    settings = {
        "KVALIGN_SECRET_KEY": secret_key,
        "KVALIGN_DATA_DIR": str(tmp_path / "data"),
        "KVALIGN_REDIS_URL": redis_url,
        "KVALIGN_HUB_ENDPOINT": devhub_server.url,
        "KVALIGN_SWEEP_S": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", "from worker.cli import worker; worker()"],
            env=kept | settings,
            stdout=log,
            stderr=log,
        )
    yield process
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


@pytest.mark.usefixtures("worker")
def test_a_model_is_converted_and_published(
    tmp_path: Path, secret_key: str, devhub_server: DevHub, tiny_model: Path
) -> None:
    import_folder(devhub_server.storage, parse_repo_spec("me/tiny"), tiny_model)
    config = ConversionConfig.parse(
        {
            "source": {"repo": "me/tiny"},
            "target": {"repo": "me/tiny-kvalign"},
            "codec": {"ratio": 6},
            "calibration": {"tokens": 1024, "sequence_length": 128},
            "validation": {"windows": 1, "gate": {"max_kl": 5, "min_top1": 0}},
        }
    )
    store = JobStore.open(f"sqlite:///{tmp_path / 'data' / 'kvalign.db'}", secret_key)
    job = store.submit("me", config, source_commit="", token=TOKEN).job
    wait_for(lambda: not store.get(job.id, tenant="me").state.alive, timeout_s=240)
    done = store.get(job.id, tenant="me")
    assert done.state == JobState.SUCCEEDED, (done.error, (tmp_path / "worker.log").read_text())
    assert done.result is not None
    assert 5 < done.result.ratio < 7
    names = set(devhub_server.api().list_repo_files("me/tiny-kvalign"))
    assert {"README.md", "kvalign_config.json", "kvalign_codec.safetensors", "report.json"} <= names
    stages = ["preflight", "pull", "calibrate", "align", "fit", "validate", "report", "publish"]
    assert list(done.stage_seconds) == stages
    assert "report.json" in store.report_files(job.id, tenant="me")
    store.close()
