"""Notes acts that were refused, and logs every act; what was done is noted by the store, in its own transaction."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from kvalign.errors import KvalignError
from worker.jobs import Origin
from worker.store import JobStore

log = logging.getLogger(__name__)


@contextmanager
def refusals_noted(
    store: JobStore,
    origin: Origin,
    action: str,
    *,
    tenant: str | None,
    job_id: str | None = None,
    of: type[KvalignError] = KvalignError,
) -> Iterator[None]:
    """An error of that class that leaves this block becomes an entry with its code."""
    try:
        yield
    except of as error:
        code = str(getattr(error, "problem_code", error.code))
        store.note(origin, action, code, tenant=tenant, job_id=job_id)
        tell(origin, action, code, tenant=tenant, job_id=job_id)
        raise


def tell(origin: Origin, action: str, outcome: str, *, tenant: str | None, job_id: str | None) -> None:
    """The same entry as a line of the log."""
    fields = {"action": action, "outcome": outcome, "tenant": tenant, "job_id": job_id, "address": origin.address}
    log.info("audit: %s %s", action, outcome, extra={name: value for name, value in fields.items() if value})
