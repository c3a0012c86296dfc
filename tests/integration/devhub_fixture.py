"""A real devhub process and the real Hub client for it; knows nothing of what a test does with them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub import HfApi, constants

from devhub.storage import HubStorage

# Users of every devhub started here. `me` is in the organisation `acme`.
ME = "hf_me_writes"
ME_READING = "hf_me_reads"
YOU = "hf_you_writes"
USERS = [f"me:{ME}:write:orgs=acme", f"me:{ME_READING}:read", f"you:{YOU}"]
MULTIPART_BYTES = 100_000

# For the `pytestmark` of modules that upload: huggingface_hub 2.4 sends files in a way its own HTTP library
# calls deprecated.
quiet_client = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@dataclass(frozen=True)
class DevHub:
    """A running devhub. `storage` is its folder, which may be read and changed while it runs.

    http  a plain client, for requests the real one would never send
    """

    url: str
    root: Path
    http: httpx.Client

    @property
    def storage(self) -> HubStorage:
        return HubStorage(self.root)

    def api(self, token: str | bool = ME) -> HfApi:
        """The real client as one account; False is nobody."""
        return HfApi(endpoint=self.url, token=token)

    def get(self, path: str, token: str | None = ME, **headers: str) -> httpx.Response:
        """A request just as it is written here, for what the client would never ask."""
        auth = {"Authorization": f"Bearer {token}"} if token else {}
        return self.http.get(path, headers={**auth, **headers})

    def fault(self, **fields: Any) -> None:
        """See devhub.faults.Fault."""
        self.http.post("/devhub/faults", json=fields).raise_for_status()

    def clear_faults(self) -> None:
        self.http.delete("/devhub/faults").raise_for_status()

    def log(self) -> list[dict[str, Any]]:
        """See devhub.request_log.RequestLog."""
        entries: list[dict[str, Any]] = self.http.get("/devhub/log").raise_for_status().json()
        return entries


@contextmanager
def running_devhub(root: Path, *arguments: str) -> Iterator[DevHub]:
    """Start `devhub` on a folder, on a free port, and stop it at the end."""
    command = [sys.executable, "-m", "devhub", "--root", str(root), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("devhub listening on http://127.0.0.1:"), line
        url = line.split()[-1]
        with httpx.Client(base_url=url, trust_env=False) as http:
            yield DevHub(url, root, http)
    finally:
        process.terminate()
        process.wait(timeout=20)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def devhub_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevHub]:
    options = [word for user in USERS for word in ("--user", user)]
    root = tmp_path_factory.mktemp("devhub")
    with running_devhub(root, *options, "--faults", "--multipart-bytes", str(MULTIPART_BYTES)) as hub:
        yield hub


@pytest.fixture
def devhub_server(devhub_process: DevHub, hub_client: None) -> Iterator[DevHub]:
    """One devhub for all tests of a module, so each names its repos after itself; faults end with the test."""
    yield devhub_process
    devhub_process.clear_faults()


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The client of this process: a cache and a token file of its own, no Xet, no call to any other host."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)


def client_environment(hub: DevHub, home: Path, token: str) -> dict[str, str]:
    """The environment of a child process whose Hub is `hub`."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS"))
    }
    return {
        **kept,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
    }
