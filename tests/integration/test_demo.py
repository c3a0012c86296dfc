"""scripts/demo with a tiny model: what it refuses, what it prints, and that no end of it leaves anything running."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CANARY = "hf_canary_of_whoever_runs_the_demo"
KEYS = [
    *("job_id", "state", "source", "target", "commit", "ratio", "kl_mean", "kl_p99", "top1", "floor_kl"),
    *("artifact_bytes", "generated", "generated_uncompressed", "resident", "seconds"),
]
STAGES = ["preflight", "pull", "calibrate", "align", "fit", "validate", "report", "publish"]
# Random weights are sure of nothing, so a loose target would fail the gate on top-1 agreement.
QUICK = ["--calibration-tokens", "1024", "--windows", "1", "--max-kl", "2e-6"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0]).save_pretrained(folder)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


class Demo:
    """A running demo in a folder and with a home of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder / "demo"
        self.home = folder / "home"
        self.home.mkdir(exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, SCRIPTS / "run_demo.py", "--folder", self.folder, *arguments],
                env={**os.environ, "HOME": str(self.home), "HF_TOKEN": CANARY, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def until(self, condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, self.err
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and see every process gone; the exit status."""
        family = self.family()
        self.process.send_signal(number)
        status = self.process.wait(60)
        _, left = psutil.wait_procs(family, timeout=20)
        assert not left, left
        return status

    def kept(self) -> set[str]:
        """What is in its folder, the hidden lock file apart."""
        return {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def demo(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Demo]]:
    started: list[Demo] = []

    def start(*arguments: str) -> Demo:
        started.append(Demo(tmp_path, "--model", str(tiny_model), *QUICK, *arguments))
        return started[-1]

    yield start
    for each in started:
        family = each.family()
        each.process.kill()  # the kernel takes the rest with it
        each.process.wait()
        psutil.wait_procs(family, timeout=20)


def test_a_job_is_done_and_shown_and_the_services_stay_while_wanted(demo: Callable[..., Demo]) -> None:
    running = demo("--json", "--keep")
    running.until(lambda: "until Ctrl-C" in running.err)
    shown = json.loads(running.out.splitlines()[-1])
    assert list(shown) == KEYS
    assert shown["state"] == "succeeded"
    assert (shown["source"], shown["target"]) == ("local/tiny", "demo/tiny-kvalign")
    assert list(shown["seconds"]) == STAGES
    assert 0 < shown["kl_mean"] <= 2e-6
    assert 1 < shown["ratio"] < 500
    assert shown["generated"]
    assert shown["generated_uncompressed"]
    assert shown["resident"]["kernels"]["numba"] > 0
    assert shown["resident"]["kernel_error"] < 1e-4

    reached = re.search(r"KVALIGN_API=(\S+) KVALIGN_TOKEN=(\S+)", running.err)
    assert reached is not None
    api, token = reached.groups()
    job = httpx.get(
        f"{api}/v1/jobs/{shown['job_id']}", headers={"Authorization": f"Bearer {token}"}, trust_env=False
    ).json()
    assert job["result"]["commit"] == shown["commit"]

    assert running.end(signal.SIGINT) == 0
    assert running.kept() == {"tiny-kvalign", "logs"}
    assert {"README.md", "report.json", "model.safetensors"} <= {
        path.name for path in (running.folder / "tiny-kvalign").iterdir()
    }
    assert not list(running.home.iterdir())
    written = running.err + "".join(path.read_text() for path in (running.folder / "logs").iterdir())
    assert CANARY not in written


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Starting", signal.SIGINT),
        ("Submitted", signal.SIGTERM),
        ("calibrate started", signal.SIGINT),
    ],
)
def test_a_signal_ends_everything(demo: Callable[..., Demo], moment: str, number: signal.Signals) -> None:
    running = demo()
    running.until(lambda: moment in running.err and running.family())
    assert running.end(number) == 128 + number
    assert running.kept() == {"logs"}
    assert f"Stopped by {number.name}" in running.err
    assert "Traceback" not in running.err
    assert running.out == ""


def test_kill_9_ends_everything_and_the_next_run_starts_clean(demo: Callable[..., Demo]) -> None:
    killed = demo()
    killed.until(lambda: "calibrate started" in killed.err)
    refused = demo()
    assert refused.process.wait(60) == 2
    assert "Another demo" in refused.err
    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    assert "run" in killed.kept()

    after = demo()
    after.until(lambda: "Submitted" in after.err)
    assert after.end(signal.SIGINT) == 130
    assert after.kept() == {"logs"}


def test_a_failed_job_is_explained(demo: Callable[..., Demo]) -> None:
    running = demo("--json", "--max-kl", "1e-12")
    assert running.process.wait(120) == 1
    assert "error (config_invalid)" in running.err
    assert "Ask for a larger max_kl" in running.err
    shown = json.loads(running.out)
    assert list(shown) == KEYS
    assert (shown["state"], shown["commit"]) == ("failed", None)
    assert running.kept() == {"logs"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--jsn"], "--jsn"),
        (["--js"], "--js"),
        (["surplus"], "surplus"),
        (["--windows", "many"], "--windows"),
        (["--model", "/nowhere"], "config.json"),
    ],
)
def test_wrong_usage_is_refused_before_anything_is_installed(arguments: list[str], word: str) -> None:
    done = subprocess.run(
        [SCRIPTS / "demo", *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "usage: scripts/demo" in done.stderr
    assert word in done.stderr
    assert done.stdout == ""


def test_settings_that_no_conversion_takes_are_refused(demo: Callable[..., Demo]) -> None:
    running = demo("--max-kl", "-1")
    assert running.process.wait(60) == 2
    assert "codec.max_kl" in running.err
    assert not running.folder.exists()


def test_a_folder_with_other_things_in_it_is_left_alone(demo: Callable[..., Demo], tmp_path: Path) -> None:
    (tmp_path / "demo" / "run").mkdir(parents=True)
    running = demo()
    assert running.process.wait(60) == 2
    assert "other things" in running.err
    assert running.kept() == {"run"}
