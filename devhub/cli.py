"""`kvalign devhub`: put users and models into a folder and serve it; thin."""

import logging
import socket
from collections.abc import Sequence
from pathlib import Path

import click
import uvicorn

from devhub.app import DEFAULT_MULTIPART_BYTES, create_app
from devhub.errors import HubError
from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from devhub.storage import HubStorage

_SHUTDOWN_S = 2


@click.command()
@click.option("--root", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to serve.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="0 takes a free one.", show_default=True)
@click.option(
    "--user",
    "users",
    multiple=True,
    metavar="NAME:TOKEN[:read|write][:orgs=A,B]",
    help="Add a user, or one more token of theirs.",
)
@click.option(
    "--import",
    "imports",
    multiple=True,
    metavar="REPO=FOLDER",
    help="Make REPO (datasets/... for a data set) hold FOLDER. Large files are linked: do not edit them.",
)
@click.option("--private", "private_repos", multiple=True, metavar="REPO", help="Only its owner sees it.")
@click.option("--gated", "gated_repos", multiple=True, metavar="REPO", help="Only accepted accounts read its files.")
@click.option("--multipart-bytes", default=DEFAULT_MULTIPART_BYTES, show_default=True, type=click.IntRange(1))
@click.option("--faults", is_flag=True, help="For tests: serve /devhub/faults and /devhub/log to anyone.")
def devhub(
    root: Path,
    host: str,
    port: int,
    users: Sequence[str],
    imports: Sequence[str],
    private_repos: Sequence[str],
    gated_repos: Sequence[str],
    multipart_bytes: int,
    faults: bool,
) -> None:
    """Serve a Hub-compatible server on a folder: for demos, tests and machines without internet.

    Point clients at it with HF_ENDPOINT=http://HOST:PORT and HF_HUB_DISABLE_XET=1.
    """
    storage = HubStorage(root)
    try:
        for spec in users:
            _add_user(storage, spec)
        for spec in imports:
            _import(storage, spec)
        for name in private_repos:
            storage.find(parse_repo_spec(name)).change_settings(private=True)
        for name in gated_repos:
            storage.find(parse_repo_spec(name)).change_settings(gated="manual")
    except HubError as error:
        raise click.UsageError(error.message) from error
    _serve(create_app(storage, faults=faults, multipart_bytes=multipart_bytes), host, port)


def _add_user(storage: HubStorage, spec: str) -> None:
    name, _, rest = spec.partition(":")
    token, *options = rest.split(":")
    role, orgs = "write", ""
    for option in options:
        if option.startswith("orgs="):
            orgs = option.removeprefix("orgs=")
        else:
            role = option
    storage.add_user(name, token, role=role, orgs=[org for org in orgs.split(",") if org])


def _import(storage: HubStorage, spec: str) -> None:
    name, equals, folder = spec.partition("=")
    if not equals:
        raise click.UsageError(f"--import takes REPO=FOLDER, not {spec!r}.")
    import_folder(storage, parse_repo_spec(name), Path(folder))


def _serve(app: object, host: str, port: int) -> None:
    """Listen first and say where, so that who reads the line may connect at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"devhub listening on http://{shown}:{listener.getsockname()[1]}")
        logging.basicConfig(level=logging.WARNING)
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
        uvicorn.Server(config).run(sockets=[listener])
