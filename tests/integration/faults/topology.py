"""What docker-compose runs, by hand: devhub, Redis, SQLite or PostgreSQL, workers and APIs, each a process of its own.

Every part can be killed, stopped and started again. Knows no test: scripts/soak uses it too. Tokens are made anew in
each run, so that they can be looked for everywhere.
"""

import contextlib
import itertools
import os
import secrets
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from cryptography.fernet import Fernet
from devhub_fixture import DevHub, running_devhub
from httpx_sse import connect_sse
from local_servers import PostgresServer, RedisServer, find_postgres, free_port
from sqlalchemy import select
from tiny_model import write_model

from devhub.errors import HubError
from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from worker.schema import WorkerRow
from worker.store import JobStore

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCE = "ada/tiny"
LEASE_S = 3.0
FINAL = {"succeeded", "failed", "canceled"}
CHILDREN = ("fake_child.py", "worker.child")
# What conversions compile is the same for all topologies; a minute for each of them otherwise.
COMPILED = ROOT / ".cache" / "compiled"
ANSWERS_OF_A_BALANCER = {502, 503, 504}

Json = dict[str, Any]


def wait_for(condition: Callable[[], Any], timeout_s: float = 40.0, every_s: float = 0.05) -> Any:
    """The first true answer of a condition."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(every_s)
    return answer


class Part:
    """A program that can be started, ended in any way, and started again."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.url = ""
        self._command = command
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        if self.running:
            return
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def family(self) -> list[psutil.Process]:
        """Itself and all its descendants that still run."""
        if not self.running:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.pid)
            return alive([main, *main.children(recursive=True)])
        return []

    def converting(self) -> list[psutil.Process]:
        """Of a worker: its converting children."""
        return [process for process in self.family() if any(word in command_of(process) for word in CHILDREN)]

    def pool(self) -> list[psutil.Process]:
        """Of a worker: the processes that run tasks."""
        with contextlib.suppress(psutil.NoSuchProcess, AssertionError):
            return alive(psutil.Process(self.pid).children())
        return []

    def kill(self) -> list[psutil.Process]:
        """Kill -9 of its main process alone; returns who was there."""
        family = self.family()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        return family

    def kill_tree(self) -> list[psutil.Process]:
        """Kill -9 of everything that belongs to it."""
        family = self.family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process is not None:
            self.process.wait()
        return family

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def ask_to_stop(self) -> None:
        if self.running and self.process is not None:
            self.process.terminate()

    def stop(self, timeout_s: float = 40) -> int:
        """As an init system does it; the exit status."""
        self.ask_to_stop()
        assert self.process is not None
        return self.process.wait(timeout_s)


class Caller:
    """One account at all APIs, as behind a balancer: a part that does not answer is passed over."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._urls = itertools.cycle(urls)
        self._tries = 2 * len(urls)
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=40,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),  # of an API that was killed they would stay unclosed
        )
        self.passed_over: list[str] = []

    def ask(self, method: str, path: str, *, patience_s: float = 60, **request: Any) -> httpx.Response:
        """The first answer of any API that is up."""
        deadline = time.monotonic() + patience_s
        while True:
            for _ in range(self._tries):
                url = next(self._urls)
                try:
                    response = self.http.request(method, url + path, **request)
                except httpx.TransportError as error:
                    self.passed_over.append(f"{method} {path}: {type(error).__name__}")
                    continue
                if response.status_code not in ANSWERS_OF_A_BALANCER:
                    return response
                self.passed_over.append(f"{method} {path}: {response.status_code}")
            assert time.monotonic() < deadline, self.passed_over[-5:]
            time.sleep(0.2)

    def submit(self, target: str, **sections: Json) -> Json:
        """The job, made once however often the request had to be sent."""
        body = {"source": {"repo": SOURCE}, "target": {"repo": target}}
        body = {name: {**body.get(name, {}), **sections.get(name, {})} for name in body | sections}
        response = self.ask("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": secrets.token_hex(8)})
        assert response.status_code == 202, response.text
        job: Json = response.json()
        return job

    def job(self, job: Json) -> Json:
        found: Json = self.ask("GET", f"/v1/jobs/{job['id']}").raise_for_status().json()
        return found

    def cancel(self, job: Json) -> None:
        self.ask("POST", f"/v1/jobs/{job['id']}/cancel").raise_for_status()

    def retry(self, job: Json) -> httpx.Response:
        return self.ask("POST", f"/v1/jobs/{job['id']}/retry")

    def reach(self, job: Json, state: str = "succeeded", timeout_s: float = 60) -> Json:
        """Wait for a job's end; another end than the one wanted fails the test."""
        now: Json = wait_for(lambda: (found := self.job(job))["state"] in FINAL and found, timeout_s, 0.2)
        assert now["state"] == state, now["error"]
        return now

    def see(self, job: Json, stage: str, *, attempt: int = 1, timeout_s: float = 40) -> Json:
        """Wait until an attempt at a job is in a stage."""

        def there() -> Json | None:
            now = self.job(job)
            assert now["state"] not in FINAL, (now["state"], now["error"])
            fits = now["state"] == "running" and now["stage"] == stage and now["attempts"] >= attempt
            return now if fits else None

        found: Json = wait_for(there, timeout_s, 0.1)
        return found

    def events(self, job: Json) -> list[Json]:
        """All so far, oldest first."""
        found: list[Json] = []
        while True:
            after = found[-1]["id"] if found else 0
            page = self.ask(
                "GET", f"/v1/jobs/{job['id']}/events", params={"after": after}, headers={"Accept": "application/json"}
            ).raise_for_status()
            found += page.json()["data"]
            if not page.json()["has_more"]:
                return found

    def states(self, job: Json) -> list[str]:
        return [event["data"]["state"] for event in self.events(job) if event["kind"] == "state"]

    def stages(self, job: Json, status: str) -> list[str]:
        """Of stage events with a status (started, finished, kept), in order."""
        return [event["data"]["stage"] for event in self.events(job) if event["data"].get("status") == status]

    def follow(self, job: Json, patience_s: float = 300) -> Iterator[int]:
        """Numbers of events from their stream, reconnecting as an EventSource does, until the stream is over."""
        seen, deadline = 0, time.monotonic() + patience_s
        while time.monotonic() < deadline:
            url = f"{next(self._urls)}/v1/jobs/{job['id']}/events"
            headers = {"Last-Event-ID": str(seen)}
            try:
                with connect_sse(self.http, "GET", url, headers=headers) as source:
                    if source.response.status_code == 204:
                        return
                    source.response.raise_for_status()
                    for event in source.iter_sse():
                        if event.data:  # a comment that keeps the line open comes as an event without data
                            seen = int(event.id)
                            yield seen
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                self.passed_over.append(f"stream: {type(error).__name__}")
                time.sleep(0.1)
        raise TimeoutError(job["id"])


@dataclass
class Topology:
    """Everything that runs. `folder` holds control/ (of the fake child), data/ (the jobs' disk), logs and databases.

    postgres  None with SQLite
    """

    folder: Path
    hub: DevHub
    redis: RedisServer
    postgres: PostgresServer | None
    settings: dict[str, str]
    workers: list[Part]
    apis: list[Part]
    store: JobStore
    tokens: dict[str, str]
    _callers: dict[str, Caller] = field(default_factory=dict)

    def caller(self, name: str = "ada") -> Caller:
        if name not in self._callers:
            self._callers[name] = Caller([api.url for api in self.apis], self.tokens[name])
        return self._callers[name]

    def mode(self, mode: str, target: str = "") -> None:
        """How the fake child will behave: for one job's target, or for all that nothing was said about."""
        own = f"mode-{target.rpartition('/')[2]}" if target else "mode"
        draft = self.folder / "control" / f"{own}.draft"
        draft.write_text(mode)
        draft.replace(draft.with_suffix(""))

    def worker_of(self, job: Json) -> Part:
        """The worker whose child converts a job."""

        def found() -> Part | None:
            for worker in self.workers:
                for child in worker.converting():
                    with contextlib.suppress(psutil.Error):
                        if job["id"] in child.cwd():
                            return worker
            return None

        worker: Part = wait_for(found)
        return worker

    def child_of(self, job: Json) -> psutil.Process:
        [child] = [child for child in self.worker_of(job).converting() if job["id"] in child.cwd()]
        return child

    def make_whole(self) -> None:
        """Start what is down, and forget the faults that were asked for."""
        self.hub.clear_faults()
        for part in (*self.workers, *self.apis):
            part.start()
        for api in self.apis:
            wait_for(lambda api=api: is_ready(api.url), 60)

    @contextlib.contextmanager
    def another_worker(self, **settings: str) -> Iterator[Part]:
        """One with settings of its own."""
        worker = _worker(self.folder, len(self.workers) + 1, {**self.settings, **settings}, "fake", 1)
        worker.start()
        try:
            yield worker
        finally:
            worker.kill_tree()

    @contextlib.contextmanager
    def locked_sqlite(self) -> Iterator[None]:
        """Nobody else writes."""
        path = self.settings["KVALIGN_DATABASE_URL"].removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            try:
                yield
            finally:
                other.execute("ROLLBACK")

    def see_workers(self) -> None:
        """Wait until every worker listens: one that does not yet is simply ended by a SIGTERM."""

        def seen() -> bool:
            with self.store.database.read() as session:
                names = session.scalars(select(WorkerRow.name)).all()
            return {str(worker.pid) for worker in self.workers} <= {name.rpartition(":")[2] for name in names}

        wait_for(seen, 60)

    def workspaces(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "data" / "jobs").glob("job_*"))

    def commits_of(self, job: Json) -> list[str]:
        """Ids of the commits in the job's target that name the job."""
        try:
            repo = self.hub.storage.find(parse_repo_spec(job["config"]["target"]["repo"]))
            return [commit.oid for commit in repo.history("main") if job["id"] in commit.title]
        except HubError:
            return []

    def assert_published_once(self, done: Json) -> None:
        assert self.commits_of(done) == [done["result"]["commit"]]

    def logs(self) -> str:
        return "".join(part.log.read_text(errors="replace") for part in (*self.workers, *self.apis))

    def close(self) -> None:
        for caller in self._callers.values():
            caller.http.close()
        self.store.close()
        for part in (*self.workers, *self.apis):
            part.kill_tree()


@contextlib.contextmanager
def running_topology(
    folder: Path, database: str, *, child: str = "fake", concurrency: int = 1, model: Path | None = None, **more: str
) -> Iterator[Topology]:
    """Start it all: two workers, two APIs. `more` are settings; a model that a real child can read must be given."""
    with contextlib.ExitStack() as stack:
        (folder / "control").mkdir(parents=True)
        (folder / "redis").mkdir()
        if child == "real":
            (folder / "data").mkdir()
            COMPILED.mkdir(parents=True, exist_ok=True)
            (folder / "data" / "cache").symlink_to(COMPILED)
        hub = stack.enter_context(running_devhub(folder / "hub", "--faults"))
        tokens = {name: f"hf_{secrets.token_hex(17)}" for name in ("ada", "ben")}
        for name, token in tokens.items():
            hub.storage.add_user(name, token)  # behind its back: no token is on a command line
        import_folder(hub.storage, parse_repo_spec(SOURCE), model or write_model(folder / "model"))
        redis = RedisServer(folder / "redis", append=True, password=secrets.token_hex(8))
        stack.callback(redis.kill)
        postgres = stack.enter_context(running_postgres()) if database == "postgresql" else None
        settings = {
            "KVALIGN_DATA_DIR": str(folder / "data"),
            "KVALIGN_DATABASE_URL": postgres.url if postgres else f"sqlite:///{folder / 'jobs.db'}",
            "KVALIGN_REDIS_URL": redis.url,
            "KVALIGN_SECRET_KEY": Fernet.generate_key().decode(),
            "KVALIGN_HUB_ENDPOINT": hub.url,
            "KVALIGN_LEASE_S": str(LEASE_S),
            "KVALIGN_HEARTBEAT_S": "0.5",
            "KVALIGN_SWEEP_S": "0.5",
            "KVALIGN_SSE_POLL_S": "0.3",
            "KVALIGN_WORKER_SEEN_WITHIN_S": "30",
            "KVALIGN_RUNNING_PER_TENANT": "4",
            "KVALIGN_ALIVE_PER_TENANT": "100",
            **more,
        }
        store = JobStore.open(settings["KVALIGN_DATABASE_URL"], settings["KVALIGN_SECRET_KEY"])
        topology = Topology(
            folder, hub, redis, postgres, settings,
            workers=[_worker(folder, i, settings, child, concurrency) for i in (1, 2)],
            apis=[_api(folder, i, settings) for i in (1, 2)],
            store=store, tokens=tokens,
        )  # fmt: skip
        stack.callback(topology.close)
        topology.mode("convert")
        topology.make_whole()
        yield topology


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    program = find_postgres()
    assert program is not None, "no PostgreSQL is installed"
    with tempfile.TemporaryDirectory(prefix="kvalign-") as folder:  # pytest's folders let nobody else in
        server = PostgresServer(program, Path(folder))
        try:
            yield server
        finally:
            server.stop()


def _worker(folder: Path, number: int, settings: dict[str, str], child: str, concurrency: int) -> Part:
    command = [sys.executable, str(HERE.parent / "worker_main.py"), str(folder / "control"), str(concurrency)]
    if child == "real":
        command = [*_python("worker.cli:worker"), "--concurrency", str(concurrency)]
    return Part(f"worker-{number}", command, environment(**settings), folder / f"worker-{number}.log")


def _api(folder: Path, number: int, settings: dict[str, str]) -> Part:
    port = free_port()
    part = Part(
        f"api-{number}", _python("service.cli:api"), environment(**settings, KVALIGN_PORT=str(port)),
        folder / f"api-{number}.log",
    )  # fmt: skip
    part.url = f"http://127.0.0.1:{port}"
    return part


def _python(entry: str) -> list[str]:
    module, name = entry.split(":")
    return [sys.executable, "-P", "-c", f"from {module} import {name}; {name}()"]


def environment(**more: str) -> dict[str, str]:
    """Ours without settings or tokens of whoever runs this."""
    foreign = ("KVALIGN_", "HF_", "HUGGING", "TRANSFORMERS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that nobody has waited for is dead all the same."""
    living = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False, timeout=10).is_success
    except httpx.TransportError:
        return False
