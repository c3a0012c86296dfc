"""A disk that is too small for a job, and one that fills up in the middle of it."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_services import LONG, Json, Services, Worker, conversion, wait_for

MIB = 2**20
UNSHARE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
MOUNT = 'mount -t tmpfs -o size=$1 kvalign-test "$2" && shift 2 && exec "$@"'


@pytest.fixture(scope="module")
def mountable(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where no file system may be mounted, as in some containers, these tests are skipped, and fail in CI."""
    trial = [*UNSHARE, "sh", "-ec", MOUNT, "sh", str(MIB), str(tmp_path_factory.mktemp("trial")), "true"]
    if subprocess.run(trial, check=False).returncode != 0:
        if os.environ.get("CI"):
            pytest.fail("no file system may be mounted here")
        pytest.skip("no file system may be mounted here")


@pytest.fixture
def small_disk(mountable: None, resting_services: Services, tmp_path: Path) -> Iterator["SmallDisk"]:
    resting_services.stop_worker()
    yield SmallDisk(resting_services, tmp_path / "disk")
    resting_services.stop_worker()


class SmallDisk:
    """A worker whose data folder is a file system of its own, which nobody else sees and which ends with it."""

    def __init__(self, services: Services, folder: Path) -> None:
        folder.mkdir()
        self._services = services
        self._folder = folder

    def start(self, size_bytes: int) -> Worker:
        mounted = [*UNSHARE, "sh", "-ec", MOUNT, "sh", str(size_bytes), str(self._folder)]
        return self._services.start_worker(*mounted, KVALIGN_DATA_DIR=str(self._folder), KVALIGN_FAILED_KEPT_S="0")

    def seen_from_here(self, worker: Worker) -> Path:
        return Path(f"/proc/{worker.process.pid}/root{self._folder}")

    def fill(self, worker: Worker) -> None:
        """Another program writes until nothing fits any more."""
        with (self.seen_from_here(worker) / "hog").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(MIB))

    def workspaces(self, worker: Worker) -> list[str]:
        return [path.name for path in (self.seen_from_here(worker) / "jobs").glob("job_*")]


def assert_full(services: Services, job: Json) -> None:
    failed = services.person().reach(job, "failed")
    assert failed["error"]["code"] == "disk_full"
    assert failed["error"]["remedy"]
    assert not services.exists(job["config"]["target"]["repo"])


def test_too_small_a_disk_is_seen_before_anything_is_pulled(resting_services: Services, small_disk: SmallDisk) -> None:
    ada, worker = resting_services.person(), small_disk.start(50 * MIB)
    job = ada.submit(conversion("ada/llama", "ada/too-large"))
    assert_full(resting_services, job)
    assert ada.stages(job, "started") == ["preflight"]
    wait_for(lambda: not small_disk.workspaces(worker))


def test_a_disk_that_fills_up_fails_the_job_alone(resting_services: Services, small_disk: SmallDisk) -> None:
    ada, worker = resting_services.person(), small_disk.start(200 * MIB)
    job = ada.submit(conversion("ada/llama", "ada/filled", calibration=LONG))
    ada.see(job, "calibrate", unit="sequences", done=20)
    small_disk.fill(worker)
    assert_full(resting_services, job)
    wait_for(lambda: not small_disk.workspaces(worker))
    assert worker.process.poll() is None
