"""One machine that needs nothing else: data folder, key, Redis, worker and API, kept running until told to stop.

Must not import the API or the worker: each runs in a process of its own.
"""

import fcntl
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.fernet import Fernet

from kvalign.errors import ConfigInvalid
from service.processes import Keeper, Program
from service.redis_server import prepare_redis
from service.served import KEY_FILE, write_note
from service.settings import ServiceSettings

log = logging.getLogger(__name__)

WORKER_STOP_S = 30.0  # to hand its job back
API_STOP_S = 10.0
REDIS_STOP_S = 10.0
_READY_TICK_S = 0.3
_READY_WARNING_S = 60.0

# Of whoever started us: the service acts only as the people who send it requests.
_FOREIGN_CREDENTIALS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "KVALIGN_TOKEN"}


@dataclass(frozen=True)
class Machine:
    """What `kvalign serve` was asked for.

    redis_url  a Redis that runs already; None starts one in the data folder
    workers    conversions at a time
    """

    data_dir: Path
    host: str
    port: int
    hub_endpoint: str | None
    redis_url: str | None
    workers: int

    @property
    def url(self) -> str:
        """Where this machine reaches its own API."""
        host = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host  # noqa: S104 - compared, not bound
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def run_machine(machine: Machine, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; a second one stops without waiting. Call it from the main thread.

    announce  is called with the API's URL, once, when the first job could be done
    Raises ConfigInvalid for a folder, key or port that cannot be used, BadStart when a part refuses its settings.
    """
    stop, hurry = threading.Event(), threading.Event()
    with ExitStack() as stack:
        stack.enter_context(_signals(stop, hurry))
        stack.enter_context(_exclusive(machine.data_dir))
        _check_port(machine.host, machine.port)
        programs = _programs(machine)
        keeper = Keeper()
        stack.callback(keeper.stop, hurry)
        for program in programs:
            keeper.start(program)
        _tend(keeper, machine, stop, announce)
        log.info("stopping")


def _tend(keeper: Keeper, machine: Machine, stop: threading.Event, announce: Callable[[str], None]) -> None:
    began = time.monotonic()
    warned = False
    while not stop.is_set():
        missing = _missing_parts(machine.url)
        if not missing:
            break
        if not warned and time.monotonic() - began > _READY_WARNING_S:
            warned = True
            log.warning("still waiting for: %s", missing)
        keeper.tend(stop, _READY_TICK_S)
    else:
        return
    announce(machine.url)
    while not stop.is_set():
        keeper.tend(stop, 3600.0)


def _missing_parts(url: str) -> str:
    """What /readyz still misses; empty when it is ready."""
    try:
        answer = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
        return "" if answer.is_success else str(answer.json()["detail"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return "api"


def _programs(machine: Machine) -> list[Program]:
    """In starting order: what a later one needs comes before it."""
    programs = []
    redis_url = machine.redis_url
    if redis_url is None:
        redis = prepare_redis(machine.data_dir / "redis")
        redis_url = redis.url
        programs.append(Program("redis", redis.command, _clean_environment(), REDIS_STOP_S))
    environment = {**_clean_environment(), **_checked_settings(machine, redis_url)}
    python = (sys.executable, "-P", "-c")
    worker = (*python, "from worker.cli import worker; worker()", "--concurrency", str(machine.workers))
    api = (*python, "from service.cli import api; api()", "--host", machine.host, "--port", str(machine.port))
    programs.append(Program("worker", worker, environment, WORKER_STOP_S))
    programs.append(Program("api", api, environment, API_STOP_S))
    return programs


def _checked_settings(machine: Machine, redis_url: str) -> dict[str, str]:
    """The settings of worker and API as environment variables, refused here rather than in each of them."""
    settings = {
        "data_dir": str(machine.data_dir),
        "secret_key": _secret_key(machine.data_dir / KEY_FILE),
        "redis_url": redis_url,
    }
    if machine.hub_endpoint:
        settings["hub_endpoint"] = machine.hub_endpoint
    ServiceSettings.load(**settings)
    write_note(machine.data_dir, settings)
    return {f"KVALIGN_{name.upper()}": value for name, value in settings.items()}


def _clean_environment() -> dict[str, str]:
    """Ours without anyone's credentials, and with the folder that this package was loaded from on the path."""
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN_CREDENTIALS}
    here = str(Path(__file__).resolve().parents[1])
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{here}{os.pathsep}{inherited}" if inherited else here
    return environment


def _secret_key(file: Path) -> str:
    """The key that tokens are encrypted with: made at the first start, readable by its owner alone."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            raise ConfigInvalid(
                f"Others may read the key file {file}.", f"Run 'chmod 600 {file}', and consider its tokens seen."
            ) from None
        return file.read_text().strip()
    key = Fernet.generate_key().decode()
    with os.fdopen(descriptor, "w") as opened:
        opened.write(key)
        opened.flush()
        os.fsync(opened.fileno())
    return key


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """The data folder (0700), held by this process alone; the kernel lets go of it at any kind of death."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        lock = (folder / "serve.lock").open("a")
    except OSError as error:
        raise ConfigInvalid(
            f"The data folder {folder} cannot be used: {error.strerror}.", "Name another with --data-dir."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigInvalid(
                f"Another 'kvalign serve' works in {folder}.", "Stop it, or name another folder with --data-dir."
            ) from None
        yield


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigInvalid(
                f"{host}:{port} cannot be listened on: {error.strerror}.", "Name another with --host and --port."
            ) from None


@contextmanager
def _signals(stop: threading.Event, hurry: threading.Event) -> Iterator[None]:
    def asked(*_: object) -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    before: Mapping[signal.Signals, object] = {
        number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
