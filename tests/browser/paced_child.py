"""Stands in for worker.child at a pace that a person could watch; its artifact is the sample card of docs/.

Its one argument is a folder: `mode` in it is pass, gate or hang, `pace` the seconds of each step.
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from worker.child import die_with_parent

STAGES = {"calibrate": "sequences", "align": "pairs", "fit": "groups", "validate": "windows", "report": "figures"}
SAMPLE = Path(__file__).parents[2] / "docs" / "sample-card"
STEPS = 8


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    die_with_parent()
    control = Path(sys.argv[1])
    spec = json.loads(sys.stdin.read())
    mode, pace_s = (control / "mode").read_text(), float((control / "pace").read_text())
    sys.stderr.write("read <script>alert('log')</script> of the model's config.json\n")
    sys.stderr.flush()
    for stage, unit in STAGES.items():
        began = time.monotonic()
        for done in range(STEPS + 1):
            say(kind="progress", stage=stage, done=done, total=STEPS, unit=unit)
            time.sleep(pace_s)
            if mode == "hang" and stage == "fit" and done == STEPS // 2:
                time.sleep(600)
        say(kind="stage_done", stage=stage, seconds=time.monotonic() - began)
    write_artifact(Path(spec["out_dir"]), passes=mode != "gate")
    if mode == "gate":
        fact, remedy = "Mean KL is 0.0193 nats; the gate allows 0.01.", "Ask for a smaller ratio, or set a wider gate."
        say(kind="error", code="quality_gate", message=fact, remedy=remedy)
        sys.exit(1)
    say(kind="result", summary={"ratio": 105.97, "kl_mean": 0.0193, "top1": 0.925})


def write_artifact(folder: Path, *, passes: bool) -> None:
    shutil.copytree(SAMPLE, folder, dirs_exist_ok=True)
    (folder / "kvalign_config.json").write_text("{}")
    (folder / "kvalign_codec.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    if not passes:
        report = json.loads((folder / "report.json").read_text())
        report["gate"] |= {"passed": False, "max_kl": 0.01, "failures": ["mean KL <b>0.0193</b> is above 0.01 on law"]}
        (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
