"""`kvalign worker`: settings checked, then Celery. Must not do anything that a worker does."""

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
        from worker.pipeline import Tools
        from worker.tasks import serve

        sys.exit(serve(settings, Tools.of(settings, concurrency), concurrency=concurrency, log_level=log_level))
    except ConfigInvalid as error:
        _refuse(2, str(error))
    except SQLAlchemyError as error:
        _refuse(1, f"The database does not answer ({type(error).__name__}). Check KVALIGN_DATABASE_URL.")


def _refuse(exit_code: int, message: str) -> NoReturn:
    click.echo(f"kvalign worker: {message}", err=True)
    sys.exit(exit_code)
