"""The demo on the real model, with little text: what the README promises, run as a new user would run it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    *("job_id", "state", "source", "target", "commit", "ratio", "kl_mean", "kl_p99", "top1", "floor_kl"),
    *("artifact_bytes", "generated", "generated_uncompressed", "seconds"),
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
