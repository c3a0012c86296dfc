"""The runner against children that behave in every way a converting process could."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvalign.errors import Canceled, DiskFull, KvalignError, OutOfMemory, SourceInvalid
from worker.child import die_with_parent
from worker.messages import ChildSpec, ProgressMessage, StageDoneMessage
from worker.process import NICENESS, OOM_SCORE, Confinement, environment_for
from worker.runner import Listener, Runner, Stalled

GIB = 2**30
RESULT = '{"kind": "result", "summary": {"ratio": 12.5, "kl_mean": 0.01, "top1": 0.97}}'


class Heard:
    """All that a child said."""

    def __init__(self) -> None:
        self.messages: list[ProgressMessage | StageDoneMessage] = []
        self.log: list[str] = []
        self.listener = Listener(self.messages.append, self.log.append)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def run(tmp_path: Path, heard: Heard) -> Callable[..., object]:
    """Run a child written for the test; `check` and limits may be given."""

    def start(
        code: str,
        check: Callable[[], None] = lambda: None,
        memory_bytes: int = 4 * GIB,
        file_bytes: int = GIB,
        stall_s: float = 60,
    ) -> object:
        script = tmp_path / "fake_child.py"
        script.write_text(textwrap.dedent(code))
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        confinement = Confinement(memory_bytes, file_bytes, 1, stall_s)
        runner = Runner([sys.executable, str(script)], confinement, tmp_path / "cache")
        return runner.run(spec(tmp_path), home, check, heard.listener)

    return start


def spec(folder: Path) -> ChildSpec:
    return ChildSpec(
        parent_pid=os.getpid(),
        source_dir=str(folder),
        out_dir=str(folder / "out"),
        work_dir=str(folder / "work"),
        config={"source": {"repo": "a/b"}},
        source_commit="0" * 40,
        calibration_path=None,
        validation_path=None,
    )


def cancel_after(seconds: float) -> Callable[[], None]:
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > seconds:
            raise Canceled("The job was canceled.")

    return check


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_child_gets_its_spec_and_is_heard(run: Callable[..., object], heard: Heard) -> None:
    summary = run(
        f"""
        import json, sys
        spec = json.load(sys.stdin)
        print(json.dumps(dict(kind="progress", stage="calibrate", done=1, total=2, unit=spec["source_commit"][:3])))
        print(json.dumps(dict(kind="stage_done", stage="calibrate", seconds=0.5)))
        print("loading", file=sys.stderr)
        print({RESULT!r})
        """
    )
    assert summary.model_dump() == json.loads(RESULT)["summary"]  # type: ignore[attr-defined]
    assert heard.messages == [
        ProgressMessage(stage="calibrate", done=1, total=2, unit="000"),
        StageDoneMessage(stage="calibrate", seconds=0.5),
    ]
    assert heard.log == ["loading"]


def test_an_error_of_the_child_is_raised_as_itself(run: Callable[..., object]) -> None:
    error = {
        "kind": "error",
        "code": "source_invalid",
        "message": "Tensor x of /data/jobs/j/model.safetensors is NaN; hf_secrettoken.",
        "remedy": "Upload it again.",
    }
    with pytest.raises(SourceInvalid) as raised:
        run(f"import sys; print({json.dumps(error)!r}); sys.exit(1)")
    assert raised.value.message == "Tensor x of model.safetensors is NaN; ***."
    assert raised.value.remedy == "Upload it again."


@pytest.mark.parametrize("code", ["canceled", "worker_lost"])
def test_a_child_cannot_claim_what_only_a_worker_knows(run: Callable[..., object], code: str) -> None:
    with pytest.raises(KvalignError) as raised:
        run(f'print(\'{{"kind": "error", "code": "{code}", "message": "m"}}\')')
    assert raised.value.code == "internal"


def test_an_error_beats_a_result_and_exit_code_0(run: Callable[..., object]) -> None:
    with pytest.raises(KvalignError, match="m"):
        run(f'print({RESULT!r}); print(\'{{"kind": "error", "code": "internal", "message": "m"}}\')')


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; print('Killed in /data/jobs/x/model.py', file=sys.stderr); sys.exit(3)", "exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "signal 40"),
        ("pass", "exit code 0"),
        (f"import sys; print({RESULT!r}); sys.exit(1)", "exit code 1"),
        ("import os, signal; os.close(1); os.close(2); os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
    ],
)
def test_any_other_death_is_internal_and_told(run: Callable[..., object], code: str, said: str) -> None:
    with pytest.raises(KvalignError, match=said) as raised:
        run(code)
    assert raised.value.code == "internal"
    assert "/data" not in str(raised.value)


def test_a_killed_child_ran_out_of_memory(run: Callable[..., object]) -> None:
    with pytest.raises(OutOfMemory):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")


def test_a_child_over_its_memory_is_stopped(run: Callable[..., object]) -> None:
    with pytest.raises(OutOfMemory, match="limit is 200,000,000"):
        run("import time; held = bytearray(b'x') * 300_000_000; time.sleep(60)", memory_bytes=200_000_000)


def test_memory_of_descendants_counts(run: Callable[..., object]) -> None:
    with pytest.raises(OutOfMemory):
        run(
            """
            import subprocess, sys
            subprocess.run([sys.executable, "-c", "import time; x = bytearray(b'x') * 300_000_000; time.sleep(60)"])
            """,
            memory_bytes=200_000_000,
        )


def test_a_file_over_the_limit_ends_the_child(run: Callable[..., object]) -> None:
    with pytest.raises(DiskFull, match="1,000,000"):
        run(
            """
            import signal
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; a library in C would not
            with open("big", "wb") as file:
                file.write(bytes(2_000_000))
            """,
            file_bytes=1_000_000,
        )


@pytest.mark.parametrize(
    "code",
    [
        "import time; time.sleep(60)",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
        "while True: pass",
        "import os, time; os.close(0); os.close(1); os.close(2); time.sleep(60)",
        "while True: print('x' * 10_000)",
        "while True: print('x' * 10_000, end='')",
        "import sys\nwhile True: sys.stderr.write('log\\n')",
    ],
)
def test_whatever_it_does_it_ends_when_canceled(run: Callable[..., object], code: str) -> None:
    began = time.monotonic()
    with pytest.raises(Canceled):
        run(code, check=cancel_after(0.3))
    assert time.monotonic() - began < 5


def test_grandchildren_end_with_the_child(run: Callable[..., object], tmp_path: Path) -> None:
    code = """
        import pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path("pid").write_text(str(child.pid))
        time.sleep({sleep})
        """
    with pytest.raises(Canceled):
        run(code.format(sleep=60), check=cancel_after(1))
    wait_until(lambda: is_gone(int((tmp_path / "home" / "pid").read_text())))
    with pytest.raises(KvalignError, match="exit code 0"):  # though a grandchild still holds the pipes
        run(code.format(sleep=0))
    wait_until(lambda: is_gone(int((tmp_path / "home" / "pid").read_text())))


def test_hostile_output_is_ignored_and_bounded(run: Callable[..., object], heard: Heard) -> None:
    run(
        f"""
        import sys
        out = sys.stdout
        print("not json"); print("[]"); print("[" * 50_000); print('"' + "x" * 200_000 + '"'); print("\\0")
        print('{{"kind": "progress", "stage": "pull", "done": 1, "total": 1, "unit": "x"}}')       # not a child's
        print('{{"kind": "progress", "stage": "fit", "done": -1, "total": 1, "unit": "x"}}')
        print('{{"kind": "progress", "stage": "fit", "done": ' + "9" * 5000 + ', "total": 1, "unit": "x"}}')
        print('{{"kind": "progress", "stage": "fit", "done": 1, "total": 1, "unit": "' + "x" * 100 + '"}}')
        print('{{"kind": "stage_done", "stage": "fit", "seconds": NaN}}')
        print('{{"kind": "result", "summary": {{"ratio": Infinity, "kl_mean": 0, "top1": 0}}}}')
        out.flush(); out.buffer.write(b"\\xff\\xfe\\n"); out.buffer.flush()
        sys.stderr.write("a" * 300_000 + "\\n" + "\\x1b[31mred\\x00\\n")
        print({RESULT!r})
        """
    )
    assert heard.messages == []
    assert heard.log == ["\ufffd[31mred\ufffd"]


def test_what_check_raises_is_raised_and_the_child_is_waited_for(run: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(Canceled):
        run("import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(60)",
            check=cancel_after(0.5))  # fmt: skip
    assert not psutil.pid_exists(int((tmp_path / "home" / "pid").read_text()))


def test_a_listener_that_raises_ends_the_child(tmp_path: Path) -> None:
    def lost(_: object) -> None:
        raise KvalignError("the lease is lost")

    runner = Runner([sys.executable, "-c", "import sys, time; print('x', file=sys.stderr); time.sleep(60)"],
                    Confinement(GIB, GIB, 1), tmp_path)  # fmt: skip
    with pytest.raises(KvalignError, match="lease is lost"):
        runner.run(spec(tmp_path), tmp_path, lambda: None, Listener(lost, lost))


def test_the_child_is_confined(run: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    run(
        f"""
        import json, os, pathlib, resource, time
        time.sleep(0.3)  # the limits are set from outside
        pathlib.Path("told").write_text(json.dumps(dict(
            token=os.environ.get("HF_TOKEN"), core=resource.getrlimit(resource.RLIMIT_CORE),
            file=resource.getrlimit(resource.RLIMIT_FSIZE), nice=os.nice(0), leads=os.getsid(0) == os.getpid(),
            oom=int(pathlib.Path("/proc/self/oom_score_adj").read_text()), open=len(os.listdir("/proc/self/fd")),
        )))
        print({RESULT!r})
        """,
        file_bytes=123_456,
    )
    assert json.loads((tmp_path / "home" / "told").read_text()) == {
        "token": None,
        "core": [0, 0],
        "file": [123_456, 123_456],
        "nice": NICENESS,
        "leads": True,
        "oom": OOM_SCORE,
        "open": 4,  # three pipes, and the listing itself
    }


def test_the_environment_is_an_allow_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVALIGN_SECRET_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = environment_for(tmp_path / "home", tmp_path / "cache", 3)
    assert "hidden" not in environment.values()
    assert environment["HOME"] == environment["TMPDIR"] == str(tmp_path / "home")
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert environment_for(tmp_path, tmp_path, 3)["OMP_NUM_THREADS"] == "7"


def test_a_child_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """kill -9 of a worker: nobody is left to end the child, so the kernel does."""
    child = tmp_path / "child.py"
    child.write_text(
        f"import pathlib, time\nfrom {die_with_parent.__module__} import die_with_parent\ndie_with_parent()\n"
        f"import os; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, pathlib\nfrom worker.runner import Runner, Listener\nfrom worker.process import Confinement\n"
        "from worker.messages import ChildSpec\n"
        f"spec = ChildSpec.model_validate_json({spec(tmp_path).model_dump_json()!r})\n"
        f"runner = Runner([sys.executable, {str(child)!r}], Confinement(2**40, 2**40, 1), pathlib.Path('/tmp'))\n"
        f"runner.run(spec, pathlib.Path({str(tmp_path)!r}), lambda: None, Listener(print, print))\n"
    )
    worker = subprocess.Popen([sys.executable, str(parent)], env={**os.environ, "PYTHONPATH": str(Path.cwd())})
    try:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: is_gone(int((tmp_path / "pid").read_text())))


def test_runs_on_a_thread_that_outlives_the_child(run: Callable[..., object]) -> None:
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(run(f"print({RESULT!r})")))
    thread.start()
    thread.join(20)
    assert len(outcome) == 1


@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
)
def test_a_child_that_stands_still_is_ended(run: Callable[..., object], code: str) -> None:
    with pytest.raises(Stalled, match="neither computed nor said"):
        run(code, stall_s=0.5)


COMPUTES = "import time\nwhile time.process_time() < 2: pass\n"
SPEAKS = "import time\nfor _ in range(6): print('still here', flush=True); time.sleep(0.5)\n"
HAS_A_CHILD_THAT_COMPUTES = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTES!r}])\n"


@pytest.mark.parametrize("code", [COMPUTES, SPEAKS, HAS_A_CHILD_THAT_COMPUTES])
def test_a_child_that_does_something_is_left_alone(run: Callable[..., object], code: str) -> None:
    with pytest.raises(KvalignError, match="exit code 0 and no result"):
        run(code, stall_s=1.5)
