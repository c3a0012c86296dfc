"""The processes that are measured: Redis, a database, a Hub, the API, a worker, each as it is deployed.

Redis writes every command to disk before answering (as `kvalign serve` has it), PostgreSQL and SQLite lose nothing
that they have taken: nothing is made quicker by being made less safe. Must not know what is measured.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
from cryptography.fernet import Fernet

from service.redis_server import prepare_redis

ROOT = Path(__file__).resolve().parents[2]
SOURCE = "carol/tiny"
_PATIENCE_S = 60.0
_STOP_S = 20.0

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 32,
}


@dataclass(frozen=True)
class Machine:
    """A service that answers. `environment` is that of its processes, settings included."""

    folder: Path
    database_url: str
    secret_key: str
    environment: Mapping[str, str]
    url: str
    api: psutil.Process

    @contextlib.contextmanager
    def worker(self) -> Iterator[psutil.Process]:
        """A worker that waits for jobs."""
        command = [sys.executable, "-c", "from worker.cli import worker; worker()"]
        with _running("worker", command, self.folder, self.environment) as process:
            _wait_for("a worker", lambda: httpx.get(f"{self.url}/readyz", trust_env=False).is_success, process)
            yield psutil.Process(process.pid)


def token_of(tenant: str) -> str:
    """The Hub token of one of the benchmark's accounts."""
    return f"hf_bench_{tenant}"


@contextlib.contextmanager
def running_machine(folder: Path, database: str, tenants: list[str], settings: Mapping[str, str]) -> Iterator[Machine]:
    """Everything but a worker, on one folder, with an empty database.

    database  "sqlite" or "postgresql"
    settings  KVALIGN_* variables of the API and the worker
    """
    with contextlib.ExitStack() as stack:
        redis = prepare_redis(folder / "redis")
        stack.enter_context(_running("redis", list(redis.command), folder, _clean_environment()))
        if database == "sqlite":
            database_url = f"sqlite:///{folder / 'jobs.db'}"
        else:
            database_url = stack.enter_context(_postgresql(folder / "postgresql"))
        port, secret_key = _free_port(), Fernet.generate_key().decode()
        environment = {
            **_clean_environment(),
            "KVALIGN_DATA_DIR": str(folder / "data"),
            "KVALIGN_DATABASE_URL": database_url,
            "KVALIGN_REDIS_URL": redis.url,
            "KVALIGN_SECRET_KEY": secret_key,
            "KVALIGN_HUB_ENDPOINT": stack.enter_context(_hub(folder, tenants)),
            "KVALIGN_PORT": str(port),
            **settings,
        }
        command = [sys.executable, "-c", "from service.cli import api; api()"]
        api = stack.enter_context(_running("api", command, folder, environment))
        url = f"http://127.0.0.1:{port}"
        _wait_for("the API", lambda: httpx.get(f"{url}/healthz", trust_env=False).is_success, api)
        yield Machine(folder, database_url, secret_key, environment, url, psutil.Process(api.pid))


@contextlib.contextmanager
def _hub(folder: Path, tenants: list[str]) -> Iterator[str]:
    """A devhub with an account for each tenant and one tiny model that can be converted."""
    model = _write_model(folder / "model")
    arguments = ["--root", str(folder / "hub"), "--import", f"{SOURCE}={model}"]
    for tenant in tenants:
        arguments += ["--user", f"{tenant}:{token_of(tenant)}"]
    port = _free_port()
    command = [sys.executable, "-m", "devhub", "--port", str(port), *arguments]
    with _running("hub", command, folder, _clean_environment()) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_for("devhub", lambda: httpx.get(f"{url}/api/models/{SOURCE}", trust_env=False).is_success, process)
        yield url


def _write_model(folder: Path) -> Path:
    """A llama of a few hundred weights, as a Hub repo holds one."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    layer, square, ones = "model.layers.0", np.zeros((16, 16), np.float32), np.ones(16, np.float32)
    linear = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    tensors = {f"{layer}.{name}.weight": square for name in linear}
    tensors |= {f"{layer}.{name}_layernorm.weight": ones for name in ("input", "post_attention")}
    tensors |= {"model.norm.weight": ones}
    tensors |= {name: np.zeros((32, 16), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextlib.contextmanager
def _postgresql(folder: Path) -> Iterator[str]:
    """A PostgreSQL with its own defaults, fsync included. Raises FileNotFoundError where none is installed."""
    server = find_postgresql()
    if server is None:
        raise FileNotFoundError("no PostgreSQL is installed: apt-get install postgresql, or choose --database sqlite")
    user = "nobody" if os.getuid() == 0 else None  # it refuses root
    folder.mkdir()
    if user is not None:
        shutil.chown(folder, user)
    initdb = [server.with_name("initdb"), "-D", folder / "data", "-A", "trust", "-U", "kvalign"]
    subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder)
    port = _free_port()
    command = [str(server), "-D", str(folder / "data"), "-p", str(port), "-k", str(folder)]
    options = ["-c", "listen_addresses=127.0.0.1"]
    with _running(
        "postgresql", [*command, *options], folder, _clean_environment(), user=user, stop=signal.SIGINT
    ) as process:
        url = f"postgresql://kvalign@127.0.0.1:{port}/postgres"
        _wait_for("PostgreSQL", lambda: _connects(url), process)
        yield url


def find_postgresql() -> Path | None:
    """The server's program; Debian keeps it off PATH, in a folder for each version."""
    if found := shutil.which("postgres"):
        return Path(found).resolve()
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return installed[-1] if installed else None


def _connects(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


@contextlib.contextmanager
def _running(
    name: str,
    command: list[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    user: str | None = None,
    stop: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session, whose words go to NAME.log; its whole group is gone at the end."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=dict(environment), user=user, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        process.send_signal(stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(what: str, answers: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if answers():
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come up; its log says why")
        time.sleep(0.1)


def _clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVALIGN_", "HF_", "HUGGING"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
