"""The commands submit, jobs, watch, cancel and retry: thin clients of the API. They never print the token.

Exit status: 0 done, 1 the work failed or was canceled, 2 wrong usage.
"""

import contextlib
import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from service.api_client import ApiClient, ApiError, is_loopback
from service.follow import Bars, JsonLines, Lines, View, show_all
from service.words import printable

DEFAULT_API = "http://127.0.0.1:8400"
_UNFOLDED_COLUMNS = 10_000
_USAGE_CODES = {"config_invalid", "request_invalid"}

Command = Callable[..., None]


def _api_options(command: Command) -> Command:
    """--api, --token and --json, which every command here has."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Write JSON."),
        click.option(
            "--token",
            envvar=["KVALIGN_TOKEN", "HF_TOKEN"],
            help="A token of your Hub account. Better set in KVALIGN_TOKEN or HF_TOKEN: others see command lines.",
        ),
        click.option("--api", envvar="KVALIGN_API", default=DEFAULT_API, show_default=True, help="The API's URL."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source", required=False)
@click.argument("target", required=False)
@click.option("--revision", help="Branch, tag or commit of the source.")
@click.option("--max-kl", type=float, help="The smallest cache within this KL divergence, in nats per token.")
@click.option("--ratio", type=float, help="A cache this many times smaller at rest.")
@click.option(
    "--layout", type=click.Choice(["full", "codec"]), help="The whole model, or only what kvalign adds to it."
)
@click.option("--visibility", type=click.Choice(["private", "public"]), help="Of the target repo.")
@click.option("--calibration-tokens", type=int, help="How much text the codec is fitted on.")
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The whole configuration as TOML or JSON; arguments and options come before what it says.",
)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be given more than once.")
@click.option("--watch", "watching", is_flag=True, help="Stay until the job has ended.")
@_api_options
def submit(
    source: str | None,
    target: str | None,
    revision: str | None,
    max_kl: float | None,
    ratio: float | None,
    layout: str | None,
    visibility: str | None,
    calibration_tokens: int | None,
    file: Path | None,
    labels: tuple[str, ...],
    watching: bool,
    api: str,
    token: str | None,
    as_json: bool,
) -> None:
    """Submit the conversion of the Hub repo SOURCE into the repo TARGET."""
    config = _read_config(file) if file else {}
    if max_kl is not None or ratio is not None:
        _section(config, "codec").update(max_kl=max_kl, ratio=ratio)
    for section, key, value in (
        ("source", "repo", source),
        ("source", "revision", revision),
        ("target", "repo", target),
        ("target", "layout", layout),
        ("target", "visibility", visibility),
        ("calibration", "tokens", calibration_tokens),
    ):
        if value is not None:
            _section(config, section)[key] = value
    if labels:
        _section(config, "labels").update(_parse_labels(labels))
    for section in ("source", "target"):
        if "repo" not in _section(config, section):
            raise click.UsageError(f"Name the {section.upper()} repo, as an argument or in --config.")
    with _client(api, token) as client:
        job = client.submit(config)
        if job.get("webhook_secret") and not (as_json and not watching):
            _say(f"webhook secret, shown this once: {job['webhook_secret']}", error=as_json)
        if watching:
            _say(f"{job['id']} {job['state']}", error=as_json)
            _watch(client, job["id"], as_json)
        else:
            _print_job(job, as_json)


@click.command()
@click.option("--state", help="Only jobs in this state.")
@click.option("--label", metavar="KEY[=VALUE]", help="Only jobs with this label.")
@click.option("--limit", type=click.IntRange(1, 100), default=20, show_default=True)
@click.option("--after", metavar="ID", help="Go on after this job of an earlier list.")
@_api_options
def jobs(
    state: str | None,
    label: str | None,
    limit: int,
    after: str | None,
    api: str,
    token: str | None,
    as_json: bool,
) -> None:
    """List your jobs, newest first."""
    with _client(api, token) as client:
        page = client.jobs(state=state, label=label, limit=limit, after=after)
    if as_json:
        click.echo(json.dumps(page))
        return
    # Lines are whole where a program reads them, and ids everywhere: people copy them.
    Console(width=None if sys.stdout.isatty() else _UNFOLDED_COLUMNS).print(_table(page["data"]))
    if page["has_more"]:
        _say(f"There are more: --after {page['data'][-1]['id']}", error=True)


@click.command()
@click.argument("job_id", metavar="ID")
@_api_options
def watch(job_id: str, api: str, token: str | None, as_json: bool) -> None:
    """Follow a job until it has ended."""
    with _client(api, token) as client:
        _watch(client, job_id, as_json)


@click.command()
@click.argument("job_id", metavar="ID")
@_api_options
def cancel(job_id: str, api: str, token: str | None, as_json: bool) -> None:
    """Stop a job, in whichever stage it is."""
    with _client(api, token) as client:
        _print_job(client.cancel(job_id), as_json)


@click.command()
@click.argument("job_id", metavar="ID")
@_api_options
def retry(job_id: str, api: str, token: str | None, as_json: bool) -> None:
    """Go on with a job that failed or was canceled, after its last finished stage."""
    with _client(api, token) as client:
        _print_job(client.retry(job_id), as_json)


@contextlib.contextmanager
def _client(api: str, token: str | None) -> Iterator[ApiClient]:
    """An API client; its refusals become a message, a remedy and an exit status."""
    if not token:
        raise click.UsageError("No token: set KVALIGN_TOKEN or HF_TOKEN to a token of your Hub account.")
    if not api.startswith(("http://", "https://")):
        raise click.UsageError(f"--api is '{api}'; it begins with http:// or https://.")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise click.UsageError("The token has characters that no Hub token has.")
    if api.startswith("http://") and not is_loopback(api):
        _say(f"warning: the token travels to {api} unencrypted; use https.", error=True)
    try:
        with ApiClient(api, token) as client:
            yield client
    except ApiError as error:
        _say(f"error: {error.message}", error=True)
        if error.remedy:
            _say(error.remedy, error=True)
        sys.exit(2 if error.code in _USAGE_CODES else 1)


def _watch(client: ApiClient, job_id: str, as_json: bool) -> None:
    """Show events until the end, then the outcome; exits 1 unless the job succeeded."""
    console = Console()
    view: View = JsonLines() if as_json else Bars(console) if console.is_terminal else Lines()
    show_all(view, client.follow(job_id))
    job = client.job(job_id)
    if as_json:
        click.echo(json.dumps({"kind": "job", "data": job}))
    else:
        _print_outcome(job)
    if job["state"] != "succeeded":
        sys.exit(1)


def _print_job(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(job))
        return
    place = f", place {job['place_in_queue']} in the queue" if job["place_in_queue"] else ""
    _say(f"{job['id']} {job['state']}{place}")


def _print_outcome(job: dict[str, Any]) -> None:
    result, error = job["result"], job["error"]
    if job["state"] == "succeeded":
        _say(f"{result['url']}")
        _say(f"ratio {result['ratio']:.1f}, KL {result['kl_mean']:.4f} nats, top-1 {result['top1']:.1%}")
    elif error:
        _say(f"error: {error['code']}: {error['message']}", error=True)
        _say(error["remedy"], error=True)
    else:
        _say(f"{job['id']} {job['state']}", error=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        Column("id", no_wrap=True), "state", "stage", "source", "target", "created (UTC)", box=None, pad_edge=False
    )
    for job in rows:
        stage = job["stage"] or (f"place {job['place_in_queue']}" if job["place_in_queue"] else "")
        percent = f" {job['percent']:.0f}%" if job["percent"] is not None and job["state"] == "running" else ""
        config = job["config"]
        cells = (
            job["id"],
            job["state"],
            stage + percent,
            config["source"]["repo"],
            config["target"]["repo"],
            job["created_at"][:19].replace("T", " "),
        )
        table.add_row(*(Text(printable(cell), overflow="fold") for cell in cells))
    return table


def _read_config(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    try:
        data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"{file}: {error}") from None
    if not isinstance(data, dict):
        raise click.UsageError(f"{file}: the configuration is an object with sections, such as 'source'.")
    return data


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.setdefault(name, {})
    if not isinstance(section, dict):
        raise click.UsageError(f"'{name}' of the configuration is a section with keys of its own.")
    return section


def _parse_labels(labels: tuple[str, ...]) -> dict[str, str]:
    pairs = [label.partition("=") for label in labels]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise click.UsageError("A label is written KEY=VALUE.")
    return {key: value for key, _, value in pairs}


def _say(text: str, *, error: bool = False) -> None:
    if text:
        click.echo(printable(text), err=error)
