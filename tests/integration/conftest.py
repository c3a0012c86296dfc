"""Real services for the integration tests: Redis, SQLite, PostgreSQL. Each test finds them empty."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from cryptography.fernet import Fernet
from local_servers import PostgresServer, RedisServer, find_postgres

from worker.store import JobStore


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
def postgres_program() -> Path:
    """Where none is installed, tests that want it are skipped, and fail in CI."""
    server = find_postgres()
    if server is None:
        if os.environ.get("CI"):
            pytest.fail("no PostgreSQL is installed")
        pytest.skip("no PostgreSQL is installed")
    return server


@pytest.fixture(scope="session")
def postgresql_url(postgres_program: Path) -> Iterator[str]:
    """A PostgreSQL of this session's own."""
    with tempfile.TemporaryDirectory(prefix="kvalign-") as folder:  # pytest's folders let nobody else in
        server = PostgresServer(postgres_program, Path(folder))
        yield server.url
        server.stop()


@pytest.fixture
def secret_key() -> str:
    return Fernet.generate_key().decode()


@pytest.fixture
def store(database_url: str, secret_key: str) -> Iterator[JobStore]:
    """An empty job store, in SQLite and in PostgreSQL."""
    opened = JobStore.open(database_url, secret_key)
    yield opened
    opened.close()
