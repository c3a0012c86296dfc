"""Stands in for worker.child: speaks its protocol and writes an artifact, and does with the model what it is told.

Its one argument is a folder: `mode` in it says how to behave, or `mode-NAME` for the job whose target is OWNER/NAME;
`runs` there gets a line for each start.

    convert    do all of it
    hang       sleep in fit
    hold       wait in fit until the mode is another one
    slow       take up to a second over each step, with something said in between
    die        abort in align
    eat        hold ever more memory in fit
    fill       write to the work folder in fit until the disk is full
    gate       convert, and fail the gate
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from worker.child import die_with_parent, explain

STAGES = ("calibrate", "align", "fit", "validate", "report")


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    die_with_parent()
    control = Path(sys.argv[1])
    spec = json.loads(sys.stdin.read())
    with (control / "runs").open("a") as runs:
        runs.write(f"{os.getpid()}\n")
    (control / "environment").write_text(json.dumps(dict(os.environ)))
    sys.stderr.write(f"reading {sorted(path.name for path in Path(spec['source_dir']).iterdir())}\n")
    try:
        for stage in STAGES:
            work_on(stage, spec, control)
        write_artifact(Path(spec["out_dir"]))
    except OSError as error:
        say(**explain(error).model_dump(mode="json"))
        sys.exit(1)
    if mode_of(spec, control) == "gate":
        say(kind="error", code="quality_gate", message="KL 0.2 nats; the limit is 0.05.", remedy="Ask for less.")
        sys.exit(1)
    say(kind="result", summary={"ratio": 12.5, "kl_mean": 0.01, "top1": 0.97})


def mode_of(spec: dict[str, Any], control: Path) -> str:
    own = control / f"mode-{spec['config']['target']['repo'].rpartition('/')[2]}"
    return (own if own.exists() else control / "mode").read_text()


def work_on(stage: str, spec: dict[str, Any], control: Path) -> None:
    mode = mode_of(spec, control)
    for done in range(3):
        say(kind="progress", stage=stage, done=done, total=2, unit="step")
        if mode == "slow":
            time.sleep(random.random())
    if stage == "fit":
        misbehave(mode, spec, control)
    if mode == "die" and stage == "align":
        os.abort()
    say(kind="stage_done", stage=stage, seconds=0.25)


def misbehave(mode: str, spec: dict[str, Any], control: Path) -> None:
    while mode == "hold":
        time.sleep(0.05)
        mode = mode_of(spec, control)
    if mode == "hang":
        time.sleep(600)
    eaten = []
    while mode == "eat":
        eaten.append(b"x" * 10_000_000)
        time.sleep(0.02)
    if mode == "fill":
        folder = Path(spec["work_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "much").open("wb") as file:
            while file.write(bytes(1 << 20)):
                pass


def write_artifact(folder: Path) -> None:
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    (folder / "kvalign_config.json").write_text("{}")
    (folder / "kvalign_codec.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "report.json").write_text('{"summary": {}}')
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Converted\n")
    (folder / "figures" / "kl.png").write_bytes(b"\x89PNG")


if __name__ == "__main__":
    main()
