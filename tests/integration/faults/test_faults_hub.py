"""A Hub that stumbles while a worker works with it: the job ends as it should, and is published once."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
from sqlalchemy import update
from topology import Json, Topology, wait_for

from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from worker.schema import JobRow

SETTINGS = {"TEST_HUB_PATIENCE_S": "2"}
COMMIT = {"method": "POST", "path_regex": "{target}/commit/main"}
DOWNLOAD = {"method": "GET", "path_regex": "{source}/resolve/.*/README.md"}
UPLOAD = {"method": "PUT", "path_regex": "/devhub/uploads/"}  # of whichever job comes first, and so is the next
CREATE = {"method": "POST", "path_regex": "/api/repos/create"}

# What goes wrong, in paths that a worker asks for and the API's preflight does not.
PASSING: dict[str, list[Json]] = {
    "download-429": [{**DOWNLOAD, "status": 429, "headers": {"Retry-After": "1"}, "times": 2}],
    "download-503": [{**DOWNLOAD, "status": 503, "times": 3}],
    "download-cut": [{**DOWNLOAD, "cut_after_bytes": 3, "times": 2}],
    "download-stalled": [{**DOWNLOAD, "delay_s": 30}],
    "create-unanswered": [{**CREATE, "apply_then_cut": True}],
    "create-503": [{**CREATE, "status": 503}],
    "upload-refused": [{"method": "POST", "path_regex": "{target}.git/info/lfs/objects/batch", "status": 503}],
    "upload-503": [{**UPLOAD, "status": 503}],
    "upload-stalled": [{**UPLOAD, "delay_s": 30}],
    "commit-unanswered": [{**COMMIT, "apply_then_cut": True}],
    "commit-stalled": [{**COMMIT, "delay_s": 5}],
    "commit-429": [{**COMMIT, "status": 429}],
    "commit-503": [{**COMMIT, "status": 503}],
    "commit-409": [{**COMMIT, "status": 409}],
    "commit-412": [{**COMMIT, "status": 412}],
}


@pytest.fixture(scope="module")
def stumbling(module_topology: Topology) -> Iterator[dict[str, Json]]:
    """All of PASSING at once, each with a source and a target of its own. Creations are told apart by their order."""
    topology, ada = module_topology, module_topology.caller()
    topology.mode("convert")
    jobs = {}
    for name, faults in PASSING.items():
        source, target = f"ada/source-{name}", f"ada/{name}"
        import_folder(topology.hub.storage, parse_repo_spec(source), topology.folder / "model")
        for fault in faults:
            path = fault["path_regex"].format(source=source, target=target)
            topology.hub.fault(**{**fault, "path_regex": path})
        jobs[name] = ada.submit(target, source={"repo": source})
    yield jobs
    topology.hub.clear_faults()


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_delays_a_job_and_no_more(module_topology: Topology, stumbling: dict[str, Json], name: str) -> None:
    done = module_topology.caller().reach(stumbling[name], timeout_s=120)
    assert done["attempts"] == 1
    module_topology.assert_published_once(done)


def test_every_fault_has_happened(module_topology: Topology, stumbling: dict[str, Json]) -> None:
    """Else the tests above would show nothing."""
    assert module_topology.hub.http.get("/devhub/faults").json() == []


def test_a_hub_that_stays_away_fails_the_job_and_a_retry_goes_on(topology: Topology) -> None:
    ada, target = topology.caller(), "ada/away"
    topology.hub.fault(method="POST", path_regex=f"{target}/commit/main", status=503, times=1000)
    job = ada.submit(target)
    failed = ada.reach(job, "failed")
    assert failed["error"]["code"] == "hub_unavailable"
    assert topology.commits_of(job) == []
    topology.hub.clear_faults()
    ada.retry(job).raise_for_status()
    topology.assert_published_once(ada.reach(job))
    assert ada.stages(job, "kept") == ["pull", "calibrate", "align", "fit", "validate", "report"]


def steal(topology: Topology, job: Json) -> None:
    """Let the lease run out in one moment, before its holder can renew it; the workers' sweepers do the rest."""
    with topology.store.database.write() as session:
        past = topology.store.database.now(session) - timedelta(seconds=1)
        session.execute(update(JobRow).where(JobRow.id == job["id"]).values(lease_expires_at=past, claimed_at=past))
        row = session.get_one(JobRow, job["id"])
        row.fencing += 1  # whatever its holder writes meanwhile is refused


@pytest.mark.parametrize("moment", ["before the commit", "during the commit"])
def test_a_lease_stolen_at_the_commit_publishes_once(topology: Topology, moment: str) -> None:
    """The late worker makes no commit; one that is on its way already is beaten by the next worker's, or found."""
    ada, target = topology.caller(), f"ada/stolen-{moment.split()[0]}"
    if moment == "before the commit":
        topology.hub.fault(method="POST", path_regex=f"{target}.git/info/lfs/objects/batch", delay_s=1.8)
    else:
        topology.hub.fault(method="POST", path_regex=f"{target}/commit/main", delay_s=1.8)
    waiting = "preupload" if moment == "before the commit" else "objects/batch"
    job = ada.submit(target)
    ada.see(job, "publish")
    wait_for(lambda: [entry for entry in topology.hub.log() if target in entry["path"] and waiting in entry["path"]])
    steal(topology, job)
    done = ada.reach(job)
    assert done["attempts"] == 2
    topology.assert_published_once(done)
    commits = [entry for entry in topology.hub.log() if f"{target}/commit/main" in entry["path"]]
    assert len(commits) == 1 or moment == "during the commit"
