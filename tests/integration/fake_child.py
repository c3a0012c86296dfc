"""Stands in for worker.child: speaks its protocol and writes an artifact, and does with the model what it is told.

Its one argument is a folder: `mode` in it says how to behave, `runs` there gets a line for each start.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from worker.child import die_with_parent

STAGES = ("calibrate", "align", "fit", "validate", "report")


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    die_with_parent()
    control = Path(sys.argv[1])
    spec = json.loads(sys.stdin.read())
    mode = (control / "mode").read_text()
    with (control / "runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    (control / "environment").write_text(json.dumps(dict(os.environ)))
    sys.stderr.write(f"reading {sorted(path.name for path in Path(spec['source_dir']).iterdir())}\n")
    for stage in STAGES:
        for done in range(3):
            say(kind="progress", stage=stage, done=done, total=2, unit="step")
        if mode == "hang" and stage == "fit":
            time.sleep(600)
        if mode == "die" and stage == "align":
            os.abort()
        say(kind="stage_done", stage=stage, seconds=0.25)
    write_artifact(Path(spec["out_dir"]))
    if mode == "gate":
        say(kind="error", code="quality_gate", message="KL 0.2 nats; the limit is 0.05.", remedy="Ask for less.")
        sys.exit(1)
    say(kind="result", summary={"ratio": 12.5, "kl_mean": 0.01, "top1": 0.97})


def write_artifact(folder: Path) -> None:
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "kvalign_config.json").write_text("{}")
    (folder / "kvalign_codec.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "report.json").write_text('{"summary": {}}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Converted\n")
    (folder / "figures" / "kl.png").write_bytes(b"\x89PNG")


if __name__ == "__main__":
    main()
