"""What Prometheus reads, made of one census of the store at each scrape; must hold no count in memory.

So every API process says the same, after a restart too. No label and no value tells of a tenant, a repo or a token.
"""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from worker.census import take_census
from worker.store import JobStore


class StoreCollector(Collector):
    """Metrics of the store behind an API.

    worker_seen_within_s  a worker that was seen this lately is alive, as for /readyz
    """

    def __init__(self, store: JobStore, *, worker_seen_within_s: float, version: str) -> None:
        self._store = store
        self._worker_seen_within_s = worker_seen_within_s
        self._version = version

    def collect(self) -> Iterator[Metric]:
        """Asks the database anew. Raises SQLAlchemyError before the first metric."""
        census = take_census(self._store, worker_seen_within_s=self._worker_seen_within_s)
        jobs = GaugeMetricFamily("kvalign_jobs", "Jobs that are in a state now.", labels=["state"])
        for state, count in census.jobs.items():
            jobs.add_metric([state.value], count)
        build = GaugeMetricFamily(
            "kvalign_build_info", "Version of the API that answers; always 1.", labels=["version"]
        )
        build.add_metric([self._version], 1)
        yield jobs
        yield GaugeMetricFamily(
            "kvalign_queue_oldest_age_seconds",
            "How long the oldest queued job has been waiting; 0 when none waits.",
            value=census.oldest_queued_s,
        )
        yield GaugeMetricFamily(
            "kvalign_jobs_running_lease_expired",
            "Running or cancelling jobs whose lease has run out and which no sweeper has taken up yet.",
            value=census.lease_expired,
        )
        yield GaugeMetricFamily(
            "kvalign_workers_alive",
            "Workers that were seen lately, as /readyz counts them.",
            value=census.workers_alive,
        )
        yield build
