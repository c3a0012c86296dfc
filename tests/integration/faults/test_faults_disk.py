"""A workers' disk that fills up while a model is pulled, converted or published, and one that takes no folder."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from topology import Json, Topology, running_topology, wait_for

MIB = 2**20


@pytest.fixture(scope="module")
def module_topology(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Topology]:
    """With a data folder that is a file system of its own, as large as a small job may ask for."""
    folder = tmp_path_factory.mktemp("topology")
    data = folder / "data"
    data.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={240 * MIB}", "kvalign-test", str(data)]
    if subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode != 0:
        if os.environ.get("CI"):
            pytest.fail("no file system may be mounted here")
        pytest.skip("no file system may be mounted here")
    try:
        with running_topology(folder, "sqlite", KVALIGN_CHILD_MEMORY_BYTES="1000000000") as topology:
            yield topology
    finally:
        subprocess.run(["umount", "--lazy", str(data)], check=True)


@contextlib.contextmanager
def full_disk(topology: Topology) -> Iterator[None]:
    """Another program has written until nothing fits any more."""
    hog = topology.folder / "data" / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(MIB))
    try:
        yield
    finally:
        hog.unlink()


def assert_retried(topology: Topology, job: Json, kept: list[str]) -> None:
    """With room again, the same job goes on after what was finished."""
    topology.caller().retry(job).raise_for_status()
    topology.assert_published_once(topology.caller().reach(job))
    assert topology.caller().stages(job, "kept") == kept


def test_a_disk_that_fills_up_in_the_download(topology: Topology) -> None:
    ada = topology.caller()
    topology.hub.fault(method="GET", path_regex="ada/tiny/resolve/.*/README.md", delay_s=4)
    job = ada.submit("ada/full-in-pull")
    ada.see(job, "pull")
    with full_disk(topology):
        failed = ada.reach(job, "failed")
    assert failed["error"]["code"] == "disk_full"
    assert failed["error"]["remedy"]
    assert_retried(topology, job, kept=[])


def test_a_disk_that_fills_up_in_the_conversion(topology: Topology) -> None:
    ada, target = topology.caller(), "ada/full-in-fit"
    topology.mode("hold", target)
    job = ada.submit(target)
    ada.see(job, "fit")
    with full_disk(topology):
        topology.mode("fill", target)
        failed = ada.reach(job, "failed")
    assert failed["error"]["code"] == "disk_full"
    topology.mode("convert", target)
    assert_retried(topology, job, kept=["pull"])


def test_a_disk_that_is_full_while_publishing_does_not_matter(topology: Topology) -> None:
    """What is published lies there already."""
    ada, target = topology.caller(), "ada/full-in-publish"
    topology.hub.fault(method="POST", path_regex=f"{target}.git/info/lfs/objects/batch", delay_s=2)
    job = ada.submit(target)
    ada.see(job, "publish")
    with full_disk(topology):
        topology.assert_published_once(ada.reach(job))


def test_a_job_over_its_time_limit_ends_and_leaves_nothing_running(topology: Topology) -> None:
    ada, target = topology.caller(), "ada/too-long"
    for worker in topology.workers:
        worker.stop()
    topology.mode("hang", target)
    with topology.another_worker(KVALIGN_JOB_TIME_LIMIT_S="5") as worker:
        job = ada.submit(target)
        failed = ada.reach(job, "failed")
        assert failed["error"]["code"] == "timeout"
        assert "limit" in failed["error"]["message"]
        assert worker.converting() == []
        assert topology.commits_of(job) == []


def test_a_locked_sqlite_holds_jobs_up_and_no_more(topology: Topology) -> None:
    """Readers go on; who wants to write waits, or is told that the database is away."""
    ada, target = topology.caller(), "ada/locked"
    topology.mode("hold", target)
    job = ada.submit(target)
    ada.see(job, "fit")
    with topology.locked_sqlite():
        for _ in range(6):
            assert ada.job(job)["state"] == "running"
            time.sleep(1)
    topology.mode("convert", target)
    done = ada.reach(job)
    assert done["attempts"] <= 2
    topology.assert_published_once(done)


def test_a_workspace_that_cannot_be_made_fails_its_job_with_the_reason(topology: Topology) -> None:
    jobs: Path = topology.folder / "data" / "jobs"
    wait_for(lambda: not [worker for worker in topology.workers if worker.converting()])
    jobs.rename(jobs.with_name("away"))
    jobs.write_text("no folder")
    try:
        failed = topology.caller().reach(topology.caller().submit("ada/no-folder"), "failed")
        assert failed["error"]["code"] == "internal"
        assert "job's folder" in failed["error"]["message"]
        assert "operator" in failed["error"]["remedy"]
    finally:
        jobs.unlink()
        jobs.with_name("away").rename(jobs)
