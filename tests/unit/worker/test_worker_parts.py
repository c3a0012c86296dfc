"""Small parts of the worker, each alone: lines, text cleaning, settings, files to publish, the child's messages."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.fernet import Fernet
from hypothesis import given
from hypothesis import strategies as st

from kvalign.errors import KvalignError, QualityGate
from kvalign.stages import StageProgress
from worker.artifact_files import files_to_publish, report_files
from worker.child import StageReporter, explain
from worker.cli import worker
from worker.journal import LINE_CHARACTERS, clean
from worker.lines import Lines
from worker.messages import Message, ProgressMessage, StageDoneMessage, parse_message
from worker.process import machine_memory_bytes
from worker.settings import WorkerSettings
from worker.stopping import StopFlag

KEY = Fernet.generate_key().decode()


@given(st.lists(st.binary(max_size=12)), st.integers(1, 30))
def test_lines_are_the_same_however_they_arrive(pieces: list[bytes], limit: int) -> None:
    said = b"".join(pieces)
    lines = Lines(limit)
    heard = [line for piece in pieces for line in lines.feed(piece)]
    assert heard == [line for line in said.split(b"\n")[:-1] if len(line) <= limit]


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser(line: bytes) -> None:
    assert parse_message(line) is None


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain text, 3/4 done", "plain text, 3/4 done"),
        ("in '/root/jobs/j1/source/config.json': no", "in 'config.json': no"),
        ("see https://hub/me/model", "see https://hub/me/model"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("bell\a\x1b[0m", "bell\ufffd\ufffd[0m"),
        ("x" * 10_000, "x" * LINE_CHARACTERS),
    ],
)
def test_cleaned_text(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_secret_across_the_cut_does_not_survive() -> None:
    assert "hf_" not in clean("x" * (LINE_CHARACTERS - 5) + "hf_abcdefghijkl")


def environment(**values: str) -> dict[str, str]:
    return {f"KVALIGN_{name}": value for name, value in values.items()}


@pytest.fixture(autouse=True)
def no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVALIGN_"):
            monkeypatch.delenv(name)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVALIGN_SECRET_KEY", KEY)
    monkeypatch.setenv("KVALIGN_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("KVALIGN_REDIS_URL", "redis://:hunter2@127.0.0.1/0")
    settings = WorkerSettings.load()
    assert settings.database == f"sqlite:///{tmp_path}/kvalign.db"
    assert settings.hub_endpoint == "https://huggingface.co"
    assert KEY not in repr(settings)
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "KVALIGN_SECRET_KEY: is not set"),
        ({"SECRET_KEY": "hunter2"}, "KVALIGN_SECRET_KEY: must be 32 bytes"),
        ({"SECRET_KEY": KEY, "REDIS_URL": "amqp://hunter2@x"}, "KVALIGN_REDIS_URL: must begin"),
        ({"SECRET_KEY": KEY, "HUB_ENDPOINT": "hunter2"}, "KVALIGN_HUB_ENDPOINT: must begin"),
        ({"SECRET_KEY": KEY, "LEASE_S": "6", "HEARTBEAT_S": "5"}, "three times KVALIGN_HEARTBEAT_S"),
        ({"SECRET_KEY": KEY, "MAX_ATTEMPTS": "hunter2"}, "KVALIGN_MAX_ATTEMPTS: "),
    ],
)
def test_a_bad_setting_stops_the_worker_before_it_starts(values: dict[str, str], named: str) -> None:
    ran = CliRunner().invoke(worker, [], env=environment(**values))
    assert ran.exit_code == 2
    assert named in ran.output
    assert "hunter2" not in ran.output


@pytest.mark.parametrize(
    ("values", "exit_code"),
    [({"DATABASE_URL": "mysql://x/y"}, 2), ({"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:1/none"}, 1)],
)
def test_a_database_that_cannot_be_used_stops_it_too(values: dict[str, str], exit_code: int, tmp_path: Path) -> None:
    ran = CliRunner().invoke(worker, [], env=environment(SECRET_KEY=KEY, DATA_DIR=str(tmp_path), **values))
    assert ran.exit_code == exit_code
    assert "hunter2" not in ran.output
    assert "Traceback" not in ran.output


def test_wrong_usage_is_exit_code_2() -> None:
    assert CliRunner().invoke(worker, ["--concurrency", "0"]).exit_code == 2


def test_store_app_and_jobs_load_no_torch() -> None:
    code = (
        "import sys, worker.store, worker.app, worker.jobs, worker.preflight;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def test_the_worker_itself_loads_no_torch() -> None:
    code = "import sys, worker.cli, worker.tasks; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name}: {name}")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    source, artifact = tmp_path / "source", tmp_path / "artifact"
    write(source, "README.md", "config.json", "model.safetensors", "LICENSE", "NOTICE.txt", "LICENSED.json")
    write(artifact, "README.md", "kvalign_config.json", "kvalign_codec.safetensors", "report.json", "figures/kl.png")
    write(artifact, ".cache/x")
    return source, artifact


def test_the_full_layout_is_the_source_with_our_card(folders: tuple[Path, Path]) -> None:
    files = files_to_publish("full", *folders)
    assert files["README.md"].parent.name == "artifact"
    assert files["config.json"].parent.name == "source"
    assert set(files) == {
        "README.md", "config.json", "model.safetensors", "LICENSE", "NOTICE.txt", "LICENSED.json",
        "kvalign_config.json", "kvalign_codec.safetensors", "report.json", "figures/kl.png",
    }  # fmt: skip


def test_the_codec_layout_is_the_artifact_and_the_licence(folders: tuple[Path, Path]) -> None:
    files = files_to_publish("codec", *folders)
    assert set(files) == {
        "README.md", "LICENSE", "NOTICE.txt",
        "kvalign_config.json", "kvalign_codec.safetensors", "report.json", "figures/kl.png",
    }  # fmt: skip
    assert files["README.md"].parent.name == "artifact"


def test_a_link_in_an_artifact_is_refused(folders: tuple[Path, Path]) -> None:
    (folders[1] / "figures" / "secret.png").symlink_to("/etc/hostname")
    with pytest.raises(KvalignError, match=r"secret.png"):
        files_to_publish("codec", *folders)
    with pytest.raises(KvalignError, match=r"secret.png"):
        report_files(folders[1])


def test_the_report_is_card_numbers_and_figures(folders: tuple[Path, Path]) -> None:
    assert set(report_files(folders[1])) == {"README.md", "report.json", "figures/kl.png"}
    assert report_files(folders[1] / "nothing") == {}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QualityGate("KL 0.2; the limit is 0.05.", "Ask for less."), "quality_gate"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EFBIG, "File too large"), "disk_full"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "disk_full"),
        (ZeroDivisionError("x"), "internal"),
        (KeyboardInterrupt(), "internal"),
    ],
)
def test_every_failure_of_a_child_has_a_code(error: BaseException, code: str) -> None:
    message = explain(error)
    assert message.code == code
    assert message.message
    assert message.remedy


def test_stages_are_told_apart_and_timed() -> None:
    said: list[Message] = []
    now = 0.0
    reporter = StageReporter(said.append, clock=lambda: now)
    for i in range(101):
        now = i / 100
        reporter.progress(StageProgress("calibrate", i, 100, "tokens"))
    now = 3.0
    reporter.progress(StageProgress("align", 0, 1, ""))
    now = 4.0
    reporter.finish()
    reporter.finish()
    told = [message for message in said if isinstance(message, ProgressMessage)]
    assert 10 <= len(told) <= 13
    assert [message for message in said if isinstance(message, StageDoneMessage)] == [
        StageDoneMessage(stage="calibrate", seconds=3.0),
        StageDoneMessage(stage="align", seconds=1.0),
    ]
    assert said[-1] == StageDoneMessage(stage="align", seconds=1.0)


def test_a_long_unit_stops_no_conversion() -> None:
    said: list[Message] = []
    StageReporter(said.append).progress(StageProgress("fit", 1, 2, "windows at step " * 9))
    [message] = said
    assert isinstance(message, ProgressMessage)
    assert message.unit.startswith("windows at step")
    assert parse_message(message.model_dump_json().encode()) == message


def test_a_stop_flag_crosses_a_fork() -> None:
    flag = StopFlag()
    assert not flag.is_set()
    pid = os.fork()
    if pid == 0:
        flag.set()
        os._exit(0)
    os.waitpid(pid, 0)
    assert flag.is_set()


def test_sigterm_raises_the_flag_in_one_process_alone() -> None:
    flag = StopFlag()
    before = signal.getsignal(signal.SIGTERM)
    with flag.on_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.is_set()
    assert signal.getsignal(signal.SIGTERM) == before
    assert flag._shared[0] == 0


def test_a_machine_has_memory() -> None:
    assert machine_memory_bytes() > 10_000_000
