"""What the service's integration tests share: a devhub, a Redis, a real API process, and a client. Knows no test."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from cryptography.fernet import Fernet

from kvalign.config import ConversionConfig
from worker.store import JobStore

ROOT = Path(__file__).resolve().parents[3]
START_S = 120.0  # of an API on a machine that is busy with other tests
ALICE, BOB, READER = "hf_alice_canary", "hf_bob_canary", "hf_reader_canary"
CAROL = "hf_carol_canary"


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """The first true answer of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return answer


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Ours without settings or tokens of whoever runs the tests."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVALIGN_", "HF_", "HUGGING"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def command(entry: str, *arguments: str) -> list[str]:
    """A command line for `package.module:command`, as the installed script would run it."""
    module, name = entry.split(":")
    return [sys.executable, "-c", f"from {module} import {name}; {name}()", *arguments]


def end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class DevHub:
    url: str

    def fault(self, **fields: Any) -> None:
        httpx.post(f"{self.url}/devhub/faults", json=fields).raise_for_status()

    def clear_faults(self) -> None:
        httpx.delete(f"{self.url}/devhub/faults").raise_for_status()

    def log(self) -> list[dict[str, Any]]:
        return list(httpx.get(f"{self.url}/devhub/log").json())


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass
class Api:
    """A running API, the store behind it, and clients for its users."""

    url: str
    process: subprocess.Popen[bytes]
    store: JobStore
    log: Path
    settings: dict[str, str] = field(repr=False)

    def client(self, token: str | None = ALICE, **headers: str) -> httpx.Client:
        known = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers={**known, **headers}, timeout=30, trust_env=False)


def start_api(folder: Path, **settings: str) -> Api:
    """An API process of its own on a folder; end it with stop_api."""
    log = folder / "api.log"
    given = {
        "KVALIGN_DATA_DIR": str(folder),
        "KVALIGN_SECRET_KEY": Fernet.generate_key().decode(),
        "KVALIGN_PORT": str(free_port()),
        "KVALIGN_SSE_POLL_S": "0.05",
        **settings,
    }
    with log.open("ab") as output:
        process = subprocess.Popen(command("service.cli:api"), env=environment(**given), stdout=output, stderr=output)
    url = f"http://127.0.0.1:{given['KVALIGN_PORT']}"
    wait_for(lambda: process.poll() is not None or _answers(url), START_S)
    assert process.poll() is None, log.read_text()
    store = JobStore.open(f"sqlite:///{folder / 'kvalign.db'}", given["KVALIGN_SECRET_KEY"])
    return Api(url, process, store, log, given)


def stop_api(api: Api) -> None:
    api.store.close()
    end(api.process)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).is_success
    except httpx.TransportError:
        return False


def body(target: str, source: str = "carol/tiny", **more: Any) -> dict[str, Any]:
    """A conversion as JSON; every test names a target of its own, so that no two are the same."""
    return {"source": {"repo": source}, "target": {"repo": target}, **more}


def config(target: str, **more: Any) -> ConversionConfig:
    return ConversionConfig.parse(body(target, **more))
