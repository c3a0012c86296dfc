"""Broker, database and APIs that go away, on what docker-compose runs: PostgreSQL, Redis, two workers, two APIs.

Outages are short because leases are; scripts/soak has longer ones.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import psycopg
import pytest
from topology import LEASE_S, SOURCE, Json, Topology, is_ready, wait_for

from worker.app import create_celery, enqueue
from worker.settings import WorkerSettings

DATABASE = "postgresql"


@pytest.fixture
def held(topology: Topology, request: pytest.FixtureRequest) -> Iterator["Held"]:
    """A job in the middle of its conversion."""
    target = f"ada/{request.node.name.removeprefix('test_').translate(str.maketrans('[] ', '---')).strip('-')}"
    topology.mode("hold", target)
    job = topology.caller().submit(target)
    topology.caller().see(job, "fit")
    yield Held(topology, target, job)
    topology.mode("convert", target)


class Held:
    def __init__(self, topology: Topology, target: str, job: Json) -> None:
        self._topology = topology
        self._target = target
        self.job = job

    def let_go(self) -> Json:
        """The job, converted and published."""
        self._topology.mode("convert", self._target)
        done = self._topology.caller().reach(self.job)
        self._topology.assert_published_once(done)
        return done


def reset(topology: Topology) -> Callable[[], None]:
    with topology.redis.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal")
    return lambda: None


def empty(topology: Topology) -> Callable[[], None]:
    with topology.redis.client() as client:
        client.flushall()
    return lambda: None


def kill(topology: Topology) -> Callable[[], None]:
    topology.redis.kill()
    return topology.redis.start


def silence(topology: Topology) -> Callable[[], None]:
    topology.redis.process.send_signal(signal.SIGSTOP)
    return lambda: topology.redis.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", [reset, empty, kill, silence])
def test_a_broker_that_fails_costs_no_job_an_attempt(
    topology: Topology, held: Held, fault: Callable[[Topology], Callable[[], None]]
) -> None:
    ada, away = topology.caller(), fault in {kill, silence}
    before = len(topology.logs())
    mend = fault(topology)
    try:
        meanwhile = ada.submit(f"ada/meanwhile-{fault.__name__}")
        if away:
            time.sleep(6)
    finally:
        mend()
    assert held.let_go()["attempts"] == 1
    assert ada.reach(meanwhile)["attempts"] == 1
    if away:
        assert "the broker does not answer" in topology.logs()
    assert "a sweep failed" not in topology.logs()[before:]


def test_a_message_that_comes_many_times_runs_its_job_once(topology: Topology, held: Held) -> None:
    celery = create_celery(
        WorkerSettings.load(
            secret_key=topology.settings["KVALIGN_SECRET_KEY"], redis_url=topology.settings["KVALIGN_REDIS_URL"]
        )
    )
    with contextlib.closing(celery):
        for _ in range(8):
            assert enqueue(celery, held.job["id"])
    waiting = topology.caller().submit("ada/doubled")
    with topology.redis.client() as client:
        wait_for(lambda: client.llen("kvalign") == 0)
    assert topology.caller().reach(waiting)["attempts"] == 1
    assert held.let_go()["attempts"] == 1
    assert topology.caller().states(held.job) == ["queued", "running", "succeeded"]


def disconnect(topology: Topology) -> Callable[[], None]:
    assert topology.postgres is not None
    with psycopg.connect(topology.postgres.url, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    return lambda: None


def stop(topology: Topology) -> Callable[[], None]:
    assert topology.postgres is not None
    topology.postgres.stop()
    return topology.postgres.start


def crash(topology: Topology) -> Callable[[], None]:
    assert topology.postgres is not None
    topology.postgres.crash()
    return topology.postgres.start


def pause(topology: Topology) -> Callable[[], None]:
    assert topology.postgres is not None
    topology.postgres.pause()
    return topology.postgres.resume


@pytest.mark.parametrize(
    ("fault", "away_s"), [(disconnect, 0.0), (stop, 0.8), (crash, LEASE_S + 3), (pause, LEASE_S + 3)]
)
def test_a_database_that_was_away_has_its_jobs_go_on(
    topology: Topology, held: Held, fault: Callable[[Topology], Callable[[], None]], away_s: float
) -> None:
    before = len(topology.logs())
    mend = fault(topology)
    try:
        if fault is crash:
            assert_unavailable(topology)
        time.sleep(away_s)
    finally:
        mend()
    done = held.let_go()
    assert done["attempts"] <= (1 if fault is disconnect else 2)
    assert topology.caller().reach(topology.caller().submit(f"ada/after-{fault.__name__}"))["attempts"] == 1
    assert all(part.running for part in (*topology.workers, *topology.apis))
    assert "a sweep failed" not in topology.logs()[before:]


def assert_unavailable(topology: Topology) -> None:
    """What an API says meanwhile: a problem that names itself, and when to come back."""
    answer = topology.caller().http.get(f"{topology.apis[0].url}/v1/jobs")
    assert answer.status_code == 503
    assert answer.json()["code"] == "database_unavailable"
    assert int(answer.headers["retry-after"]) > 0
    assert httpx.get(f"{topology.apis[0].url}/healthz", trust_env=False).is_success


def test_a_database_that_goes_away_at_the_commit_leaves_one_commit(topology: Topology, held: Held) -> None:
    """The commit has happened and cannot be noted: whoever comes next finds it."""
    assert topology.postgres is not None
    target = held.job["config"]["target"]["repo"]
    topology.hub.fault(method="POST", path_regex=f"{target}/commit/main", apply_then_cut=True)
    topology.mode("convert", target)
    wait_for(lambda: topology.commits_of(held.job))
    topology.postgres.crash()
    time.sleep(2 * LEASE_S)
    topology.postgres.start()
    held.let_go()


def test_an_api_that_is_told_to_stop_finishes_its_requests(topology: Topology) -> None:
    api, answers = topology.apis[0], []
    topology.hub.fault(path_regex=f"/api/models/{SOURCE}/revision", delay_s=2)
    body = {"source": {"repo": SOURCE}, "target": {"repo": "ada/at-the-end"}}
    headers = {"Authorization": f"Bearer {topology.tokens['ada']}"}

    def submit() -> None:
        answers.append(httpx.post(f"{api.url}/v1/jobs", json=body, headers=headers, timeout=30, trust_env=False))

    request = threading.Thread(target=submit)
    request.start()
    wait_for(lambda: topology.hub.http.get("/devhub/faults").json() == [])
    assert api.stop() == 0
    request.join()
    assert answers[0].status_code == 202
    topology.assert_published_once(topology.caller().reach(answers[0].json()))


class Crowd:
    """People who go on asking all the time; `failures` are requests that no API answered rightly."""

    def __init__(self, topology: Topology, count: int = 3) -> None:
        self.jobs: list[Json] = []
        self.failures: list[str] = []
        self.answered = 0
        self._topology = topology
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(count)]

    def __enter__(self) -> "Crowd":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        caller = self._topology.caller("ben")
        while not self._over.is_set():
            try:
                if number == 0 and len(self.jobs) < 4:
                    self.jobs.append(caller.submit(f"ben/crowd-{len(self.jobs)}"))
                else:
                    caller.ask("GET", "/v1/jobs").raise_for_status()
                self.answered += 1
            except Exception as error:  # on a thread of its own, where nobody else would see it
                self.failures.append(repr(error))
            time.sleep(0.05)


def test_apis_are_restarted_and_killed_while_people_go_on(topology: Topology, held: Held) -> None:
    """A restart of one after the other is not noticed; kill -9 costs a second try; a stream loses no event."""
    ada, numbers = topology.caller(), []
    follower = threading.Thread(target=lambda: numbers.extend(topology.caller("ada").follow(held.job)))
    follower.start()
    topology.see_workers()
    with Crowd(topology) as crowd:
        for api in topology.apis:
            before = crowd.answered
            assert api.stop() == 0
            wait_for(lambda before=before: crowd.answered > before + 3)
            api.start()
            wait_for(lambda api=api: is_ready(api.url))
        assert not [tried for tried in ada.passed_over if "stream: Remote" in tried or "stream: Read" in tried]
        for api in topology.apis:
            before = crowd.answered
            api.kill()
            wait_for(lambda before=before: crowd.answered > before + 3)
            api.start()
            wait_for(lambda api=api: is_ready(api.url))
        wait_for(lambda: len(crowd.jobs) == 4)
    assert crowd.failures == []
    held.let_go()
    follower.join(40)
    assert numbers == list(range(1, len(ada.events(held.job)) + 1))
    for job in crowd.jobs:
        topology.assert_published_once(topology.caller("ben").reach(job))
    assert len(topology.caller("ben").ask("GET", "/v1/jobs").json()["data"]) == len(crowd.jobs)


def test_every_part_stops_when_told(topology: Topology) -> None:
    """And nothing secret is in a log; it comes last."""
    topology.see_workers()
    for part in (*topology.workers, *topology.apis):
        assert part.stop() == 0, part.log.read_text()
    secrets = [*topology.tokens.values(), topology.settings["KVALIGN_SECRET_KEY"]]
    assert [secret for secret in secrets if secret in topology.logs()] == []
