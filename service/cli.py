"""The commands `serve` (one machine, nothing else needed) and `api` (the API alone). Thin: parse, call, map.

Exit status: 0 stopped when asked, 1 a part failed, 2 wrong usage or settings.
"""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import click

from kvalign.errors import ConfigInvalid, KvalignError
from worker.tracing import configure_tracing, hand_over


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="KVALIGN_DATA_DIR",
    default=Path("~/.local/share/kvalign"),
    show_default=True,
    help="Where jobs, the key and the queue are kept.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8400, show_default=True)
@click.option("--hub-endpoint", envvar="KVALIGN_HUB_ENDPOINT", help="The Hub; the public one unless given.")
@click.option("--redis-url", envvar="KVALIGN_REDIS_URL", help="A running Redis; one is started unless given.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Conversions at a time.")
def serve(data_dir: Path, host: str, port: int, hub_endpoint: str | None, redis_url: str | None, workers: int) -> None:
    """Run API, worker, queue and database on this machine until Ctrl-C."""
    from service.logs import configure_logging
    from service.machine import Machine, run_machine
    from service.processes import BadStart

    configure_logging()
    folder = data_dir.expanduser().absolute()
    try:
        run_machine(Machine(folder, host, port, hub_endpoint, redis_url, workers), _announce)
    except BadStart as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except ConfigInvalid as error:
        _refuse(error)


@click.command()
@click.option("--host", envvar="KVALIGN_HOST", help="The address to listen on; 127.0.0.1 unless given.")
@click.option("--port", type=click.IntRange(1, 65535), envvar="KVALIGN_PORT", help="8400 unless given.")
def api(host: str | None, port: int | None) -> None:
    """Run the HTTP API alone; its settings come from KVALIGN_* environment variables."""
    import uvicorn
    from sqlalchemy.exc import SQLAlchemyError

    from service.app import create_app
    from service.logs import configure_logging
    from service.settings import ServiceSettings

    configure_logging()
    given = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    try:
        settings = ServiceSettings.load(**given)
        configure_tracing("api")
        app = create_app(settings)
    except ConfigInvalid as error:
        _refuse(error)
    except SQLAlchemyError as error:
        click.echo(f"error: The database does not answer ({type(error).__name__}).", err=True)
        click.echo("Check KVALIGN_DATABASE_URL.", err=True)
        sys.exit(1)
    # uvicorn raises the signal that stopped it once more, when all is closed.
    signal.signal(signal.SIGTERM, _end)
    uvicorn.run(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )


def _end(*_: object) -> NoReturn:
    """Leave at once: all is closed, and taking the interpreter apart keeps a restart waiting."""
    hand_over()
    os._exit(0)


def _announce(url: str) -> None:
    click.echo(f"kvalign serving on {url}")


def _refuse(error: KvalignError) -> NoReturn:
    click.echo(f"error: {error.message}", err=True)
    if error.remedy:
        click.echo(error.remedy, err=True)
    sys.exit(2)
