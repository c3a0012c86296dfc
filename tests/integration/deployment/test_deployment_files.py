"""Dockerfile and docker-compose.yml say what an operator relies on. No engine is needed, and none is asked."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from compose_file import COMPOSE, DOCKERFILE, ROOT, as_written, filled, instructions, variables

from service.machine import API_STOP_S, WORKER_STOP_S

SECRETS = {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "KVALIGN_SECRET_KEY", "KVALIGN_METRICS_TOKEN"}
VALUES = dict.fromkeys(SECRETS, "x")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = filled(VALUES)["services"]
    return found


def seconds(text: str) -> float:
    assert text.endswith("s")
    return float(text[:-1])


def test_compose_fits_the_specification(services: dict[str, Any]) -> None:
    """The schema is the Compose specification's own, as check-jsonschema carries it."""
    schema = files("check_jsonschema").joinpath("builtin_schemas/vendor/compose-spec.json").read_text()
    for document in (as_written(), filled(VALUES)):
        jsonschema.validate(document, json.loads(schema))
    assert set(services) == {"postgres", "redis", "api", "worker", "worker-gpu", "flower", "devhub"}


def test_compose_itself_reads_the_file() -> None:
    """Also CI may lack it: neither Debian nor PyPI has the plugin from its makers, so the schema stands in for it."""
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    profiles = [word for name in ("gpu", "flower", "demo") for word in ("--profile", name)]
    command = [docker, "compose", "--file", str(COMPOSE), *profiles, "config", "--quiet"]
    known = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    assert subprocess.run(command, env=known | VALUES, check=False, cwd="/").returncode == 0
    assert subprocess.run(command, env=known, check=False, cwd="/", capture_output=True).returncode != 0


def test_no_secret_has_a_default(services: dict[str, Any]) -> None:
    found = variables()
    assert found.pop("?") == SECRETS
    assert found.pop("") == {"FLOWER_BASIC_AUTH", "DEVHUB_USER", "OTEL_EXPORTER_OTLP_ENDPOINT"}
    for names in found.values():
        assert not [name for name in names if re.search("PASSWORD|SECRET|TOKEN|AUTH|USER", name)]
    for name in SECRETS:
        with pytest.raises(KeyError, match=name):
            filled({key: value for key, value in VALUES.items() if key != name})
    for name, variable in (("flower", "FLOWER_BASIC_AUTH"), ("devhub", "DEVHUB_USER")):
        refused = subprocess.run(
            [*services[name]["entrypoint"][:2], services[name]["entrypoint"][2].replace("exec ", "echo ")],
            env={"PATH": os.environ["PATH"], variable: ""}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (refused.returncode, variable in refused.stderr) == (2, True)
    example = dict(
        line.split("=", 1) for line in (ROOT / ".env.example").read_text().splitlines() if line[:1].isalpha()
    )
    assert example == dict.fromkeys(SECRETS, "")


def test_every_service_is_confined_and_watched(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "env_file"} & set(service), name
        assert any(place.startswith("/tmp:") for place in service["tmpfs"]), name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}, name
        assert service["healthcheck"]["test"][0] in {"CMD", "CMD-SHELL"}, name
        assert ":" in service["image"], name
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in as_written()["volumes"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
    assert not {"ports"} & (set(services["postgres"]) | set(services["redis"]) | set(services["worker"]))
    assert services["postgres"]["networks"] == services["redis"]["networks"] == ["inside"]
    assert as_written()["networks"]["inside"] == {"internal": True}


def test_health_orders_the_start_and_stops_wait_long_enough(services: dict[str, Any]) -> None:
    needed = {name: {"postgres", "redis"} for name in ("api", "worker", "worker-gpu")} | {"flower": {"redis"}}
    for name, service in services.items():
        waits = service.get("depends_on", {})
        assert set(waits) == needed.get(name, set())
        assert all(on == {"condition": "service_healthy"} for on in waits.values())
    assert seconds(services["worker"]["stop_grace_period"]) > WORKER_STOP_S
    assert seconds(services["api"]["stop_grace_period"]) > API_STOP_S


def test_the_queue_outlives_its_server(services: dict[str, Any]) -> None:
    script = services["redis"]["entrypoint"][2]
    for line in ("appendonly yes", "appendfsync always", "maxmemory-policy noeviction", "requirepass"):
        assert line in script
    assert services["redis"]["volumes"] == ["redis:/data"]


def test_the_image_has_no_root_no_compiler_and_no_loose_version() -> None:
    steps = instructions()
    starts = [place for place, (word, _) in enumerate(steps) if word == "FROM"]
    last = steps[starts[-1] :]
    assert len(starts) == 2
    assert [rest for word, rest in last if word == "USER"] == ["10001:10001"]
    assert not [rest for word, rest in last if word == "RUN" and re.search("apt|pip|gcc|curl", rest)]
    for word, rest in steps:
        assert word not in {"ADD", "SHELL", "ONBUILD"}
        if word in {"ENTRYPOINT", "CMD"}:
            assert isinstance(json.loads(rest), list)  # exec form: signals reach the process
        if word == "RUN":
            for install in re.findall(r"pip install [^&]*", rest):
                assert "--constraint constraints.txt" in install
                assert "--only-binary :all:" in install
    torch = next(rest for word, rest in steps if word == "RUN" and "TORCH_INDEX" in rest)
    assert '--no-deps --index-url "${TORCH_INDEX}" torch' in torch  # of that index nothing else is taken
    assert "extra-index-url" not in DOCKERFILE.read_text()
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"torch", "setuptools", "opentelemetry-sdk", "celery"} <= pinned
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for step, rest in steps if step == "COPY" and "--from" not in rest for word in rest.split()[:-1]}
    assert copied == allowed


def test_the_package_that_is_installed_holds_every_file(tmp_path: Path) -> None:
    """Templates, migrations and texts too: what only a checkout has would be missing in the image."""
    rooms = ("kvalign", "worker", "service", "devhub")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *rooms],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    listed = [name for name in listed if (ROOT / name).is_file()]
    source = tmp_path / "source"
    for name in (*listed, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert set(listed) - set(wheel.namelist()) == set()


def lint(program: str, *arguments: str) -> None:
    found = BIN / program
    if not found.exists():
        if os.environ.get("CI"):
            pytest.fail(f"{program} is not installed")
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hadolint_has_nothing_to_say() -> None:
    lint("hadolint", "Dockerfile")


def test_shellcheck_has_nothing_to_say(tmp_path: Path, services: dict[str, Any]) -> None:
    shell = [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file()]
    shell = [path for path in shell if path.read_bytes().startswith((b"#!/usr/bin/env bash", b"#!/bin/sh"))]
    lint("shellcheck", ".ci/run", *map(str, shell))
    for name, service in services.items():
        if service.get("entrypoint", [""])[0] == "sh":
            (tmp_path / name).write_text(f"#!/bin/sh\n{service['entrypoint'][2]}")
            lint("shellcheck", str(tmp_path / name))
