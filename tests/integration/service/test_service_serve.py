"""`kvalign serve` as a program: it gets ready, heals, stops in order, and leaves no process behind."""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from service_harness import ALICE, DevHub, body, command, environment, free_port, wait_for


@dataclass
class Serving:
    """A running `kvalign serve`. `lines` are what it printed on stdout, `log` what it wrote on stderr."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    lines: list[str] = field(default_factory=list)

    def part(self, word: str) -> psutil.Process | None:
        """The direct child whose command line has a word."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                if word in " ".join(child.cmdline()):
                    return child
        return None

    def everything(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False


@pytest.fixture
def serve(tmp_path: Path, service_hub: DevHub) -> Iterator["Start"]:
    starter = Start(tmp_path, service_hub.url)
    yield starter
    starter.end_all()


class Start:
    """Starts `kvalign serve` on one data folder, and ends what a failed test leaves."""

    def __init__(self, folder: Path, hub: str) -> None:
        self.data_dir = folder / "data"
        self._log = folder / "serve.log"
        self._hub = hub
        self._started: list[Serving] = []

    def __call__(self, *more: str) -> Serving:
        port = free_port()
        arguments = ["--data-dir", str(self.data_dir), "--port", str(port), "--hub-endpoint", self._hub, *more]
        with self._log.open("a") as log:
            process = subprocess.Popen(
                command("service.cli:serve", *arguments),
                env=environment(HF_TOKEN="hf_operator_canary", KVALIGN_SWEEP_S="1"),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        serving = Serving(process, f"http://127.0.0.1:{port}", self._log)
        threading.Thread(target=self._read, args=(serving,), daemon=True).start()
        self._started.append(serving)
        wait_for(lambda: serving.lines or process.poll() is not None, 60)
        assert serving.lines == [f"kvalign serving on {serving.url}"], self._log.read_text()
        return serving

    @staticmethod
    def _read(serving: Serving) -> None:
        assert serving.process.stdout is not None
        with serving.process.stdout as output:
            serving.lines.extend(line.strip() for line in output)

    def end_all(self) -> None:
        for serving in self._started:
            parts = serving.everything()
            serving.process.kill()
            serving.process.wait()
            for part in parts:
                with contextlib.suppress(psutil.Error):
                    part.kill()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def examined(data_dir: Path) -> dict[str, str]:
    """What `kvalign doctor` finds on a machine that serves, told only where its data are."""
    done = subprocess.run(
        command("service.doctor:doctor", "--json", "--data-dir", str(data_dir)),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return {check["name"]: check["state"] for check in json.loads(done.stdout)["checks"]}


def test_a_machine_serves_heals_and_stops(serve: Start) -> None:
    serving = serve()
    assert serving.ready()
    assert serve.data_dir.stat().st_mode & 0o777 == 0o700
    assert (serve.data_dir / "secret.key").stat().st_mode & 0o777 == 0o600

    with httpx.Client(base_url=serving.url, headers={"Authorization": f"Bearer {ALICE}"}, trust_env=False) as client:
        job = client.post("/v1/jobs", json=body("alice/serve-1")).json()
        assert job["state"] == "queued"

    found = examined(serve.data_dir)
    assert found.pop("workspace") in {"ok", "FAIL"}  # as much disk as the machine has
    assert set(found.values()) == {"ok"}, found

    second = subprocess.run(
        command("service.cli:serve", "--data-dir", str(serve.data_dir), "--port", str(free_port())),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert "Another" in second.stderr

    for word in ("worker.cli", "redis-server", "service.cli"):
        victim = serving.part(word)
        assert victim is not None
        victim.kill()
        wait_for(lambda word=word, old=victim.pid: (p := serving.part(word)) and p.pid != old, 30)
    wait_for(serving.ready, 60)

    parts = serving.everything()
    assert len(parts) >= 3
    for part in parts:
        with contextlib.suppress(psutil.Error):
            assert "hf_operator_canary" not in str(part.environ())
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(60) == 0, serving.log.read_text()
    assert gone(parts)
    log = serving.log.read_text()
    assert log.rindex("api stopped") < log.rindex("worker stopped") < log.rindex("redis stopped")
    assert ALICE not in log
    assert all(json.loads(line)["message"] for line in log.splitlines())  # of all parts, killed ones too
    assert examined(serve.data_dir)["broker"] == "FAIL"


def test_kill_9_leaves_no_process_and_loses_no_job(serve: Start) -> None:
    first = serve()
    headers = {"Authorization": f"Bearer {ALICE}"}
    job = httpx.post(f"{first.url}/v1/jobs", json=body("alice/serve-2"), headers=headers, trust_env=False).json()
    parts = first.everything()
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    wait_for(lambda: gone(parts), 20)

    second = serve()
    again = httpx.get(f"{second.url}{job['links']['self']}", headers=headers, trust_env=False).json()
    assert again["id"] == job["id"]
    second.process.terminate()
    assert second.process.wait(60) == 0


def test_a_redis_that_runs_already_is_used(serve: Start, service_redis: str) -> None:
    serving = serve("--redis-url", service_redis)
    assert serving.part("redis-server") is None
    assert not (serve.data_dir / "redis").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--port", "0"), "--port"),
        (("--workers", "0"), "--workers"),
        (("--hub-endpoint", "ftp://host"), "HUB_ENDPOINT"),
        (("--redis-url", "amqp://host"), "REDIS_URL"),
        (("--data-dir", "/proc/nothing"), "/proc/nothing"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    done = subprocess.run(
        command("service.cli:serve", "--data-dir", str(tmp_path), "--port", str(free_port()), *arguments),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_text("x")
    (tmp_path / "secret.key").chmod(0o644)
    done = subprocess.run(
        command("service.cli:serve", "--data-dir", str(tmp_path), "--port", str(free_port())),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "chmod 600" in done.stderr


def test_a_port_in_use_is_refused(tmp_path: Path, service_redis: str) -> None:
    port = service_redis.rpartition(":")[2].partition("/")[0]
    done = subprocess.run(
        command("service.cli:serve", "--data-dir", str(tmp_path), "--port", port),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert port in done.stderr
