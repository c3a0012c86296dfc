"""The caller's token is nowhere where somebody could find it, while a job runs and after it."""

import base64
import contextlib
import json
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from e2e_services import CHILD, LONG, STAGES, Json, Services, conversion, wait_for
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE = secrets.token_hex(16)
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
    yield "/metrics", httpx.get(f"{services.url}/metrics", trust_env=False).content
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
    # Its attempt ends, and says so, a moment after its row: until then the log and the trace have yet to tell.
    wait_for(lambda: services.person().job(job)["attempts"])
    services.person().cancel(job)
    services.person().reach(job, "canceled")
    wait_for(lambda: any(span.name == "job attempt" for span in spans_of(services, job)))
    found = found_in(job["id"], places(services))
    for where in ("jobs.db", "appendonly.aof", "api.log", "the API's answers", "worker.log", "traces"):
        assert any(where in place for place in found), (where, found)
    assert found_in(services.settings["KVALIGN_SECRET_KEY"], processes())


def test_a_token_is_nowhere_to_be_found(services: Services, eve: str) -> None:
    person, worker = services.person(eve), services.running_worker()
    # A Hub that stumbles makes the client complain, and complaints are what secrets leak by.
    services.hub.fault(method="GET", path_regex="/ada/gpt2/resolve/.*model.safetensors", status=503)
    services.hub.fault(method="GET", path_regex="/ada/gpt2/resolve/.*model.safetensors", cut_after_bytes=1000)
    services.hub.fault(method="POST", path_regex="/eve/secret/commit/", apply_then_cut=True)
    asked = {"X-Request-Id": "request-of-eve", "traceparent": f"00-{TRACE}-{'b' * 16}-01"}
    job = person.submit(conversion("ada/gpt2", "eve/secret", calibration=LONG), **asked)
    person.see(job, "calibrate", unit="sequences", done=10)
    [child] = worker.converting()
    assert "Seccomp:\t2\n" in Path(f"/proc/{child.pid}/status").read_text()  # it can open no socket
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
    tells_of_the_job(services, done)


def tells_of_the_job(services: Services, job: Json) -> None:
    """The same run, as those follow it who operate the service: by its log, and by its trace."""
    lines = [json.loads(line) for line in services.log("worker").splitlines()]
    lines = [line for line in lines if line.get("job_id") == job["id"]]
    assert {(line["attempt"], line["request_id"]) for line in lines} == {(1, "request-of-eve")}
    assert [line["stage"] for line in lines if line["message"] == "stage finished"] == STAGES
    assert any(line["message"] == "attempt succeeded" for line in lines)

    wait_for(lambda: any(span.name == "job attempt" for span in spans_of(services, job)))
    trace = [(service, span) for service, span in services.traces.spans() if span.trace_id.hex() == TRACE]
    [request] = [span for service, span in trace if service == "kvalign-api"]
    assert (request.name, request.parent_span_id.hex()) == ("POST /v1/jobs", "b" * 16)
    [attempt] = [span for _, span in trace if span.name == "job attempt"]
    assert attempt.parent_span_id == request.span_id
    stages = [span for service, span in trace if span.name.startswith("stage ")]
    assert [span.name for span in sorted(stages, key=lambda span: span.end_time_unix_nano)] == [
        f"stage {stage}" for stage in STAGES
    ]
    for span in stages:
        assert span.parent_span_id == attempt.span_id
        assert attempt.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= attempt.end_time_unix_nano


def spans_of(services: Services, job: Json) -> list[Span]:
    """Spans that name a job."""
    return [
        span for _, span in services.traces.spans() if any(a.value.string_value == job["id"] for a in span.attributes)
    ]


def test_the_key_that_tokens_are_stored_under_is_not_written_down(services: Services) -> None:
    key = services.settings["KVALIGN_SECRET_KEY"]
    assert found_in(key, places(services)) == []


def tokens_kept(services: Services, job: Json) -> int:
    """Encrypted tokens in the database, of one job."""
    with contextlib.closing(sqlite3.connect(f"file:{services.folder / 'jobs.db'}?mode=ro", uri=True)) as database:
        return int(database.execute("SELECT count(*) FROM job_tokens WHERE job_id = ?", (job["id"],)).fetchone()[0])
