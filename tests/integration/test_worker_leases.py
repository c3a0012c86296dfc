"""Leases on real databases: claiming, fencing, sweeping, and what a running job writes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from worker_harness import claim, submit, wait_for

from kvalign.errors import Canceled, TimeLimit
from worker import watch as watch_module
from worker.jobs import ErrorCode, JobError, JobResult, JobState, Progress, Stage
from worker.journal import LINES_PER_EVENT, LOG_EVENTS, Journal
from worker.leases import Lease, LeaseLost, Leases
from worker.schema import JobRow
from worker.store import JobStore
from worker.sweeper import Sweeper, gone, remove_useless_workspaces, seen, sweep
from worker.watch import Watch, WorkerStopping
from worker.workspace import Workspaces

RESULT = JobResult("alice/out", "1" * 40, "http://hub/alice/out", 12.5, 0.01, 0.97)


def expire(store: JobStore, job_id: str) -> None:
    """Let the time pass that a lease was given for."""
    with store.database.write() as session:
        past = store.database.now(session) - timedelta(seconds=1)
        session.execute(update(JobRow).where(JobRow.id == job_id).values(lease_expires_at=past))


def kinds(store: JobStore, job_id: str) -> list[str]:
    return [event.kind for event in store.events(job_id, tenant="alice")]


def test_a_job_is_claimed_by_one(store: JobStore) -> None:
    job = submit(store)
    leases = Leases(store, lease_s=60, running_limit=5)
    with ThreadPoolExecutor(6) as pool:
        claimed = [lease for lease in pool.map(lambda i: leases.claim(f"w{i}"), range(6)) if lease]
    assert [lease.job.id for lease in claimed] == [job.id]
    assert claimed[0].job.attempts == claimed[0].fencing == 1
    assert store.get(job.id, tenant="alice").state == JobState.RUNNING


def test_a_tenant_runs_no_more_than_its_limit(store: JobStore) -> None:
    for i in range(4):
        submit(store, f"m{i}")
    bob = submit(store, "one", tenant="bob")
    leases = Leases(store, lease_s=60, running_limit=2)
    with ThreadPoolExecutor(5) as pool:
        claimed = [lease for lease in pool.map(lambda i: leases.claim(f"w{i}"), range(5)) if lease]
    tenants = sorted(lease.job.tenant for lease in claimed)
    assert tenants == ["alice", "alice", "bob"]
    assert leases.waiting(10) == []
    next(lease for lease in claimed if lease.job.tenant == "alice").cancel()
    assert len(leases.waiting(10)) == 1
    assert bob.id not in leases.waiting(10)


WRITES = {
    "renew": lambda lease: lease.renew(),
    "state": lambda lease: lease.state(),
    "token": lambda lease: lease.token(),
    "progress": lambda lease: lease.progress(Progress(Stage.PULL, 1, 2, "bytes"), tell=True),
    "stage_started": lambda lease: lease.stage_started(Stage.PULL),
    "stage_finished": lambda lease: lease.stage_finished(Stage.PULL, 1.0),
    "stage_kept": lambda lease: lease.stage_kept(Stage.PULL),
    "log": lambda lease: lease.log(["x"], limit=5),
    "save_report_file": lambda lease: lease.save_report_file("report.json", b"{}"),
    "begin_target": lambda lease: lease.begin_target(),
    "target_begun": lambda lease: lease.target_begun(),
    "succeed": lambda lease: lease.succeed(RESULT),
    "fail": lambda lease: lease.fail(JobError(ErrorCode.INTERNAL, "no")),
    "cancel": lambda lease: lease.cancel(),
    "hand_back": lambda lease: lease.hand_back(),
}


def test_nothing_but_the_newest_attempt_writes(store: JobStore) -> None:
    job = submit(store)
    late = claim(store, "slow")
    expire(store, job.id)
    sweep(store, max_attempts=3)
    current = claim(store, "quick")
    assert current.fencing == 2
    before = store.events(job.id, tenant="alice")
    for name, write in WRITES.items():
        with pytest.raises(LeaseLost):
            write(late)
        assert store.events(job.id, tenant="alice") == before, name
    current.succeed(RESULT)
    for write in WRITES.values():
        with pytest.raises(LeaseLost):
            write(current)
    assert store.get(job.id, tenant="alice").state == JobState.SUCCEEDED


def test_every_public_method_of_a_lease_is_fenced() -> None:
    methods = {name for name, value in vars(Lease).items() if callable(value) and not name.startswith("_")}
    assert methods == set(WRITES)


def test_a_lease_that_ran_out_unnoticed_can_be_renewed(store: JobStore) -> None:
    job = submit(store)
    lease = claim(store)
    expire(store, job.id)
    lease.renew()
    assert not sweep(store, max_attempts=1)


def test_a_handed_back_job_keeps_its_place_and_counts_no_loss(store: JobStore) -> None:
    first = submit(store, "a")
    submit(store, "b")
    for _ in range(5):
        lease = claim(store)
        assert lease.job.id == first.id
        lease.hand_back()
    job = store.get(first.id, tenant="alice")
    assert (job.state, job.attempts) == (JobState.QUEUED, 5)
    last = store.events(first.id, tenant="alice")[-1]
    assert last.data == {"state": "queued", "reason": "handed_back"}


def test_a_canceled_job_is_not_handed_back(store: JobStore) -> None:
    job = submit(store)
    lease = claim(store)
    store.request_cancel(job.id, tenant="alice")
    lease.hand_back()
    assert store.get(job.id, tenant="alice").state == JobState.CANCELED


def test_jobs_of_vanished_workers_come_back_and_then_fail(store: JobStore) -> None:
    job = submit(store)
    for loss in (1, 2):
        claim(store)
        assert not sweep(store, max_attempts=3)
        expire(store, job.id)
        assert sweep(store, max_attempts=3).requeued == [job.id]
        last = store.events(job.id, tenant="alice")[-1].data
        assert last == {"state": "queued", "reason": "worker_lost", "losses": loss}
    claim(store)
    expire(store, job.id)
    assert sweep(store, max_attempts=3).failed == [job.id]
    failed = store.get(job.id, tenant="alice")
    assert failed.error is not None
    assert (failed.state, failed.error.code) == (JobState.FAILED, ErrorCode.WORKER_LOST)
    assert failed.error.remedy


def test_a_retried_job_may_lose_its_worker_as_often_again(store: JobStore) -> None:
    job = submit(store)
    claim(store)
    expire(store, job.id)
    assert sweep(store, max_attempts=1).failed == [job.id]
    store.retry(job.id, tenant="alice", token="hf_again")
    claim(store)
    expire(store, job.id)
    assert sweep(store, max_attempts=2).requeued == [job.id]


def test_a_vanished_worker_of_a_job_to_cancel_ends_it(store: JobStore) -> None:
    job = submit(store)
    claim(store)
    store.request_cancel(job.id, tenant="alice")
    expire(store, job.id)
    assert sweep(store, max_attempts=3).canceled == [job.id]
    assert store.get(job.id, tenant="alice").state == JobState.CANCELED


def test_sweepers_at_once_count_one_loss(store: JobStore) -> None:
    job = submit(store)
    claim(store)
    expire(store, job.id)
    with ThreadPoolExecutor(4) as pool:
        swept = list(pool.map(lambda _: sweep(store, max_attempts=2), range(4)))
    assert [i for one in swept for i in one.requeued] == [job.id]


def test_workers_are_seen_and_gone(store: JobStore) -> None:
    seen(store, "a")
    seen(store, "a")
    seen(store, "b")
    assert store.live_workers(60) == 2
    gone(store, "a")
    assert store.live_workers(60) == 1
    time.sleep(0.05)
    assert store.live_workers(0.01) == 0


def test_old_idempotency_keys_are_forgotten(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(store)
    settings = job.config
    store.submit("alice", settings, source_commit="0" * 40, token="t", idempotency_key="k")
    seen(store, "w")
    store.request_cancel(job.id, tenant="alice")
    monkeypatch.setattr("worker.sweeper.IDEMPOTENCY_KEYS_KEPT", timedelta(0))
    seen(store, "w")
    fresh = store.submit("alice", settings, source_commit="0" * 40, token="t", idempotency_key="k")
    assert fresh.created


def test_workspaces_stay_while_somebody_may_go_on_with_them(store: JobStore, tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)

    def folder_of(job_id: str) -> Path:
        with workspaces.open(job_id, lambda: None) as workspace:
            return workspace.root

    done, failed, queued = (submit(store, name).id for name in ("done", "failed", "queued"))
    claim(store).succeed(RESULT)
    claim(store).fail(JobError(ErrorCode.INTERNAL, "no"))
    unknown = "job_" + "0" * 26
    folders = {job_id: folder_of(job_id) for job_id in (done, failed, queued, unknown)}
    (tmp_path / "jobs" / "not-a-job").mkdir()
    removed = remove_useless_workspaces(store, workspaces, failed_kept_s=60)
    assert sorted(removed) == sorted([done, unknown])
    assert [folder.exists() for folder in folders.values()] == [False, True, True, False]
    assert remove_useless_workspaces(store, workspaces, failed_kept_s=0) == [failed]
    assert (tmp_path / "jobs" / "not-a-job").exists()


def test_a_workspace_in_use_is_not_removed(store: JobStore, tmp_path: Path) -> None:
    workspaces = Workspaces(tmp_path)
    job_id = "job_" + "0" * 26
    with workspaces.open(job_id, lambda: None) as workspace:
        assert remove_useless_workspaces(store, workspaces, failed_kept_s=0) == []
        assert workspace.root.exists()


def test_a_sweeper_survives_a_failing_pass(caplog: pytest.LogCaptureFixture) -> None:
    passes = []

    def one_pass() -> None:
        passes.append(1)
        if len(passes) == 1:
            raise ConnectionError("the database is away")

    sweeper = Sweeper(one_pass, every_s=0.01)
    sweeper.start()
    wait_for(lambda: len(passes) >= 3)
    sweeper.stop()
    assert not sweeper.is_alive()
    assert "a sweep failed" in caplog.text


def test_a_sweeper_that_never_began_can_be_stopped() -> None:
    """As when a worker is told to stop before it is ready."""
    sweeper = Sweeper(lambda: None, every_s=60)
    sweeper.stop()
    sweeper.start()
    sweeper.join(10)
    assert not sweeper.is_alive()


def watching(lease: Lease, *, heartbeat_s: float = 60, time_limit_s: float = 60, stopping: bool = False) -> Watch:
    return Watch(lease, heartbeat_s=heartbeat_s, time_limit_s=time_limit_s, stopping=lambda: stopping)


def test_a_watch_renews_the_lease(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.0)
    job = submit(store)
    lease = claim(store)
    watch = watching(lease, heartbeat_s=0.01)
    expire(store, job.id)
    time.sleep(0.02)
    watch.check()
    assert not sweep(store, max_attempts=1)


def test_a_watch_names_each_reason_to_stop(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.0)
    job = submit(store)
    lease = claim(store)
    watching(lease).check()
    watching(lease).confirm()
    with pytest.raises(WorkerStopping):
        watching(lease, stopping=True).check()
    with pytest.raises(TimeLimit, match="limit"):
        watching(lease, time_limit_s=-1).check()
    store.request_cancel(job.id, tenant="alice")
    canceled = watching(lease)
    with pytest.raises(Canceled):
        canceled.check()
    with pytest.raises(Canceled):
        canceled.recall()
    with pytest.raises(Canceled):
        watching(lease).confirm()
    lease.cancel()
    with pytest.raises(LeaseLost):
        watching(lease).check()


def test_a_watch_leaves_a_call_that_hangs(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(watch_module, "GRACE_S", 0.1)
    job = submit(store)
    watch = watching(claim(store))
    release = threading.Event()
    store.request_cancel(job.id, tenant="alice")
    began = time.monotonic()
    with pytest.raises(Canceled):
        watch.during(lambda: release.wait(30))
    assert time.monotonic() - began < 5
    release.set()


def test_a_call_that_ends_while_it_is_told_to_stop_has_happened(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was on its way when the owner canceled: the job has published, and must say so."""
    monkeypatch.setattr(watch_module, "LOOK_EVERY_S", 0.0)
    job = submit(store)
    watch = watching(claim(store))
    store.request_cancel(job.id, tenant="alice")
    assert watch.during(lambda: time.sleep(0.5) or 7) == 7
    with pytest.raises(Canceled):
        watch.check()


def test_a_watched_call_returns_and_raises(store: JobStore) -> None:
    submit(store)
    watch = watching(claim(store))
    assert watch.during(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        watch.during(lambda: 1 // 0)


def test_progress_reaches_the_row_often_and_events_seldom(store: JobStore) -> None:
    job = submit(store)
    now = 100.0
    journal = Journal(claim(store), clock=lambda: now)
    journal.stage_started(Stage.PULL)
    for i in range(1000):
        now += 0.01
        journal.progress(Progress(Stage.PULL, i + 1, 1000, "bytes"))
    events = [event.data for event in store.events(job.id, tenant="alice") if event.kind == "progress"]
    assert 9 <= len(events) <= 11
    assert events[0]["percent"] == 0.1
    assert events[0]["unit"] == "bytes"
    read = store.get(job.id, tenant="alice")
    assert read.progress == Progress(Stage.PULL, 1000, 1000, "bytes")
    journal.stage_finished(Stage.PULL, 1.5)
    journal.stage_started(Stage.PULL)
    journal.stage_finished(Stage.PULL, 1.0)
    assert store.get(job.id, tenant="alice").stage_seconds == {"pull": 2.5}


def test_progress_without_a_total_is_told_now_and_then(store: JobStore) -> None:
    job = submit(store)
    now = 0.0
    journal = Journal(claim(store), clock=lambda: now)
    for i in range(300):
        now += 0.1
        journal.progress(Progress(Stage.CALIBRATE, i, 0, "tokens"))
    assert kinds(store, job.id).count("progress") in {3, 4}


def test_logs_are_bounded(store: JobStore) -> None:
    job = submit(store)
    now = 0.0
    journal = Journal(claim(store), clock=lambda: now)
    for _ in range(3):
        now += 2
        for i in range(1000):
            journal.log(f"line {i} of hf_canary_token in /secret/place/file.txt")
    journal.flush()
    logs = [event.data["lines"] for event in store.events(job.id, tenant="alice") if event.kind == "log"]
    assert len(logs) <= 4
    assert all(len(lines) <= LINES_PER_EVENT for lines in logs)
    assert logs[0] == ["line 0 of *** in file.txt"]


def test_log_events_stop_at_the_limit_of_a_job(store: JobStore) -> None:
    job = submit(store)
    lease = claim(store)
    for _ in range(4):
        lease.log(["x"], limit=3)
    assert kinds(store, job.id).count("log") == 3
    assert LOG_EVENTS > 3


def test_report_files_outlive_the_job(store: JobStore) -> None:
    job = submit(store)
    lease = claim(store)
    lease.save_report_file("report.json", b"old")
    lease.save_report_file("report.json", b"\x00\xff")
    lease.save_report_file("figures/kl.png", b"png")
    lease.fail(JobError(ErrorCode.QUALITY_GATE, "KL 0.2; the limit is 0.05."))
    assert store.report_files(job.id, tenant="alice") == ["figures/kl.png", "report.json"]
    assert store.report_file(job.id, "report.json", tenant="alice") == b"\x00\xff"


def test_a_begun_target_is_remembered(store: JobStore) -> None:
    job = submit(store)
    lease = claim(store)
    assert not lease.target_begun()
    lease.begin_target()
    expire(store, job.id)
    sweep(store, max_attempts=9)
    assert claim(store).target_begun()
