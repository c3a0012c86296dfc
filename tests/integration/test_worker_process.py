"""Whole jobs through a real Redis, worker process and devhub; only the converting child is a stand-in.

What becomes of them when a part fails is in faults/.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from devhub_fixture import DevHub, devhub_process, devhub_server, hub_client
from worker_harness import wait_for

from devhub.errors import HubError
from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from kvalign.config import ConversionConfig
from worker.app import create_celery, enqueue
from worker.jobs import ErrorCode, Job, JobState
from worker.settings import WorkerSettings
from worker.store import JobStore

__all__ = ["devhub_process", "devhub_server", "hub_client"]

HERE = Path(__file__).parent
TOKEN = "hf_me_writes"
LAYOUT = ["preflight", "pull", "calibrate", "align", "fit", "validate", "report", "publish"]


@dataclass
class Place:
    """Everything one worker works with, and ways to start and watch it."""

    settings: WorkerSettings
    store: JobStore
    hub: DevHub
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "worker.log").read_text()

    def mode(self, mode: str) -> None:
        """How the converting child will behave."""
        (self.folder / "mode").write_text(mode)

    def runs(self) -> list[int]:
        """Process ids of the children so far."""
        runs = self.folder / "runs"
        return [int(line) for line in runs.read_text().split()] if runs.exists() else []

    def start(self) -> subprocess.Popen[bytes]:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("KVALIGN_", "HF_"))},
            "PYTHONPATH": str(HERE.parents[1]),
            "KVALIGN_SECRET_KEY": self.settings.secret_key.get_secret_value(),
            "KVALIGN_DATA_DIR": str(self.settings.data_dir),
            "KVALIGN_DATABASE_URL": self.settings.database,
            "KVALIGN_REDIS_URL": self.settings.redis_url,
            "KVALIGN_HUB_ENDPOINT": self.hub.url,
            "KVALIGN_LEASE_S": "3",
            "KVALIGN_HEARTBEAT_S": "0.5",
            "KVALIGN_SWEEP_S": "0.5",
        }
        with (self.folder / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker_main.py"), str(self.folder)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def submit(self, name: str, **target: Any) -> Job:
        config = ConversionConfig.parse(
            {"source": {"repo": f"me/{name}"}, "target": {"repo": f"me/{name}-kvalign", **target}}
        )
        return self.store.submit("me", config, source_commit="", token=TOKEN).job

    def send(self, name: str, **target: Any) -> Job:
        """Submit, and wake a worker."""
        job = self.submit(name, **target)
        assert enqueue(create_celery(self.settings), job.id)
        return job

    def job(self, job: Job) -> Job:
        return self.store.get(job.id, tenant="me")

    def reach(self, job: Job, state: JobState, timeout_s: float = 30) -> Job:
        """Wait for a state; any other ending fails the test."""

        def reached() -> Job | None:
            now = self.job(job)
            assert now.state in {state, JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING}, (now.error, self.log)
            return now if now.state == state else None

        return wait_for(reached, timeout_s)  # type: ignore[no-any-return]

    def stage_events(self, job: Job, status: str) -> list[str]:
        events = self.store.events(job.id, tenant="me")
        return [event.data["stage"] for event in events if event.kind == "stage" and event.data["status"] == status]

    def wait_for_stage(self, job: Job, stage: str) -> None:
        wait_for(lambda: (progress := self.job(job).progress) and progress.stage == stage)

    def workspace(self, job: Job) -> Path:
        return self.settings.data_dir / "jobs" / job.id


@pytest.fixture
def place(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, secret_key: str, devhub_server: DevHub
) -> Iterator[Place]:
    """On SQLite, unless a test asks for the fixture `empty_postgresql`."""
    kind = getattr(request, "param", "sqlite")
    database_url = f"sqlite:///{tmp_path / 'jobs.db'}" if kind == "sqlite" else request.getfixturevalue(kind)
    settings = WorkerSettings.load(
        secret_key=secret_key, data_dir=tmp_path / "data", redis_url=redis_url, database_url=database_url
    )
    place = Place(settings, JobStore.open(settings.database, secret_key), devhub_server, tmp_path)
    place.mode("convert")
    yield place
    place.store.close()
    for process in place.processes:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest, devhub_server: DevHub) -> str:
    """The name of a model repo of this test's own."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1,
        "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    (folder / "LICENSE").write_text("Do good.")
    save_file({"model.embed_tokens.weight": np.zeros((16, 8), np.float32)}, folder / "model.safetensors")
    name = re.sub(r"\W+", "-", request.node.name.removeprefix("test_"))[:60].strip("-")
    import_folder(devhub_server.storage, parse_repo_spec(f"me/{name}"), folder)
    return name


def end(process: subprocess.Popen[bytes], timeout_s: float = 15) -> int:
    """Ask a worker to stop, as an init system does."""
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout_s)


def test_a_job_from_submission_to_the_published_model(place: Place, model: str) -> None:
    worker = place.start()
    job = place.send(model)
    done = place.reach(job, JobState.SUCCEEDED)
    assert done.result is not None
    assert (done.result.ratio, done.result.kl_mean, done.result.top1) == (12.5, 0.01, 0.97)
    assert done.result.repo == f"me/{model}-kvalign"
    info = place.hub.api().model_info(done.result.repo, files_metadata=True)
    assert info.sha == done.result.commit
    assert info.private
    names = {sibling.rfilename for sibling in info.siblings or []} - {".gitattributes"}
    assert names == {
        "README.md", "LICENSE", "config.json", "tokenizer.json", "model.safetensors", "report.json",
        "kvalign_config.json", "kvalign_codec.safetensors", "figures/kl.png",
    }  # fmt: skip
    assert place.stage_events(job, "started") == place.stage_events(job, "finished") == LAYOUT
    assert list(done.stage_seconds) == LAYOUT
    assert done.stage_seconds["fit"] == 0.25
    events = place.store.events(job.id, tenant="me")
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert place.store.report_files(job.id, tenant="me") == ["README.md", "figures/kl.png", "report.json"]
    wait_for(lambda: not place.workspace(job).exists())
    assert place.store.live_workers(10) == 1
    assert end(worker) == 0
    assert place.store.live_workers(10) == 0
    assert_no_secret(place)


def assert_no_secret(place: Place) -> None:
    """The token is nowhere where somebody could find it."""
    secrets = (TOKEN, place.settings.secret_key.get_secret_value())
    child = (place.folder / "environment").read_text()
    assert "KVALIGN" not in child
    with redis.Redis.from_url(place.settings.redis_url) as client:
        dumped = repr([(key, client.dump(key)) for key in client.keys("*")])
    with sqlite3.connect(place.folder / "jobs.db") as database:
        rows = "\n".join(database.iterdump())
    database.close()
    for secret in secrets:
        assert secret not in child
        assert secret not in place.log
        assert secret not in dumped
        assert secret not in rows


@pytest.mark.parametrize("place", ["sqlite", "empty_postgresql"], indirect=True)
def test_a_job_whose_message_never_arrived_is_found(place: Place, model: str) -> None:
    place.start()
    job = place.submit(model, layout="codec")
    done = place.reach(job, JobState.SUCCEEDED)
    assert done.result is not None
    names = place.hub.api().list_repo_files(done.result.repo)
    assert "model.safetensors" not in names
    assert "LICENSE" in names


@pytest.mark.parametrize("stage", ["preflight", "pull", "fit", "publish"])
def test_cancel_works_in_every_stage_within_five_seconds(place: Place, model: str, stage: str) -> None:
    stalls = {
        "preflight": "/resolve/.*/model.safetensors",
        "pull": "/resolve/.*/LICENSE",
        "publish": "-kvalign/commit/",
    }
    if stage in stalls:
        place.hub.fault(path_regex=f"{model}{stalls[stage]}", delay_s=60, times=9)
    else:
        place.mode("hang")
    worker = place.start()
    job = place.send(model)
    place.wait_for_stage(job, stage)
    time.sleep(1)
    began = time.monotonic()
    assert place.store.request_cancel(job.id, tenant="me").state == JobState.CANCELLING
    place.reach(job, JobState.CANCELED)
    assert time.monotonic() - began < 5
    wait_for(lambda: not place.workspace(job).exists())
    assert all(not psutil.pid_exists(pid) for pid in place.runs())
    assert end(worker) == 0  # what hung in the Hub's client does not hold it up


@pytest.mark.parametrize("told", ["main process", "every process"])
def test_sigterm_hands_the_job_back_and_the_next_worker_goes_on(place: Place, model: str, told: str) -> None:
    place.mode("hang")
    worker = place.start()
    job = place.send(model)
    place.wait_for_stage(job, "fit")
    began = time.monotonic()
    if told == "every process":
        os.killpg(worker.pid, signal.SIGTERM)
    assert end(worker) == 0
    assert time.monotonic() - began < 8
    handed = place.job(job)
    assert handed.state == JobState.QUEUED
    assert place.store.events(job.id, tenant="me")[-1].data["reason"] == "handed_back"
    assert all(not psutil.pid_exists(pid) for pid in place.runs())
    place.mode("convert")
    place.start()
    done = place.reach(job, JobState.SUCCEEDED)
    assert done.attempts == 2
    assert place.stage_events(job, "kept") == ["pull"]


def test_a_dead_child_fails_the_job_and_not_the_worker(place: Place, model: str) -> None:
    place.mode("die")
    worker = place.start()
    job = place.send(model)
    failed = place.reach(job, JobState.FAILED)
    assert failed.error is not None
    assert failed.error.code == ErrorCode.INTERNAL
    assert "SIGABRT" in failed.error.message
    assert str(place.folder) not in failed.error.message
    assert place.workspace(job).exists()
    place.mode("convert")
    place.store.retry(job.id, tenant="me", token=TOKEN)
    place.reach(job, JobState.SUCCEEDED)
    assert place.stage_events(job, "kept") == ["pull"]
    assert worker.poll() is None


def test_a_codec_that_is_not_good_enough_keeps_its_report_and_publishes_nothing(place: Place, model: str) -> None:
    place.mode("gate")
    place.start()
    job = place.send(model)
    failed = place.reach(job, JobState.FAILED)
    assert failed.error is not None
    assert (failed.error.code, failed.error.remedy) == (ErrorCode.QUALITY_GATE, "Ask for less.")
    assert "README.md" in place.store.report_files(job.id, tenant="me")
    assert not place.hub.api().repo_exists(f"me/{model}-kvalign")


def test_a_source_that_is_not_there_fails_before_any_work(place: Place) -> None:
    place.start()
    job = place.send("nowhere")
    failed = place.reach(job, JobState.FAILED)
    assert failed.error is not None
    assert failed.error.code == ErrorCode.SOURCE_NOT_FOUND
    assert place.runs() == []


def test_a_token_revoked_in_mid_job_fails_it_and_a_retry_with_another_goes_on(place: Place, model: str) -> None:
    place.hub.fault(method="POST", path_regex=".*", status=401, times=99)  # publishing alone sends any
    place.start()
    job = place.send(model)
    failed = place.reach(job, JobState.FAILED)
    assert failed.error is not None
    assert failed.error.code == ErrorCode.TARGET_FORBIDDEN
    assert "does not accept the token" in failed.error.message
    assert "retried" in failed.error.remedy
    place.hub.clear_faults()
    place.store.retry(job.id, tenant="me", token=TOKEN)
    assert enqueue(create_celery(place.settings), job.id)
    done = place.reach(job, JobState.SUCCEEDED)
    assert done.attempts == 2
    assert place.stage_events(job, "kept") == ["pull", "calibrate", "align", "fit", "validate", "report"]


def test_a_worker_killed_after_the_commit_publishes_once(place: Place, model: str) -> None:
    """The commit has happened and nobody has noted it: the next attempt must find it, not make another."""
    target = f"me/{model}-kvalign"
    place.hub.fault(method="POST", path_regex=rf"{model}-kvalign/commit", apply_then_cut=True)
    worker = place.start()
    job = place.send(model)
    place.wait_for_stage(job, "publish")
    wait_for(lambda: any(job.id in title for title in titles(place.hub, target)))
    worker.kill()  # it waits for half a second before it reads back what became of its commit
    worker.wait()
    place.start()
    done = place.reach(job, JobState.SUCCEEDED)
    assert done.attempts == 2
    assert len([title for title in titles(place.hub, target) if job.id in title]) == 1
    assert place.stage_events(job, "kept") == ["pull", "calibrate", "align", "fit", "validate", "report"]


def titles(hub: DevHub, repo: str) -> list[str]:
    """Of a repo's commits, read from the Hub's disk; none of a repo that is not there."""
    try:
        return [commit.title for commit in hub.storage.find(parse_repo_spec(repo)).history("main")]
    except HubError:
        return []
