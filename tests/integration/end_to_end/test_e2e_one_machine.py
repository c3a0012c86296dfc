"""`kvalign serve` and the commands that a person at a shell uses, from submission to generated text."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from e2e_services import ADA, KVALIGN, STAGES, Services, alive, clean_environment, conversion, free_port, wait_for


@dataclass(frozen=True)
class Machine:
    """A running `kvalign serve`, and a shell with the settings that point at it."""

    process: subprocess.Popen[str]
    url: str
    environment: dict[str, str]

    def kvalign(self, *arguments: str) -> str:
        """What a command prints; it must succeed."""
        done = subprocess.run(
            [KVALIGN, *arguments], env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout


@pytest.fixture
def machine(resting_services: Services, tmp_path: Path) -> Iterator[Machine]:
    resting_services.stop_worker()  # it would only take processor time
    port = free_port()
    command = [KVALIGN, "serve", "--data-dir", str(tmp_path / "data"), "--port", str(port),
               "--hub-endpoint", resting_services.hub.url]  # fmt: skip
    with (tmp_path / "serve.log").open("w") as log:
        process = subprocess.Popen(command, env=clean_environment(), stdout=subprocess.PIPE, stderr=log, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    url = f"http://127.0.0.1:{port}"
    environment = clean_environment(
        KVALIGN_API=url,
        KVALIGN_TOKEN=ADA,
        HF_ENDPOINT=resting_services.hub.url,
        HF_TOKEN=ADA,
        HF_HOME=str(tmp_path / "hf"),
        HF_HUB_DISABLE_XET="1",
    )
    try:
        wait_for(lambda: lines or process.poll() is not None)
        assert lines == [f"kvalign serving on {url}\n"], (tmp_path / "serve.log").read_text()
        yield Machine(process, url, environment)
    finally:
        parts = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        for part in parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                part.kill()
        reader.join()
        if process.stdout:
            process.stdout.close()


def test_from_serve_to_generated_text(machine: Machine, tmp_path: Path) -> None:
    settings = tmp_path / "conversion.json"
    settings.write_text(json.dumps(conversion("ada/llama", "ada/by-command")))
    told = machine.kvalign("submit", "--config", str(settings), "--label", "by=hand", "--watch", "--json")
    lines = [json.loads(line) for line in told.splitlines()]
    job = lines[-1]["data"]
    assert (lines[-1]["kind"], job["state"], job["labels"]) == ("job", "succeeded", {"by": "hand"})
    finished = [line["data"]["stage"] for line in lines[:-1] if line["data"].get("status") == "finished"]
    assert finished == STAGES

    listed = json.loads(machine.kvalign("jobs", "--label", "by=hand", "--json"))["data"]
    assert [each["id"] for each in listed] == [job["id"]]
    assert f"{job['id']}  succeeded" in machine.kvalign("jobs")

    report = json.loads(machine.kvalign("inspect", "ada/by-command", "--json"))
    assert report["summary"]["ratio"] == job["result"]["ratio"]

    generated = json.loads(
        machine.kvalign(
            "generate", "ada/by-command", "--prompt", "Every ship that passed. " * 6, "--max-new-tokens", "8", "--json"
        ).splitlines()[-1]
    )
    assert generated["generated"]
    assert generated["generated_uncompressed"]
    assert generated["cache_ratio"] > 1.2

    parts = psutil.Process(machine.process.pid).children(recursive=True)
    machine.process.terminate()
    assert machine.process.wait(40) == 0
    wait_for(lambda: not alive(parts), 5)
