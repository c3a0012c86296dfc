"""Numbers that only grow, kept in the database by the transaction of the event that they count.

So they outlive every process, and an event that was rolled back was not counted. Must not know who reads them.
"""

from collections.abc import Mapping
from enum import StrEnum

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from worker.schema import CounterRow


class Counter(StrEnum):
    """What is counted, and what its label says. Values are stored: never rename them."""

    ATTEMPTS = "attempts"  # jobs taken by a worker
    BYTES_DOWNLOADED = "bytes_downloaded"  # from the Hub
    BYTES_UPLOADED = "bytes_uploaded"  # to the Hub
    JOBS_ENDED = "jobs_ended"  # by state; of a failed one by its error code
    LEASES_EXPIRED = "leases_expired"  # attempts whose worker vanished
    STAGES_FINISHED = "stages_finished"  # by stage
    STAGE_SECONDS = "stage_seconds"  # by stage; of finished ones


def count(session: Session, amounts: Mapping[tuple[Counter, str], float]) -> None:
    """Add to counters, each named with its label. To be the last that a transaction asks for.

    Its rows stay locked until the commit, and are locked in one order, so that no two transactions wait for each other.
    """
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    rows = [{"name": name.value, "label": label, "value": amounts[name, label]} for name, label in sorted(amounts)]
    session.flush()
    for row in rows:
        wanted = insert(CounterRow).values(row)
        added = CounterRow.value + wanted.excluded.value
        session.execute(wanted.on_conflict_do_update(index_elements=["name", "label"], set_={"value": added}))


def read(session: Session) -> dict[Counter, dict[str, float]]:
    """Every counter by label; empty where nothing was counted yet. Names of other versions of kvalign are left out."""
    found: dict[Counter, dict[str, float]] = {name: {} for name in Counter}
    for row in session.execute(select(CounterRow.name, CounterRow.label, CounterRow.value)):
        if row.name in found:
            found[Counter(row.name)][row.label] = row.value
    return found
