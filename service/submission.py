"""What has to hold before a request becomes a job, and how workers hear of it; must not know HTTP.

A bad request fails here, at once and with its code, instead of minutes later in a worker.
"""

import logging

from kvalign.config import ConversionConfig, Webhook, is_local_dataset
from kvalign.errors import ConfigInvalid
from service.audit import refusals_noted, tell
from service.auth import Caller
from service.webhooks.address import resolve_endpoint
from service.wiring import ServiceParts
from worker.app import enqueue
from worker.jobs import Job
from worker.preflight import Preflight, preflight
from worker.store import Submission

log = logging.getLogger(__name__)


def submit_job(
    wiring: ServiceParts,
    caller: Caller,
    config: ConversionConfig,
    idempotency_key: str | None,
) -> Submission:
    """Check a request and store it as a job. Blocks on the Hub and on SQL.

    Raises ConfigInvalid, the errors of the source, the target and the Hub, IdempotencyConflict, QuotaExceeded.
    """
    with refusals_noted(wiring.store, caller.origin, "submit", tenant=caller.tenant):
        return _submitted(wiring, caller, config, idempotency_key)


def _submitted(
    wiring: ServiceParts, caller: Caller, config: ConversionConfig, idempotency_key: str | None
) -> Submission:
    check_config(wiring, config)
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
        origin=caller.origin,
    )
    if not submission.created:
        return _found(submission.job)
    _tell(caller, "submit", submission.job)
    return submission


def preflight_of(wiring: ServiceParts, caller: Caller, config: ConversionConfig) -> Preflight:
    """Everything that can be known here; disk and memory are the worker's to judge, which may be another machine."""
    return preflight(wiring.hub(caller.token), config, lookup=wiring.sources.lookup(caller.token))


def retry_job(wiring: ServiceParts, caller: Caller, job_id: str) -> Job:
    """Queue an ended job again, to act with the token of this request. Raises JobNotRetryable, QuotaExceeded."""
    with refusals_noted(wiring.store, caller.origin, "retry", tenant=caller.tenant, job_id=job_id):
        job = wiring.store.retry(job_id, tenant=caller.tenant, token=caller.token, origin=caller.origin)
    _tell(caller, "retry", job)
    return job


def cancel_job(wiring: ServiceParts, caller: Caller, job_id: str) -> Job:
    """Stop a job; one that has ended stays as it is. Raises JobNotFound."""
    with refusals_noted(wiring.store, caller.origin, "cancel", tenant=caller.tenant, job_id=job_id):
        job = wiring.store.request_cancel(job_id, tenant=caller.tenant, origin=caller.origin)
    _tell(caller, "cancel", job)
    return job


def announce(wiring: ServiceParts, job: Job) -> None:
    """Wake a worker. When the broker is away the job waits in the store, and a worker's sweep finds it."""
    enqueue(wiring.celery, job.id)


def check_config(wiring: ServiceParts, config: ConversionConfig) -> None:
    """Refuse what a configuration may say elsewhere and this service does not do. Raises ConfigInvalid."""
    for section, dataset in (("calibration", config.calibration.dataset), ("validation", config.validation.dataset)):
        if is_local_dataset(dataset):
            raise ConfigInvalid(
                f"{section}.dataset names the file '{dataset[:200]}'; the service reads no files of its machine.",
                "Name a dataset repo of the Hub, or 'builtin'.",
            )
    for key, value in config.labels.items():
        if not key or "=" in key or not (key + value).isprintable():
            raise ConfigInvalid(
                f"labels: {key!r} has no name, a '=' in it, or characters that cannot be printed.",
                "Give labels a printable name without '=', and a printable value.",
            )
    if config.webhook is not None:
        check_webhook(wiring, config.webhook)


def check_webhook(wiring: ServiceParts, webhook: Webhook) -> None:
    """Refuse an address that messages could not be sent to. Blocks on the name server; raises ConfigInvalid."""
    resolve_endpoint(webhook.url, allow_private=wiring.settings.webhook_allow_private)


def set_webhook(wiring: ServiceParts, caller: Caller, job_id: str, webhook: Webhook | None) -> tuple[Job, str | None]:
    """Tell another address from now on, or none. Returns the secret if one was made. Raises ConfigInvalid."""
    with refusals_noted(wiring.store, caller.origin, "webhook", tenant=caller.tenant, job_id=job_id):
        if webhook is not None:
            wiring.store.get(job_id, tenant=caller.tenant)
            check_webhook(wiring, webhook)
        job, made = wiring.store.set_webhook(job_id, webhook, tenant=caller.tenant, origin=caller.origin)
    tell(caller.origin, "webhook", "set" if webhook else "removed", tenant=caller.tenant, job_id=job_id)
    return job, made


def _found(job: Job) -> Submission:
    log.info("job found for a repeated request", extra={"job_id": job.id, "tenant": job.tenant})
    return Submission(job, created=False)


def _tell(caller: Caller, action: str, job: Job) -> None:
    tell(caller.origin, action, job.state.value, tenant=caller.tenant, job_id=job.id)
