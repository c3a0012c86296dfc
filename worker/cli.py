"""`kvalign worker`: settings checked, then Celery. Must not do anything that a worker does."""

import os
import socket
import sys
from typing import NoReturn

import click
from sqlalchemy.exc import SQLAlchemyError

from kvalign.errors import ConfigInvalid
from worker.settings import WorkerSettings


@click.command()
@click.option("--concurrency", type=click.IntRange(1, 64), default=1, show_default=True, help="Jobs to run at once.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def worker(concurrency: int, log_level: str) -> None:
    """Run conversion jobs from the queue. Configured by KVALIGN_* environment variables."""
    try:
        settings = WorkerSettings.load()
        sys.exit(_serve(settings, concurrency, log_level))
    except ConfigInvalid as error:
        _refuse(2, str(error))
    except SQLAlchemyError as error:
        _refuse(1, f"The database does not answer ({type(error).__name__}). Check KVALIGN_DATABASE_URL.")


def _serve(settings: WorkerSettings, concurrency: int, log_level: str) -> int:
    """Returns Celery's exit code once the worker has been told to stop."""
    from worker.app import create_celery
    from worker.pipeline import Tools
    from worker.store import JobStore
    from worker.tasks import Worker

    celery = create_celery(settings)
    store = JobStore.open(settings.database, settings.secret_key.get_secret_value())
    store.close()
    Worker(celery, settings, store, Tools.of(settings, concurrency)).attach()
    process = celery.Worker(
        pool_cls="prefork",
        concurrency=concurrency,
        loglevel=log_level,
        hostname=f"kvalign-{os.getpid()}@{socket.gethostname()}",
        without_mingle=True,
        without_gossip=True,
    )
    process.start()
    return process.exitcode or 0


def _refuse(exit_code: int, message: str) -> NoReturn:
    click.echo(f"kvalign worker: {message}", err=True)
    sys.exit(exit_code)
