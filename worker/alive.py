"""Whether a worker of this host said lately that it lives: for health checks. Changes nothing.

python -m worker.alive      exit status 0 when one did
"""

import socket
import sys
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from kvalign.errors import ConfigInvalid
from worker.database import Database
from worker.schema import WorkerRow
from worker.settings import WorkerSettings

SEEN_WITHIN_S = 60.0


def _main() -> int:
    try:
        database = Database.as_found(WorkerSettings.load().database)
        if database is None:
            return 1
        try:
            return 0 if _seen(database) else 1
        finally:
            database.close()
    except (ConfigInvalid, SQLAlchemyError):
        return 1


def _seen(database: Database) -> bool:
    """Workers name themselves host:process (worker.tasks)."""
    with database.read() as session:
        oldest = database.now(session) - timedelta(seconds=SEEN_WITHIN_S)
        here = WorkerRow.name.startswith(f"{socket.gethostname()}:", autoescape=True)
        return bool(session.scalar(select(func.count()).where(here, WorkerRow.seen_at >= oldest)))


if __name__ == "__main__":
    sys.exit(_main())
