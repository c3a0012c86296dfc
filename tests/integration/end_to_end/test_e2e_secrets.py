"""The caller's token is nowhere where somebody could find it, while a job runs and after it."""

import base64
import contextlib
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from e2e_services import CHILD, LONG, Json, Services, conversion, wait_for

CANARY = f"hf_{secrets.token_hex(17)}"


@pytest.fixture
def eve(services: Services) -> str:
    services.hub.storage.add_user("eve", CANARY)
    return CANARY


def spellings(secret: str) -> list[bytes]:
    """How a secret might be written down."""
    raw = secret.encode()
    return [raw, base64.b64encode(raw)[:-4], base64.urlsafe_b64encode(raw)[:-4], raw.hex().encode()]


def places(services: Services) -> Iterator[tuple[str, bytes]]:
    """Everything written so far: databases, queue, logs, workspaces, the Hub's folder, what the API answered."""
    for path in services.folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield str(path.relative_to(services.folder)), path.read_bytes()
    with redis.Redis.from_url(services.settings["KVALIGN_REDIS_URL"]) as client:
        for key in client.keys("*"):
            yield f"redis {key!r}", bytes(client.dump(key) or b"")
    yield "the API's answers", "\n".join(services.heard).encode()
    for path in (Path.home() / ".cache" / "huggingface").glob("*token*"):
        yield str(path), path.read_bytes()


def processes() -> Iterator[tuple[str, bytes]]:
    """Command lines and environments of every process there is."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            yield f"command line of {command[:200]!r}", command
            yield f"environment of {command[:200]!r}", (folder / "environ").read_bytes()


def found_in(secret: str, written: Iterator[tuple[str, bytes]]) -> list[str]:
    marks = spellings(secret)
    return [where for where, what in written if any(mark in what for mark in marks)]


def test_the_search_finds_what_is_there(services: Services) -> None:
    """Else finding nothing would mean nothing."""
    job = services.person().submit(conversion("ada/llama", "ada/findable", labels={"needle": "haystack-4711"}))
    services.person().cancel(job)
    services.person().reach(job, "canceled")
    found = found_in(job["id"], places(services))
    for where in ("jobs.db", "appendonly.aof", "api.log", "the API's answers"):
        assert any(where in place for place in found), (where, found)
    assert found_in(services.settings["KVALIGN_SECRET_KEY"], processes())


def test_a_token_is_nowhere_to_be_found(services: Services, eve: str) -> None:
    person, worker = services.person(eve), services.running_worker()
    # A Hub that stumbles makes the client complain, and complaints are what secrets leak by.
    services.hub.fault(method="GET", path_regex="/ada/gpt2/resolve/.*model.safetensors", status=503)
    services.hub.fault(method="GET", path_regex="/ada/gpt2/resolve/.*model.safetensors", cut_after_bytes=1000)
    services.hub.fault(method="POST", path_regex="/eve/secret/commit/", apply_then_cut=True)
    job = person.submit(conversion("ada/gpt2", "eve/secret", calibration=LONG))
    person.see(job, "calibrate", unit="sequences", done=10)
    [child] = worker.converting()
    environment = child.environ()
    assert not [name for name in environment if name.startswith("KVALIGN") or "TOKEN" in name.replace("TOKENIZERS", "")]
    assert any(CHILD in what.decode(errors="replace") for _, what in processes())
    assert found_in(eve, processes()) == []
    assert found_in(eve, places(services)) == []
    assert tokens_kept(services, job) == 1

    done = person.reach(job, "succeeded")
    assert services.commits_of(done) == [done["result"]["commit"]]
    assert person.events(job)
    assert list(person.stream(job))
    with redis.Redis.from_url(services.settings["KVALIGN_REDIS_URL"]) as client:
        client.bgsave()
        wait_for(lambda: (services.folder / "redis" / "dump.rdb").exists())
    assert found_in(eve, places(services)) == []
    assert found_in(eve, processes()) == []
    assert tokens_kept(services, job) == 0


def test_the_key_that_tokens_are_stored_under_is_not_written_down(services: Services) -> None:
    key = services.settings["KVALIGN_SECRET_KEY"]
    assert found_in(key, places(services)) == []


def tokens_kept(services: Services, job: Json) -> int:
    """Encrypted tokens in the database, of one job."""
    with contextlib.closing(sqlite3.connect(f"file:{services.folder / 'jobs.db'}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM job_tokens WHERE job_id = ?", (job["id"],)).fetchone()[0])
