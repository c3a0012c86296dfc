"""The demo on the real model, with little text: what the README promises, run as a new user would run it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvalign.calibrate import calibrate
from kvalign.capture import capture, load_model, load_tokenizer, measure_shape, run
from kvalign.resident.cache import ResidentCache, coded_layers
from kvalign.resident.fit import fit_resident
from kvalign.resident.interface import fused_attention
from kvalign.text import builtin_documents, token_sequences

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    *("job_id", "state", "source", "target", "commit", "ratio", "kl_mean", "kl_p99", "top1", "floor_kl"),
    *("artifact_bytes", "generated", "generated_uncompressed", "resident", "seconds"),
}
LITTLE_TEXT = ["--calibration-tokens", "8192", "--windows", "2"]
STAGES = ["preflight", "pull", "calibrate", "align", "fit", "validate", "report", "publish"]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_demo_converts_smollm2() -> None:
    """Calibration text and windows are cut down, so that the numbers are worse than a full conversion's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVALIGN_", "HF_"))}
    done = subprocess.run(
        [ROOT / "scripts/demo", "--json", "--folder", ROOT / ".cache/demo", *LITTLE_TEXT],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert set(result) == KEYS
    assert result["state"] == "succeeded"
    assert len(result["commit"]) == 40
    assert list(result["seconds"]) == STAGES
    # The target is 0.02; a full conversion reaches twice this ratio and more with four times the text.
    assert 0.005 < result["kl_mean"] <= 0.02
    assert result["ratio"] > 10
    assert result["top1"] > 0.85
    assert result["floor_kl"] < 1e-6
    assert result["generated"]
    assert result["generated_uncompressed"]
    assert 3.9 < result["resident"]["coded_ratio"] < 4.1
    assert result["resident"]["kl_mean"] < 0.006
    assert result["resident"]["kernel_error"] < 1e-4
    assert result["resident"]["kernels"]["numba"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_bits_say_what_the_uncompressed_cache_says(tmp_path: Path) -> None:
    """200 greedy tokens; the first difference, if there is one, must be between words as good as equally likely."""
    model = load_model(ROOT / ".cache/demo/model")
    tokenizer = load_tokenizer(ROOT / ".cache/demo/model")
    documents = builtin_documents("validation")
    shape = measure_shape(model)
    sequences = token_sequences(builtin_documents("calibration"), tokenizer, tokens=4096, length=512, seed=0)
    statistics = calibrate(
        model,
        shape,
        sequences[:6],
        seed=0,
        checkpoint=tmp_path / "statistics.safetensors",
        on_progress=lambda done, total: None,
        layer_group_size=1,
    )
    plan = fit_resident(
        statistics,
        shape,
        list(capture(model, shape, iter(sequences[6:]))),
        bits=8.0,
        sink_tokens=4,
        layers=coded_layers(model),
        position_limit=2048,
    ).plan(4, 0)
    prompt = tokenizer(documents[0].text, return_tensors="pt")["input_ids"][:, :400]
    plain = greedy(model, prompt, DynamicCache(), 200)
    with fused_attention(model):
        cache = ResidentCache(plan, model)
        found = greedy(model, prompt, cache, 200)
    assert cache.counters.fused["numba"] == 199 * 30
    assert cache.counters.dense == 0
    agreed = next((at for at, (a, b) in enumerate(zip(plain, found, strict=True)) if a[0] != b[0]), 200)
    if agreed < 200:
        wanted, likely = plain[agreed]
        assert float(likely[wanted] - likely[found[agreed][0]]) < 0.05
    assert agreed > 20


@torch.no_grad()
def greedy(model: Any, prompt: Tensor, cache: Any, count: int) -> list[tuple[int, Tensor]]:
    """Each new token, and the log-probabilities it was picked from."""
    fed, found = prompt, []
    for _ in range(count):
        likely = run(model, fed, cache, logits_to_keep=1)[0][0, -1].log_softmax(-1)
        found.append((int(likely.argmax()), likely))
        fed = likely.argmax().view(1, 1)
    return found
