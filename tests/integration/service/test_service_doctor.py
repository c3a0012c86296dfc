"""`kvalign doctor` against real services: all well, what is not by its name, never a secret, never a hang."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner
from cryptography.fernet import Fernet
from service_harness import DevHub, command, environment

from service.checks import Finding, State
from service.doctor import doctor, examine
from worker import database as database_module
from worker.store import JobStore
from worker.sweeper import seen

SECRET = "secret_of_a_message"


@dataclass
class Place:
    """What the doctor is told, and a database with a live worker."""

    settings: dict[str, str]
    data_dir: Path
    store: JobStore

    def run(self, **changed: str) -> tuple[int, dict[str, Any]]:
        """Exit status and, by name, the checks of `kvalign doctor --json`."""
        done = self.process("--json", **changed)
        assert "Traceback" not in done.stderr
        assert done.stdout.count("\n") == 1
        answer = json.loads(done.stdout)
        assert answer["ok"] == (done.returncode == 0)
        return done.returncode, {check["name"]: check for check in answer["checks"]}

    def process(self, *arguments: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command("service.doctor:doctor", *arguments),
            env=environment(**{**self.settings, **changed}),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


@pytest.fixture
def place(tmp_path: Path, service_hub: DevHub, redis_server: Any) -> Any:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("appendonly", "yes")
    key = Fernet.generate_key().decode()
    data_dir = tmp_path / "data"
    store = JobStore.open(f"sqlite:///{data_dir / 'kvalign.db'}", key)
    seen(store, "worker")
    settings = {
        "KVALIGN_DATA_DIR": str(data_dir),
        "KVALIGN_SECRET_KEY": key,
        "KVALIGN_REDIS_URL": redis_server.url,
        "KVALIGN_HUB_ENDPOINT": service_hub.url,
        "KVALIGN_WORKER_SEEN_WITHIN_S": "600",
        "KVALIGN_FREE_DISK_MIN_BYTES": "1",
    }
    yield Place(settings, data_dir, store)
    store.close()


def states(checks: dict[str, Any]) -> dict[str, str]:
    return {name: check["state"] for name, check in checks.items() if check["state"] != "ok"}


def test_all_is_well_with_real_services(place: Place) -> None:
    before = sorted(path.name for path in place.data_dir.rglob("*"))
    code, checks = place.run()
    assert (code, states(checks)) == (0, {})
    assert list(checks) == ["settings", "database", "broker", "hub", "workspace", "worker", "kernels", "sandbox"]
    assert all(check["fact"] and not check["remedy"] for check in checks.values())
    assert sorted(path.name for path in place.data_dir.rglob("*")) == before
    lines = place.process().stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in checks]


def test_a_dead_redis_is_named(place: Place, redis_server: Any) -> None:
    redis_server.kill()
    code, checks = place.run()
    assert (code, states(checks)) == (1, {"broker": "FAIL"})
    assert "ConnectionError" in checks["broker"]["fact"]
    assert checks["broker"]["remedy"]
    lines = place.process().stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == ["broker"]


def test_a_redis_that_forgets_is_a_warning(place: Place, redis_server: Any) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
    code, checks = place.run()
    assert (code, states(checks)) == (0, {"broker": "warn"})
    assert "appendonly yes and maxmemory-policy noeviction" in checks["broker"]["remedy"]


def test_a_workspace_that_cannot_be_written_or_is_full_is_named(place: Place, tmp_path: Path) -> None:
    database = f"sqlite:///{place.data_dir / 'kvalign.db'}"
    (tmp_path / "file").write_text("in the way")
    code, checks = place.run(KVALIGN_DATA_DIR=str(tmp_path / "file" / "data"), KVALIGN_DATABASE_URL=database)
    assert (code, states(checks)) == (1, {"workspace": "FAIL"})
    code, checks = place.run(KVALIGN_FREE_DISK_MIN_BYTES=str(10**18))
    assert (code, states(checks)) == (1, {"workspace": "FAIL"})
    assert "1,000,000,000,000,000,000" in checks["workspace"]["fact"]


def test_a_hub_that_is_away_is_named(place: Place) -> None:
    code, checks = place.run(KVALIGN_HUB_ENDPOINT="http://127.0.0.1:9")
    assert (code, states(checks)) == (1, {"hub": "FAIL"})
    assert "ConnectError" in checks["hub"]["fact"]


def test_a_silent_hub_is_not_waited_for(place: Place) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code, checks = place.run(KVALIGN_HUB_ENDPOINT=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (code, states(checks)) == (1, {"hub": "FAIL"})


def test_a_database_of_an_older_migration_is_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = tmp_path / "migrations"
    shutil.copytree(Path(database_module.__file__).parent / "migrations", newer)
    head = database_module.Database.as_found(f"sqlite:///{place.data_dir / 'kvalign.db'}")
    assert head is not None
    known = head.revision().head
    head.close()
    (newer / "versions" / "9999_more.py").write_text(
        f'revision = "9999"\ndown_revision = "{known}"\ndef upgrade(): pass\ndef downgrade(): pass\n'
    )
    monkeypatch.setattr(database_module, "_MIGRATIONS", newer)
    foreign = {name: None for name in os.environ if name.startswith("KVALIGN_")}
    done = CliRunner().invoke(doctor, ["--json"], env={**foreign, **place.settings})
    assert done.exit_code == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert states(checks) == {"database": "FAIL"}
    assert f"at migration {known}; this kvalign needs 9999" in checks["database"]["fact"]


def test_a_database_of_a_newer_kvalign_is_named(place: Place) -> None:
    with place.store.database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = 'later'")
    code, checks = place.run()
    assert (code, states(checks)) == (1, {"database": "FAIL"})
    assert "Upgrade kvalign" in checks["database"]["remedy"]


def test_what_was_never_started_is_no_failure(place: Place, tmp_path: Path) -> None:
    code, checks = place.run(KVALIGN_DATA_DIR=str(tmp_path / "fresh"))
    assert (code, states(checks)) == (0, {"database": "warn", "worker": "warn"})
    assert not (tmp_path / "fresh").exists()


def test_empty_postgresql_is_told_from_a_migrated_one(place: Place, empty_postgresql: str) -> None:
    code, checks = place.run(KVALIGN_DATABASE_URL=empty_postgresql)
    assert (code, states(checks)) == (0, {"database": "warn", "worker": "warn"})
    JobStore.open(empty_postgresql, place.settings["KVALIGN_SECRET_KEY"]).close()
    assert states(place.run(KVALIGN_DATABASE_URL=empty_postgresql)[1]) == {"worker": "warn"}


def test_bad_settings_are_named_and_end_the_examination(place: Place) -> None:
    code, checks = place.run(KVALIGN_SECRET_KEY="short-secret")
    assert (code, states(checks)) == (1, {"settings": "FAIL"})
    assert "KVALIGN_SECRET_KEY" in checks["settings"]["fact"]
    assert "short-secret" not in json.dumps(checks)


@pytest.mark.parametrize(
    ("password", "shown"),
    [("pw_canary", "***@127.0.0.1:9"), ("pw_canary/of?the@doctor", "://***")],
)
def test_passwords_are_never_shown(place: Place, password: str, shown: str) -> None:
    away = {
        "KVALIGN_DATABASE_URL": f"postgresql://me:{password}@127.0.0.1:9/jobs?password={password}",
        "KVALIGN_REDIS_URL": f"redis://:{password}@127.0.0.1:9/0",
        "KVALIGN_HUB_ENDPOINT": f"http://me:{password}@127.0.0.1:9",
        "KVALIGN_METRICS_TOKEN": "pw_canary",
    }
    code, checks = place.run(**away)
    assert code == 1
    assert states(checks) == {"database": "FAIL", "broker": "FAIL", "hub": "FAIL", "worker": "warn"}
    for arguments in ((), ("--json",)):
        done = place.process(*arguments, **away)
        assert done.stdout.count(shown) == 3
        for secret in ("pw_canary", "of?the", "@doctor", place.settings["KVALIGN_SECRET_KEY"]):
            assert secret not in done.stdout + done.stderr


def test_a_check_that_hangs_or_breaks_fails_by_itself(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.settings.items():
        monkeypatch.setenv(name, value)

    def breaks(_: object) -> Finding:
        raise RuntimeError(SECRET)

    began = time.monotonic()
    found = examine({"hangs": lambda _: time.sleep(3) or Finding(State.OK, "late"), "breaks": breaks}, limit_s=0.2)
    assert time.monotonic() - began < 2
    assert [(name, finding.state) for name, finding in found.items()] == [
        ("settings", State.OK),
        ("hangs", State.FAIL),
        ("breaks", State.FAIL),
    ]
    assert SECRET not in str(found)


def test_the_doctor_loads_no_tensor_library(place: Place) -> None:
    code = (
        "import sys; from service.doctor import examine; assert examine()['kernels'].state == 'ok';"
        " print(sorted({'torch', 'transformers', 'numba', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**place.settings), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
