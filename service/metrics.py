"""What Prometheus reads of the store, made of one census at each scrape; must hold no count in memory.

So every API process says the same, after a restart too. No label and no value tells of a tenant, a repo or a token.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from worker.census import Census, take_census
from worker.counters import Counter
from worker.jobs import ErrorCode, JobState, Stage
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
        yield from _now(census)
        yield from _so_far(census)
        build = GaugeMetricFamily(
            "kvalign_build_info", "Version of the API that answers; always 1.", labels=["version"]
        )
        build.add_metric([self._version], 1)
        yield build


def _now(census: Census) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("kvalign_jobs", "Jobs that are in a state now.", labels=["state"])
    for state, count in census.jobs.items():
        jobs.add_metric([state.value], count)
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


def _so_far(census: Census) -> Iterator[Metric]:
    """Since the tables were made; every label is there from the first scrape on, so that its first rise is seen."""
    for counter, name, what in (
        (Counter.ATTEMPTS, "kvalign_job_attempts", "Times that a worker took a job."),
        (Counter.LEASES_EXPIRED, "kvalign_leases_expired", "Attempts that ended because their worker fell silent."),
        (Counter.BYTES_DOWNLOADED, "kvalign_downloaded_bytes", "Bytes of models and texts pulled from the Hub."),
        (Counter.BYTES_UPLOADED, "kvalign_uploaded_bytes", "Bytes of converted models published to the Hub."),
    ):
        yield CounterMetricFamily(name, what, value=census.counted[counter].get("", 0))
    ended = CounterMetricFamily(
        "kvalign_jobs_ended", "Jobs that came to an end; `code` is why one failed.", labels=["state", "code"]
    )
    for label in (JobState.SUCCEEDED, JobState.CANCELED, *ErrorCode):
        if label is not ErrorCode.CANCELED:  # no job fails with it, and a state has the same name
            state, code = (JobState.FAILED, label) if isinstance(label, ErrorCode) else (label, "")
            ended.add_metric([state, code], census.counted[Counter.JOBS_ENDED].get(label, 0))
    yield ended
    stages = SummaryMetricFamily(
        "kvalign_stage_seconds", "Time that finished stages took, of all attempts.", labels=["stage"]
    )
    finished, seconds = census.counted[Counter.STAGES_FINISHED], census.counted[Counter.STAGE_SECONDS]
    for stage in Stage:
        stages.add_metric([stage], count_value=int(finished.get(stage, 0)), sum_value=seconds.get(stage, 0.0))
    yield stages
