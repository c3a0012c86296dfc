"""What has to hold before a request becomes a job, and how workers hear of it; must not know HTTP.

A bad request fails here, at once and with its code, instead of minutes later in a worker.
"""

import logging

from kvalign.config import ConversionConfig, is_local_dataset
from kvalign.errors import ConfigInvalid
from service.auth import Caller
from service.wiring import ServiceParts
from worker.app import enqueue
from worker.jobs import Job
from worker.preflight import Preflight, preflight
from worker.store import Submission

log = logging.getLogger(__name__)


def submit_job(
    wiring: ServiceParts, caller: Caller, config: ConversionConfig, idempotency_key: str | None
) -> Submission:
    """Check a request and store it as a job. Blocks on the Hub and on SQL.

    Raises ConfigInvalid, the errors of the source, the target and the Hub, IdempotencyConflict, QuotaExceeded.
    """
    check_config(config)
    if idempotency_key is not None:
        known = wiring.store.earlier(caller.tenant, config, source_commit=None, idempotency_key=idempotency_key)
        if known is not None:
            return _found(known)
    checked = preflight_of(wiring, caller, config)
    if checked.source is not None and checked.first_error() is not None:
        # A job that is publishing already holds the target: a repeat of its request is that job, not a conflict.
        commit = checked.source.commit
        twin = wiring.store.earlier(caller.tenant, config, source_commit=commit, idempotency_key=idempotency_key)
        if twin is not None:
            return _found(twin)
    source, _ = checked.passed()
    submission = wiring.store.submit(
        caller.tenant,
        config,
        source_commit=source.commit,
        token=caller.token,
        idempotency_key=idempotency_key,
    )
    if not submission.created:
        return _found(submission.job)
    _note("job submitted", submission.job)
    return submission


def preflight_of(wiring: ServiceParts, caller: Caller, config: ConversionConfig) -> Preflight:
    """Everything that can be known here; disk and memory are the worker's to judge, which may be another machine."""
    return preflight(wiring.hub(caller.token), config, lookup=wiring.sources.lookup(caller.token))


def retry_job(wiring: ServiceParts, caller: Caller, job_id: str) -> Job:
    """Queue an ended job again, to act with the token of this request. Raises JobNotRetryable, QuotaExceeded."""
    job = wiring.store.retry(job_id, tenant=caller.tenant, token=caller.token)
    _note("job queued again", job)
    return job


def announce(wiring: ServiceParts, job: Job) -> None:
    """Wake a worker. When the broker is away the job waits in the store, and a worker's sweep finds it."""
    enqueue(wiring.celery, job.id)


def check_config(config: ConversionConfig) -> None:
    """Refuse what a configuration may say elsewhere and this service does not do. Raises ConfigInvalid."""
    for section, dataset in (("calibration", config.calibration.dataset), ("validation", config.validation.dataset)):
        if is_local_dataset(dataset):
            raise ConfigInvalid(
                f"{section}.dataset names the file '{dataset[:200]}'; the service reads no files of its machine.",
                "Name a dataset repo of the Hub, or 'builtin'.",
            )
    if config.webhook is not None:
        raise ConfigInvalid(
            "webhook is set; webhooks are not available yet.", "Leave it out, and follow the job's events instead."
        )
    for key, value in config.labels.items():
        if not key or "=" in key or not (key + value).isprintable():
            raise ConfigInvalid(
                f"labels: {key!r} has no name, a '=' in it, or characters that cannot be printed.",
                "Give labels a printable name without '=', and a printable value.",
            )


def _found(job: Job) -> Submission:
    _note("job found for a repeated request", job)
    return Submission(job, created=False)


def _note(what: str, job: Job) -> None:
    log.info(what, extra={"job_id": job.id, "tenant": job.tenant})
