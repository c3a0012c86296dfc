"""The faults of a soak, one at a time at random moments; what dies is started again, as an init system would."""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

import psutil
import psycopg
from topology import Part, Topology

from worker.app import create_celery, enqueue
from worker.settings import WorkerSettings

PAUSE_S = (1.0, 5.0)
RESTART_S = (0.3, 3.0)


class Chaos:
    """next() does one fault and waits a moment. `done` counts what was done."""

    def __init__(self, topology: Topology, rng: random.Random, *, lease_s: float) -> None:
        self.done: Counter[str] = Counter()
        self._topology = topology
        self._rng = rng
        self._lease_s = lease_s
        self._mends: list[threading.Timer] = []
        self._celery = create_celery(
            WorkerSettings.load(
                secret_key=topology.settings["KVALIGN_SECRET_KEY"], redis_url=topology.settings["KVALIGN_REDIS_URL"]
            )
        )
        self._faults: dict[str, tuple[int, Callable[[], object]]] = {
            "worker tree killed": (3, lambda: self._worker().kill_tree()),
            "worker main killed": (2, lambda: self._worker().kill()),
            "worker told to stop": (3, lambda: self._worker().ask_to_stop()),
            "worker stopped for longer than its lease": (2, self._stop_worker),
            "pool process killed": (3, lambda: self._one_of(self._worker().pool(), signal.SIGKILL)),
            "child killed": (2, lambda: self._one_of(self._worker().converting(), signal.SIGKILL)),
            "child stopped": (2, lambda: self._one_of(self._worker().converting(), signal.SIGSTOP)),
            "api killed": (2, lambda: self._api().kill()),
            "api told to stop": (2, lambda: self._api().ask_to_stop()),
            "redis killed and restarted": (2, self._restart_redis),
            "redis stopped for a while": (2, self._stop_redis),
            "redis emptied": (2, lambda: self._topology.redis.client().flushall()),
            "broker connections reset": (3, self._reset_connections),
            "messages doubled": (3, self._double_messages),
            "database away": (3, self._database_away),
            "hub fault": (8, self._hub_fault),
        }

    def next(self) -> None:
        names = list(self._faults)
        [name] = self._rng.choices(names, [weight for weight, _ in self._faults.values()])
        with contextlib.suppress(psutil.NoSuchProcess, OSError):  # it ended by itself a moment before
            self._faults[name][1]()
            self.done[name] += 1
        for part in (*self._topology.workers, *self._topology.apis):
            if not part.running:
                self._later(self._rng.uniform(*RESTART_S), part.start)
        time.sleep(self._rng.uniform(*PAUSE_S))

    def close(self) -> None:
        """Wait for what was to be mended later."""
        for mend in self._mends:
            mend.join()
        self._celery.close()

    def _worker(self) -> Part:
        return self._rng.choice(self._topology.workers)

    def _api(self) -> Part:
        return self._rng.choice(self._topology.apis)

    def _one_of(self, processes: list[psutil.Process], number: signal.Signals) -> None:
        if processes:
            self._rng.choice(processes).send_signal(number)

    def _stop_worker(self) -> None:
        worker = self._worker()
        family = worker.family()
        worker.signal_all(signal.SIGSTOP)
        self._later(self._rng.uniform(1, 3) * self._lease_s, lambda: _continue(family))

    def _restart_redis(self) -> None:
        self._topology.redis.kill()
        time.sleep(self._rng.uniform(0, 5))
        self._topology.redis.start()

    def _stop_redis(self) -> None:
        process = self._topology.redis.process
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._rng.uniform(1, 12))
        process.send_signal(signal.SIGCONT)

    def _reset_connections(self) -> None:
        with self._topology.redis.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal")

    def _double_messages(self) -> None:
        with self._topology.redis.client() as client:
            waiting = client.lrange("kvalign", 0, -1)
            for message in waiting:
                client.lpush("kvalign", message)
        for _ in range(5):
            enqueue(self._celery, "job_" + "0" * 26)

    def _database_away(self) -> None:
        seconds = self._rng.uniform(1, 2.5 * self._lease_s)
        if self._topology.postgres is None:
            with self._topology.locked_sqlite():
                time.sleep(seconds)
            return
        postgres = self._topology.postgres
        kind = self._rng.choice(["crash", "stop", "pause", "disconnect"])
        if kind == "disconnect":
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                )
        elif kind == "pause":
            postgres.pause()
            time.sleep(seconds)
            postgres.resume()
        else:
            postgres.crash() if kind == "crash" else postgres.stop()
            time.sleep(seconds)
            postgres.start()

    def _hub_fault(self) -> None:
        choose = self._rng.choice
        commit, model = r"/commit/main", r"/resolve/.*"
        self._topology.hub.fault(
            **choose(
                [
                    {"status": 429, "times": 3, "headers": {"Retry-After": "1"}},
                    {"status": 503, "times": 4},
                    {"status": 500, "times": 2},
                    {"method": "POST", "path_regex": commit, "apply_then_cut": True},
                    {"method": "POST", "path_regex": commit, "status": 409},
                    {"method": "POST", "path_regex": commit, "status": 412},
                    {"method": "POST", "path_regex": commit, "delay_s": 2 * self._lease_s},
                    {"method": "GET", "path_regex": model, "cut_after_bytes": 100, "times": 2},
                    {"method": "POST", "path_regex": "/api/repos/create", "apply_then_cut": True},
                    {"method": "POST", "path_regex": "info/lfs/objects/batch", "status": 503},
                ]
            )
        )

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, act)
        self._mends.append(timer)
        timer.start()


def _continue(family: list[psutil.Process]) -> None:
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
