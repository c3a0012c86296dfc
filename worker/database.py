"""Opens the database, brings its tables up to date and hands out transactions; knows no rule about jobs.

SQLite runs in WAL mode with one writer at a time: a writing transaction takes the write lock at its beginning
(BEGIN IMMEDIATE), because one that first reads and then writes would fail at once instead of waiting. Who waits for
another process sleeps up to a tenth of a second at a time, so the threads of one process take turns before that.
PostgreSQL runs READ COMMITTED; code locks the rows it changes, and names an advisory lock where it decides
something over many rows.
"""

import fcntl
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.orm import Session

from kvalign.errors import ConfigInvalid

BUSY_TIMEOUT_S = 15
_NOTICE_A_DEAD_PEER = {  # or a network that swallows packets holds up a query for a quarter of an hour
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}
POOL_SIZE = 20
AWAY: tuple[type[DBAPIError], ...] = (OperationalError, InterfaceError)
"""What is raised while the database does not answer: asking again later may help."""

_log = logging.getLogger(__name__)
T = TypeVar("T")
_MIGRATIONS = Path(__file__).parent / "migrations"


@dataclass(frozen=True)
class Revision:
    """How far a database has been migrated.

    found  its migration; None when it has no tables of ours yet
    known  the migrations of this kvalign, the oldest first
    """

    found: str | None
    known: tuple[str, ...]

    @property
    def head(self) -> str:
        return self.known[-1]


class Database:
    """Transactions on one database; safe to share between threads, not across a fork (see close)."""

    def __init__(self, engine: Engine) -> None:
        self._reader = engine
        self._writer = engine.execution_options(kvalign_write=True)
        self.is_postgresql = engine.dialect.name == "postgresql"
        self._turn: AbstractContextManager[Any] = nullcontext() if self.is_postgresql else threading.Lock()

    @classmethod
    def open(cls, url: str) -> "Database":
        """Connect and migrate. Raises ConfigInvalid for a URL that names neither SQLite nor PostgreSQL."""
        parsed = _checked_url(url)
        database = cls(_engine(parsed))
        with _opening_lock(parsed):
            database._migrate()
        return database

    @classmethod
    def as_found(cls, url: str) -> "Database | None":
        """One that is looked at and not migrated; None for a SQLite file that is not there. Raises ConfigInvalid."""
        parsed = _checked_url(url)
        if parsed.get_backend_name() == "sqlite" and not Path(str(parsed.database)).exists():
            return None
        return cls(_engine(parsed))

    @contextmanager
    def read(self) -> Iterator[Session]:
        with Session(self._reader) as session:
            yield session

    @contextmanager
    def write(self, *, lock: str | None = None) -> Iterator[Session]:
        """A writing transaction, committed on leaving; `lock` names what it alone may decide meanwhile."""
        with self._turn, Session(self._writer) as session, session.begin():
            if lock is not None and self.is_postgresql:
                session.execute(select(func.pg_advisory_xact_lock(_lock_number(lock))))
            yield session

    def now(self, session: Session) -> datetime:
        """The time that leases are measured by: the database's own where machines could disagree."""
        if self.is_postgresql:
            return session.execute(select(func.clock_timestamp())).scalar_one().astimezone(UTC)
        return datetime.now(UTC)

    def revision(self) -> "Revision":
        """Which migration the tables are at. Changes nothing."""
        known = [script.revision for script in ScriptDirectory(str(_MIGRATIONS)).walk_revisions()]
        with self._reader.connect() as connection:
            return Revision(MigrationContext.configure(connection).get_current_revision(), tuple(reversed(known)))

    def close(self) -> None:
        """Close every idle connection; the next transaction opens a new one.

        A process that forks must have closed SQLite before: a child inherits its locks without holding them.
        """
        self._reader.dispose()

    def _migrate(self) -> None:
        if not self.is_postgresql:
            with self._reader.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode = WAL")
        with self._writer.begin() as connection:
            if self.is_postgresql:
                connection.execute(select(func.pg_advisory_xact_lock(_lock_number("migrations"))))
            config = Config()
            config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _checked_url(url: str) -> URL:
    remedy = "Write sqlite:////folder/jobs.db or postgresql://user:password@host/name."
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigInvalid("The database URL cannot be read.", remedy) from None
    if parsed.drivername in {"postgres", "postgresql"}:
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in {"sqlite", "postgresql"}:
        raise ConfigInvalid(f"The database URL names '{parsed.drivername}'.", remedy)
    if parsed.get_backend_name() == "sqlite" and parsed.database in {None, "", ":memory:"}:
        raise ConfigInvalid("A database in memory cannot be shared between processes.", remedy)
    return parsed


def _engine(url: URL) -> Engine:
    engine = create_engine(url, **_options(url))
    if url.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _options(url: URL) -> dict[str, Any]:
    """As many connections are kept as are used at once: one beyond `pool_size` is closed after each transaction."""
    if url.get_backend_name() == "sqlite":
        return {"pool_size": POOL_SIZE, "connect_args": {"timeout": BUSY_TIMEOUT_S}}
    patience = {"connect_timeout": 10, **_NOTICE_A_DEAD_PEER}
    return {"pool_size": POOL_SIZE, "pool_pre_ping": True, "connect_args": patience}


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; see _begin_sqlite
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = FULL")  # an accepted job outlives a power cut
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("kvalign_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _opening_lock(url: URL) -> AbstractContextManager[None]:
    """Turning WAL on does not wait for other openers, so they take turns on a file beside the database."""
    if url.get_backend_name() != "sqlite":
        return nullcontext()
    return _file_lock(Path(f"{url.database}.lock"))


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _lock_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def insist(write: Callable[[], T], for_s: float) -> T:
    """Repeat a transaction while the database does not answer, for that long. It may happen twice."""
    deadline = time.monotonic() + for_s
    while True:
        try:
            return write()
        except AWAY as error:
            if time.monotonic() > deadline:
                raise
            _log.warning("the database does not answer (%s); trying again", type(error.orig).__name__)
            time.sleep(1)
