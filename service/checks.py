"""What an operator wants to know before jobs do: each check looks at one thing, changes nothing, and tells a remedy.

No check prints or waits for another; none puts a password into what it says. Must import no tensor library.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import httpx
import redis
from sqlalchemy.exc import SQLAlchemyError

from kvalign.errors import ConfigInvalid
from service.broker import open_broker
from service.settings import ServiceSettings
from worker.database import Database, Revision
from worker.secret_key import cipher_of
from worker.store import JobStore

ANSWER_S = 4.0
"""How long one connection is waited for."""

_NVIDIA = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


class State(StrEnum):
    OK = "ok"
    WARN = "warn"  # jobs can be done, or will be soon; something is not as it should be
    FAIL = "FAIL"  # jobs cannot be done, or can be lost


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` is empty where nothing is to be done."""

    state: State
    fact: str
    remedy: str = ""


Check = Callable[[ServiceSettings], Finding]


def check_database(settings: ServiceSettings) -> Finding:
    """Whether it answers, and has the tables that this kvalign knows."""
    where = masked(settings.database)
    try:
        database = Database.as_found(settings.database)
        if database is None:
            return Finding(State.WARN, f"{where} is not there yet.", "The first start of the API or a worker makes it.")
        try:
            return _judge(where, database.revision())
        finally:
            database.close()
    except ConfigInvalid as error:
        return Finding(State.FAIL, error.message, f"Correct KVALIGN_DATABASE_URL. {error.remedy}")
    except SQLAlchemyError as error:
        return Finding(
            State.FAIL,
            f"{where} does not answer ({_kind(error)}).",
            "Start the database, or correct KVALIGN_DATABASE_URL.",
        )


def _judge(where: str, revision: Revision) -> Finding:
    if revision.found == revision.head:
        return Finding(State.OK, f"{where} answers, at migration {revision.head}, the newest.")
    if revision.found is None:
        return Finding(
            State.WARN,
            f"{where} answers and holds no tables yet.",
            "The first start of the API or a worker makes them.",
        )
    if revision.found in revision.known:
        return Finding(
            State.FAIL,
            f"{where} is at migration {revision.found}; this kvalign needs {revision.head}.",
            "Start the API or a worker of this kvalign: it brings the tables up to date.",
        )
    return Finding(
        State.FAIL,
        f"{where} is at a migration that this kvalign, which ends at {revision.head}, does not know.",
        "Upgrade kvalign here to the version that wrote the database, or name another database.",
    )


def check_broker(settings: ServiceSettings) -> Finding:
    """Whether Redis answers, and keeps what it is given: on disk, and when its memory is full."""
    where = f"Redis at {masked(settings.redis_url)}"
    try:
        with open_broker(settings.redis_url, answer_s=ANSWER_S) as client:
            said = client.info()
    except (redis.RedisError, ValueError, OSError) as error:
        return Finding(
            State.FAIL,
            f"{where} does not answer ({type(error).__name__}).",
            "Start it, or correct KVALIGN_REDIS_URL; jobs are kept in the database meanwhile.",
        )
    assert isinstance(said, dict)
    flaws = []
    if not said.get("aof_enabled"):
        flaws.append(("keeps nothing on disk", "appendonly yes"))
    if said.get("maxmemory_policy") != "noeviction":
        flaws.append(("may drop messages when its memory is full", "maxmemory-policy noeviction"))
    if flaws:
        facts, remedies = (" and ".join(words) for words in zip(*flaws, strict=True))
        return Finding(State.WARN, f"{where} answers, but {facts}.", f"Set {remedies} in its configuration.")
    return Finding(State.OK, f"{where} answers, appends to disk and evicts nothing.")


def check_hub(settings: ServiceSettings) -> Finding:
    """Whether the Hub's endpoint answers a stranger; which status it gives one does not matter."""
    where = f"The Hub at {masked(settings.hub_endpoint)}"
    remedy = "Check KVALIGN_HUB_ENDPOINT, name service and proxy of this machine; or wait for the Hub."
    try:
        status = httpx.head(settings.hub_endpoint, timeout=ANSWER_S).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Finding(State.FAIL, f"{where} does not answer ({type(error).__name__}).", remedy)
    if status >= 500:
        return Finding(State.FAIL, f"{where} answers with status {status}.", remedy)
    return Finding(State.OK, f"{where} answers.")


def check_workspace(settings: ServiceSettings) -> Finding:
    """Whether jobs' folders can be written, and how much fits. A folder that is not there yet is not made."""
    wanted = settings.data_dir / "jobs"
    remedy = "Give its owner the right to write there, or name another folder in KVALIGN_DATA_DIR."
    try:
        folder = next(path for path in (wanted, *wanted.parents) if path.exists())
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(State.FAIL, f"{wanted} cannot be written to ({error.strerror}).", remedy)
    fact = f"{wanted} can be written; {free:,} bytes are free, the minimum is {settings.free_disk_min_bytes:,}."
    if free < settings.free_disk_min_bytes:
        return Finding(State.FAIL, fact, "Free some, use a larger disk, or set KVALIGN_FREE_DISK_MIN_BYTES lower.")
    return Finding(State.OK, fact)


def check_worker(settings: ServiceSettings) -> Finding:
    """Whether a worker was seen lately; why the database does not tell is another check's matter."""
    within_s = settings.worker_seen_within_s
    remedy = "Start one with 'kvalign worker', with the same database, Redis and secret key."
    try:
        alive = _live_workers(settings, within_s)
    except (SQLAlchemyError, ConfigInvalid):
        return Finding(State.WARN, "The database does not tell which workers live.", "See the check 'database'.")
    if not alive:
        return Finding(State.WARN, f"No worker was seen in the last {within_s:g} s: jobs wait.", remedy)
    return Finding(State.OK, f"{alive} seen in the last {within_s:g} s.")


def _live_workers(settings: ServiceSettings, within_s: float) -> int:
    database = Database.as_found(settings.database)
    if database is None:
        return 0
    store = JobStore(database, cipher_of(settings.secret_key.get_secret_value()), settings.alive_per_tenant)
    try:
        return store.live_workers(within_s)
    finally:
        store.close()


def check_kernels(_settings: ServiceSettings) -> Finding:
    """Whether what the kernels need is installed on this machine. They load in a worker's child, never here."""
    missing = [name for name in ("torch", "numba") if find_spec(name) is None]
    if missing:
        return Finding(
            State.FAIL, f"{' and '.join(missing)} cannot be imported here.", "Run pip install kvalign again."
        )
    triton, cuda = find_spec("triton") is not None, any(device.exists() for device in _NVIDIA)
    if cuda and not triton:
        return Finding(
            State.WARN,
            "torch and numba are installed; there is a CUDA device, and triton, which its kernels need, is missing.",
            "Run pip install triton; until then resident attention is slow on CUDA.",
        )
    device = "a CUDA device is there" if cuda else "no CUDA device is there, so the processor does the work"
    return Finding(State.OK, f"torch, numba{' and triton' if triton else ''} are installed; {device}.")


def check_sandbox(_settings: ServiceSettings) -> Finding:
    """Whether a converting process on this machine has its network taken away. Tried in a process of its own."""
    tried = subprocess.run([sys.executable, "-P", "-m", "worker.sandbox"], capture_output=True, check=False)
    if tried.returncode:
        return Finding(
            State.WARN,
            "Converting processes keep their network here: the kernel sets no seccomp filter.",
            "Run workers on Linux on x86_64 or aarch64 with seccomp, or in a container without a route outwards.",
        )
    return Finding(State.OK, "Converting processes can open no socket.")


def masked(url: str) -> str:
    """A URL that may be shown: without what stands before its host, and without its query.

    Where characters of a password that are not escaped leave several readings, only the scheme is shown.

    >>> masked("redis://:secret@host:6379/0?password=x")
    'redis://***@host:6379/0'
    >>> masked("redis://:sec?r@et@host:6379/0")
    'redis://***'
    """
    scheme, _, rest = url.partition("://")
    before_query = re.split(r"[?#]", rest, maxsplit=1)[0]
    if rest.count("@") != before_query.count("@") or rest.count("@") > 1:
        return f"{scheme}://***"
    credentials, at, place = before_query.rpartition("@")
    return f"{scheme}://{'***' if credentials else ''}{at}{place}"


def _kind(error: SQLAlchemyError) -> str:
    return type(getattr(error, "orig", None) or error).__name__


CHECKS: dict[str, Check] = {
    "database": check_database,
    "broker": check_broker,
    "hub": check_hub,
    "workspace": check_workspace,
    "worker": check_worker,
    "kernels": check_kernels,
    "sandbox": check_sandbox,
}
