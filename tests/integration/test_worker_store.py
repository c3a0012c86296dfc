"""The store on real databases: submissions, reading by tenant, cancel, retry, migrations."""

import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from cryptography.fernet import Fernet
from sqlalchemy import select, text
from worker_harness import COMMIT, TOKEN, claim, config, submit

from kvalign.errors import ConfigInvalid
from worker.jobs import ErrorCode, JobError, JobResult, JobState
from worker.leases import Leases
from worker.schema import Base, JobRow, TokenRow
from worker.store import IdempotencyConflict, JobNotFound, JobNotRetryable, JobStore, QuotaExceeded

RESULT = JobResult("alice/out", "1" * 40, "http://hub/alice/out", 12.5, 0.01, 0.97)


def test_a_submitted_job_is_queued_and_reads_back_whole(store: JobStore) -> None:
    settings = config(labels={"team": "blue"})
    before = datetime.now(UTC) - timedelta(seconds=5)
    submission = store.submit("alice", settings, source_commit=COMMIT, token=TOKEN)
    job = store.get(submission.job.id, tenant="alice")
    assert submission.created
    assert job == submission.job
    assert job.state == JobState.QUEUED
    assert job.config == settings
    assert job.source_commit == COMMIT
    assert job.created_at.tzinfo is not None
    assert before < job.created_at < datetime.now(UTC) + timedelta(seconds=5)
    assert job.timestamps == {"queued": job.created_at}
    [event] = store.events(job.id, tenant="alice")
    assert (event.sequence, event.kind, event.data) == (1, "state", {"state": "queued"})


def test_ids_sort_by_time_and_are_long(store: JobStore) -> None:
    ids = [submit(store, f"m{i}").id for i in range(5)]
    newest_first = [job.id for job in store.find(tenant="alice").jobs]
    assert sorted(ids, reverse=True) == newest_first
    assert all(len(i) == 30 for i in ids)


def test_the_same_conversion_alive_is_one_job(store: JobStore) -> None:
    job = submit(store)
    again = store.submit("alice", config(labels={"a": "b"}), source_commit=COMMIT, token=TOKEN)
    assert (again.job.id, again.created) == (job.id, False)


@pytest.mark.parametrize("different", ["tenant", "commit", "target", "codec"])
def test_a_different_conversion_is_another_job(store: JobStore, different: str) -> None:
    job = submit(store)
    other = store.submit(
        "bob" if different == "tenant" else "alice",
        config("other" if different == "target" else "out", codec={"ratio": 9} if different == "codec" else {}),
        source_commit="1" * 40 if different == "commit" else COMMIT,
        token=TOKEN,
    )
    assert other.created
    assert other.job.id != job.id


def test_the_same_conversion_after_the_end_is_a_new_job(store: JobStore) -> None:
    job = submit(store)
    store.request_cancel(job.id, tenant="alice")
    assert submit(store).id != job.id


def test_an_idempotency_key_returns_its_job_even_after_the_end(store: JobStore) -> None:
    def send(key: str, name: str = "out") -> tuple[str, bool]:
        submission = store.submit("alice", config(name), source_commit=COMMIT, token=TOKEN, idempotency_key=key)
        return submission.job.id, submission.created

    first, created = send("k1")
    assert created
    store.request_cancel(first, tenant="alice")
    assert send("k1") == (first, False)
    with pytest.raises(IdempotencyConflict, match=first):
        send("k1", "other")
    assert send("k2")[1]


def test_an_idempotency_key_belongs_to_one_tenant(store: JobStore) -> None:
    first = store.submit("alice", config(), source_commit=COMMIT, token=TOKEN, idempotency_key="k").job
    second = store.submit("bob", config("x"), source_commit=COMMIT, token=TOKEN, idempotency_key="k").job
    assert first.id != second.id


def test_a_tenant_has_a_limit_of_alive_jobs(database_url: str, secret_key: str) -> None:
    store = JobStore.open(database_url, secret_key, alive_limit=2)
    first = submit(store, "a")
    submit(store, "b")
    with pytest.raises(QuotaExceeded, match="limit is 2"):
        submit(store, "c")
    submit(store, "c", tenant="bob")
    store.request_cancel(first.id, tenant="alice")
    submit(store, "c")
    with pytest.raises(QuotaExceeded):
        store.retry(first.id, tenant="alice", token=TOKEN)
    store.close()


def test_a_foreign_job_is_not_there(store: JobStore) -> None:
    job = submit(store)
    for read in (store.get, store.events, store.request_cancel, store.report_files):
        with pytest.raises(JobNotFound):
            read(job.id, tenant="mallory")  # type: ignore[operator]
    with pytest.raises(JobNotFound):
        store.retry(job.id, tenant="mallory", token=TOKEN)
    with pytest.raises(JobNotFound):
        store.report_file(job.id, "report.json", tenant="mallory")
    assert store.find(tenant="mallory").jobs == []
    with pytest.raises(JobNotFound):
        store.get("job_nothing\0", tenant="alice")


def test_finding_by_state_label_and_page(store: JobStore) -> None:
    plain = submit(store, "plain")
    labelled = submit(store, "labelled", labels={"team": "blue=green", "run": "7"})
    store.request_cancel(plain.id, tenant="alice")

    def ids(**wanted: object) -> list[str]:
        return [job.id for job in store.find(tenant="alice", **wanted).jobs]  # type: ignore[arg-type]

    assert ids(state=JobState.CANCELED) == [plain.id]
    assert ids(label="team") == ids(label="team=blue=green") == ids(label="run=7") == [labelled.id]
    assert ids(label="team=red") == ids(label="nope") == ids(label="te\0am") == []
    page = store.find(tenant="alice", limit=1)
    assert ([job.id for job in page.jobs], page.has_more) == ([labelled.id], True)
    page = store.find(tenant="alice", limit=1, after=labelled.id)
    assert ([job.id for job in page.jobs], page.has_more) == ([plain.id], False)


def test_events_go_on_after_a_sequence(store: JobStore) -> None:
    job = submit(store)
    store.request_cancel(job.id, tenant="alice")
    store.retry(job.id, tenant="alice", token=TOKEN)
    assert [event.sequence for event in store.events(job.id, tenant="alice")] == [1, 2, 3]
    assert [event.sequence for event in store.events(job.id, tenant="alice", after=1, limit=1)] == [2]


def test_cancel_in_every_state(store: JobStore) -> None:
    job = submit(store)
    assert store.request_cancel(job.id, tenant="alice").state == JobState.CANCELED
    store.retry(job.id, tenant="alice", token=TOKEN)
    lease = claim(store)
    assert store.request_cancel(job.id, tenant="alice").state == JobState.CANCELLING
    assert store.request_cancel(job.id, tenant="alice").state == JobState.CANCELLING
    lease.succeed(RESULT)
    done = store.request_cancel(job.id, tenant="alice")
    assert (done.state, done.result) == (JobState.SUCCEEDED, RESULT)


def test_retry_queues_an_ended_job_again(store: JobStore) -> None:
    job = submit(store)
    with pytest.raises(JobNotRetryable, match="queued"):
        store.retry(job.id, tenant="alice", token=TOKEN)
    claim(store).fail(JobError(ErrorCode.TIMEOUT, "It took too long.", "Wait."))
    failed = store.get(job.id, tenant="alice")
    assert failed.error == JobError(ErrorCode.TIMEOUT, "It took too long.", "Wait.")
    again = store.retry(job.id, tenant="alice", token="hf_newer")
    assert (again.state, again.error, again.attempts) == (JobState.QUEUED, None, 1)
    lease = claim(store)
    assert lease.token() == "hf_newer"
    assert lease.job.attempts == 2
    assert set(lease.job.timestamps) == {"queued", "running", "failed"}


def test_a_job_whose_twin_is_alive_cannot_be_retried(store: JobStore) -> None:
    job = submit(store)
    store.request_cancel(job.id, tenant="alice")
    twin = submit(store)
    with pytest.raises(JobNotRetryable, match=twin.id):
        store.retry(job.id, tenant="alice", token=TOKEN)


def test_tokens_are_encrypted_and_gone_at_the_end(store: JobStore) -> None:
    job = submit(store)
    with store.database.read() as session:
        [row] = session.scalars(select(TokenRow))
        assert TOKEN not in row.ciphertext
    assert claim(store).token() == TOKEN
    claimed = store.get(job.id, tenant="alice")
    assert TOKEN not in repr(claimed)


@pytest.mark.parametrize("end", ["succeed", "fail", "cancel"])
def test_every_end_deletes_the_token(store: JobStore, end: str) -> None:
    submit(store)
    lease = claim(store)
    if end == "succeed":
        lease.succeed(RESULT)
    elif end == "fail":
        lease.fail(JobError(ErrorCode.INTERNAL, "It broke."))
    else:
        lease.cancel()
    with store.database.read() as session:
        assert session.scalars(select(TokenRow)).all() == []


def test_the_queue_is_fair_among_tenants(store: JobStore) -> None:
    flood = [submit(store, f"m{i}").id for i in range(4)]
    late = submit(store, "one", tenant="bob").id
    assert [store.place_in_queue(i) for i in (*flood, late)] == [1, 3, 4, 5, 2]
    order = [claim(store).job.id for _ in range(5)]
    assert order == [flood[0], late, *flood[1:]]
    assert store.place_in_queue(late) is None


@pytest.mark.parametrize("seed", range(3))
def test_places_are_the_order_of_claims(store: JobStore, seed: int) -> None:
    """Whoever runs or was served before, and whoever else waits: first place, first claimed."""
    chance = random.Random(seed)
    for number in range(12):
        submit(store, f"before{number}", tenant=chance.choice("abc"))
    for lease in [claim(store) for _ in range(8)]:
        if chance.random() < 0.5:
            lease.cancel()
    ids = [submit(store, f"m{number}", tenant=chance.choice("abcde")).id for number in range(12)]
    waiting = Leases(store, lease_s=60, running_limit=99).waiting(99)
    assert set(ids) < set(waiting)
    assert store.places_in_queue(waiting) == {job_id: place for place, job_id in enumerate(waiting, start=1)}
    few = Leases(store, lease_s=60, running_limit=2).waiting(99)
    assert 0 < len(few) < len(waiting)
    assert [job_id for job_id in waiting if job_id in few] == few
    assert claim(store).job.id == waiting[0]


def test_the_tenant_last_served_longest_ago_comes_first(store: JobStore) -> None:
    """With one worker nobody runs anything at the moment of a claim: the flood must still not starve others."""
    flood = [submit(store, f"m{i}").id for i in range(3)]
    late = submit(store, "one", tenant="bob").id
    order = []
    for _ in range(4):
        lease = claim(store)
        order.append(lease.job.id)
        lease.cancel()
    assert order == [flood[0], late, *flood[1:]]


def test_counts_workers_and_ping(store: JobStore) -> None:
    submit(store)
    assert store.count_by_state()[JobState.QUEUED] == 1
    assert store.count_by_state()[JobState.FAILED] == 0
    assert store.live_workers(60) == 0
    store.ping()


def test_migrations_make_the_tables_of_the_schema(store: JobStore) -> None:
    with store.database.read() as session:
        connection = session.connection()
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
        found = session.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert found == store.database.revision().head


def test_opening_at_once_from_many_threads_migrates_once(database_url: str, secret_key: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: JobStore.open(database_url, secret_key), range(8)))
    submit(stores[0])
    assert all(len(store.find(tenant="alice").jobs) == 1 for store in stores)
    for store in stores:
        store.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql://a@b/c", "sqlite://", "sqlite:///:memory:"])
def test_a_url_that_cannot_work_is_refused(url: str, secret_key: str) -> None:
    with pytest.raises(ConfigInvalid):
        JobStore.open(url, secret_key)


def test_a_key_that_is_none_is_refused(tmp_path: object) -> None:
    with pytest.raises(ConfigInvalid, match="secret key"):
        JobStore.open(f"sqlite:///{tmp_path}/jobs.db", "short")


def _hammer(url: str, key: str, number: int) -> list[str]:
    """One process among several: submits, claims, tells and ends; the ids of what it ran."""
    store = JobStore.open(url, key)
    for i in range(6):
        submit(store, f"p{number}-{i}", tenant=f"t{number}")
        submit(store, f"shared-{i}", tenant="shared")
    ran = []
    for _ in range(30):
        try:
            lease = claim(store, f"process-{number}")
        except AssertionError:
            break
        lease.renew()
        lease.log(["working"], limit=10)
        ran.append(lease.job.id)
        lease.succeed(RESULT)
    store.close()
    return ran


def test_processes_at_once_run_every_job_once(database_url: str, secret_key: str) -> None:
    JobStore.open(database_url, secret_key).close()
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("spawn")) as pool:
        ran = [i for ids in pool.map(_hammer, [database_url] * 3, [secret_key] * 3, range(3)) for i in ids]
    store = JobStore.open(database_url, secret_key)
    rest = []
    while store.count_by_state()[JobState.QUEUED]:
        lease = claim(store)
        rest.append(lease.job.id)
        lease.succeed(RESULT)
    everything = ran + rest
    assert len(everything) == len(set(everything))
    with store.database.read() as session:
        rows = session.scalars(select(JobRow)).all()
    assert {row.state for row in rows} == {"succeeded"}
    assert {row.id for row in rows} == set(everything)
    for row in rows:
        sequences = [event.sequence for event in store.events(row.id, tenant=row.tenant)]
        assert sequences == list(range(1, row.last_event + 1))
    store.close()


def test_another_key_cannot_read_tokens(database_url: str, secret_key: str) -> None:
    store = JobStore.open(database_url, secret_key)
    submit(store)
    stranger = JobStore.open(database_url, Fernet.generate_key().decode())
    with pytest.raises(Exception, match="different secret keys"):
        claim(stranger).token()
    store.close()
    stranger.close()


def test_a_key_is_changed_without_losing_what_the_old_one_encrypted(database_url: str, secret_key: str) -> None:
    fresh = Fernet.generate_key().decode()
    old, both = JobStore.open(database_url, secret_key), JobStore.open(database_url, f"{fresh}, {secret_key}")
    new = JobStore.open(database_url, fresh)
    submit(old, "before")
    lease = claim(both)
    assert lease.token() == TOKEN
    lease.fail(JobError(ErrorCode.INTERNAL, "over"))
    submit(both, "after")
    assert claim(new).token() == TOKEN
    for store in (old, both, new):
        store.close()


@pytest.mark.parametrize("keys", ["", ",", "no-key", "{good},", "{good},no-key"])
def test_keys_that_cannot_work_are_refused(database_url: str, secret_key: str, keys: str) -> None:
    with pytest.raises(ConfigInvalid, match="secret key"):
        JobStore.open(database_url, keys.replace("{good}", secret_key))
