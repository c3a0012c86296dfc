"""The client commands as programs, against a real API: what they print, how they end, what they never print."""

import itertools
import json
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from service_harness import ALICE, Api, command, config, end, environment, free_port, start_api, stop_api

from kvalign.errors import QualityGate
from worker.jobs import Job, JobError, JobResult, Progress, Stage
from worker.leases import Lease, Leases

_numbers = itertools.count()


def kvalign(
    api: Api | None, name: str, *arguments: str, token: str | None = ALICE, **settings: str
) -> subprocess.CompletedProcess[str]:
    known = {"KVALIGN_TOKEN": token} if token else {}
    url = {"KVALIGN_API": api.url} if api else {}
    done = subprocess.run(
        command(f"service.client:{name}", *arguments),
        env=environment(**url, **known, **settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ALICE not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def new_job(api: Api) -> Job:
    name = f"alice/client-{next(_numbers)}"
    return api.store.submit("alice", config(name), source_commit="0" * 40, token="none").job


def claim(api: Api, job_id: str) -> Lease:
    leases = Leases(api.store, lease_s=60, running_limit=99)
    return next(lease for lease in iter(lambda: leases.claim("test"), None) if lease.job.id == job_id)


def test_submit_from_flags(service_api: Api) -> None:
    name = f"alice/client-{next(_numbers)}"
    done = kvalign(
        service_api,
        "submit",
        *("carol/tiny", name, "--ratio", "8", "--layout", "codec", "--calibration-tokens", "2048"),
        *("--label", "team=blue", "--label", "run=1=2", "--json"),
    )
    assert done.returncode == 0, done.stderr
    sent = json.loads(done.stdout)["config"]
    assert sent["target"] == {"repo": name, "layout": "codec", "visibility": "private", "on_existing": "fail"}
    assert (sent["codec"]["ratio"], sent["codec"]["max_kl"]) == (8, None)
    assert sent["calibration"]["tokens"] == 2048
    assert sent["labels"] == {"team": "blue", "run": "1=2"}


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_submit_from_a_file_with_flags_before_it(service_api: Api, tmp_path: Path, suffix: str) -> None:
    name = f"alice/client-{next(_numbers)}"
    file = tmp_path / f"job{suffix}"
    if suffix == ".json":
        file.write_text(json.dumps({"source": {"repo": "carol/tiny"}, "target": {"repo": name}, "codec": {"ratio": 4}}))
    else:
        file.write_text(f'[source]\nrepo = "carol/tiny"\n[target]\nrepo = "{name}"\n[codec]\nratio = 4\n')
    done = kvalign(service_api, "submit", "--config", str(file), "--max-kl", "0.1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["config"]["codec"]["max_kl"] == 0.1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "SOURCE"),
        (("carol/tiny",), "TARGET"),
        (("carol/tiny", "alice/x", "--max-kl", "much"), "--max-kl"),
        (("carol/tiny", "alice/x", "--max-kl", "1", "--ratio", "2"), "exactly one"),
        (("carol/tiny", "alice/x", "--label", "nonsense"), "KEY=VALUE"),
        (("carol/tiny", "alice/x", "--config", "/nowhere.toml"), "nowhere"),
        (("carol/tiny", "alice/x", "--api", "ftp://host"), "http"),
    ],
)
def test_wrong_usage_exits_2(service_api: Api, arguments: tuple[str, ...], word: str) -> None:
    done = kvalign(service_api, "submit", *arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert done.stdout == ""


def test_a_token_is_asked_for(service_api: Api) -> None:
    done = kvalign(service_api, "jobs", token=None)
    assert (done.returncode, "HF_TOKEN" in done.stderr) == (2, True)
    assert kvalign(service_api, "jobs", token=None, HF_TOKEN=ALICE).returncode == 0


def test_refusals_show_message_and_remedy(service_api: Api) -> None:
    done = kvalign(service_api, "submit", "carol/gated", "alice/never")
    assert done.returncode == 1
    message, remedy = done.stderr.strip().splitlines()
    assert "gated" in message
    assert "terms" in remedy


def test_an_api_that_is_not_there() -> None:
    done = kvalign(None, "jobs", "--api", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert "does not answer" in done.stderr


def test_jobs_are_listed(service_api: Api) -> None:
    job = new_job(service_api)
    plain = kvalign(service_api, "jobs", "--state", "queued")
    assert plain.returncode == 0
    [line] = [line for line in plain.stdout.splitlines() if job.id in line]
    assert line.split()[:2] == [job.id, "queued"]
    assert job.config.target.repo in line
    listed = json.loads(kvalign(service_api, "jobs", "--limit", "1", "--json").stdout)
    assert (listed["data"][0]["id"], listed["has_more"]) == (job.id, True)


def test_cancel_and_retry(service_api: Api) -> None:
    job = new_job(service_api)
    assert kvalign(service_api, "cancel", job.id).stdout.split() == [job.id, "canceled"]
    assert json.loads(kvalign(service_api, "retry", job.id, "--json").stdout)["state"] == "queued"
    assert kvalign(service_api, "cancel", "job_nothing").returncode == 1


def run_to_success(api: Api, job_id: str) -> None:
    lease = claim(api, job_id)
    lease.stage_started(Stage.PULL)
    for done in range(0, 1001, 50):
        lease.progress(Progress(Stage.PULL, done * 1000, 1_000_000, "bytes"), tell=True)
    lease.stage_finished(Stage.PULL, 2.0)
    lease.succeed(JobResult("alice/x", "c" * 40, "http://hub/alice/x", 12.5, 0.0123, 0.97))


def test_watch_a_job_to_its_success(service_api: Api) -> None:
    job = new_job(service_api)
    runner = threading.Timer(1.0, run_to_success, (service_api, job.id))
    runner.start()
    done = kvalign(service_api, "watch", job.id)
    runner.join()
    assert done.returncode == 0, done.stderr
    assert "succeeded" in done.stdout
    assert "http://hub/alice/x" in done.stdout
    assert "ratio 12.5" in done.stdout
    assert 5 <= done.stdout.count("pull ") <= 15


def test_watch_a_job_to_its_failure(service_api: Api) -> None:
    job = new_job(service_api)
    claim(service_api, job.id).fail(JobError.of(QualityGate("KL is 0.9; the limit is 0.05.", "Ask for less.")))
    done = kvalign(service_api, "watch", job.id)
    assert done.returncode == 1
    assert "quality_gate" in done.stderr
    assert "Ask for less." in done.stderr
    records = [json.loads(line) for line in kvalign(service_api, "watch", job.id, "--json").stdout.splitlines()]
    assert [record["kind"] for record in records] == ["state", "state", "state", "job"]
    assert records[-1]["data"]["error"]["code"] == "quality_gate"


def test_submit_and_stay(service_api: Api) -> None:
    name = f"alice/client-{next(_numbers)}"

    def cancel_it() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for job in service_api.store.find(tenant="alice", limit=5).jobs:
                if job.config.target.repo == name:
                    service_api.store.request_cancel(job.id, tenant="alice")
                    return
            time.sleep(0.1)

    canceler = threading.Thread(target=cancel_it)
    canceler.start()
    done = kvalign(service_api, "submit", "carol/tiny", name, "--watch")
    canceler.join()
    assert done.returncode == 1
    assert "canceled" in done.stdout


def test_watch_outlives_a_restart_of_the_api(tmp_path: Path, service_hub: Any, service_redis: str) -> None:
    settings = {
        "KVALIGN_HUB_ENDPOINT": service_hub.url,
        "KVALIGN_REDIS_URL": service_redis,
        "KVALIGN_PORT": str(free_port()),
    }
    first = start_api(tmp_path, **settings)
    second = None
    try:
        job = new_job(first)
        lease = claim(first, job.id)
        watcher = subprocess.Popen(
            command("service.client:watch", job.id, "--json", "--api", first.url),
            env=environment(KVALIGN_TOKEN=ALICE),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["id"] == 1
        stop_api(first)
        second = start_api(tmp_path, **{**settings, "KVALIGN_SECRET_KEY": first.settings["KVALIGN_SECRET_KEY"]})
        lease.stage_started(Stage.PULL)
        lease.succeed(JobResult("alice/x", "c" * 40, "http://hub/alice/x", 12.5, 0.01, 0.97))
        rest = [json.loads(line) for line in watcher.stdout]
        watcher.stdout.close()
        assert watcher.wait(30) == 0
        assert [record.get("id") for record in rest] == [2, 3, 4, None]
    finally:
        end(watcher)
        if second:
            stop_api(second)
