"""The command `kvalign`: parses, calls, prints. Other rooms bring their commands by entry point."""

import json
import re
import sys
import tomllib
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvalign.config import ConversionConfig
from kvalign.errors import KvalignError
from kvalign.printable import printable

EXIT_FAILED = 1
EXIT_USAGE = 2


class _Commands(click.Group):
    """Commands of this file and of every installed entry point in the group kvalign.commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *metadata.entry_points(group="kvalign.commands").names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        found = metadata.entry_points(group="kvalign.commands", name=cmd_name)
        if own is not None or not found:
            return own
        try:
            command = next(iter(found)).load()
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"'{cmd_name}' needs {error.name}, which is not installed. pip install 'kvalign[service]'."
            ) from error
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvalignError as error:
            click.echo(printable(f"Error ({error.code}): {error.message}"), err=True)
            if error.remedy:
                click.echo(printable(error.remedy), err=True)
            ctx.exit(EXIT_USAGE if error.code == "config_invalid" else EXIT_FAILED)


@click.group(cls=_Commands)
@click.version_option(package_name="kvalign")
def main() -> None:
    """Shrink the KV cache of a language model, and prove how good the result is."""


@main.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write to.")
@click.option("--revision", default="main", show_default=True, help="Branch, tag or commit of a Hub repo.")
@click.option("--max-kl", type=float, help="Smallest cache within this mean KL, in nats a token. [default: 0.02]")
@click.option("--ratio", type=float, help="Best quality at this ratio of coded tokens.")
@click.option("--calibration-text", type=click.Path(path_type=Path, exists=True), help=".txt, .jsonl or .parquet.")
@click.option("--validation-text", type=click.Path(path_type=Path, exists=True), help="Held-out text to judge on.")
@click.option("--calibration-tokens", type=int, help="How much text to calibrate on. [default: 32768]")
@click.option("--windows", type=int, help="Windows to judge on, spread over the domains. [default: 8]")
@click.option("--config", "config_file", type=click.Path(path_type=Path, exists=True), help="TOML or JSON settings.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keeps finished stages. [default: OUT/.work]")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def convert(source: str, out: Path, config_file: Path | None, as_json: bool, **options: Any) -> None:
    """Convert a model folder or Hub repo SOURCE into a codec folder."""
    from kvalign.convert import convert as run_conversion
    from kvalign.load import fetch
    from kvalign.report.card import missed_aim

    config = _conversion_config(source, config_file, options)
    folder = fetch(source, revision=None if Path(source).is_dir() else options["revision"])
    work_dir = options["work_dir"] or out / ".work"
    with _ProgressShown(quiet=as_json) as show:
        result = run_conversion(
            folder,
            out,
            config,
            work_dir=work_dir,
            source_commit="" if Path(source).is_dir() else folder.name,
            calibration_path=options["calibration_text"],
            validation_path=options["validation_text"],
            on_progress=show,
        )
    if as_json:
        line = {"out": str(out), **result.report["summary"], "seconds": result.stage_seconds}
        click.echo(json.dumps(line))
    else:
        summary = result.report["summary"]
        click.echo(
            f"{out}: ratio of coded tokens {summary['ratio']:.2f}, mean KL {summary['kl_mean']:.3g} nats,"
            f" top-1 agreement {100 * summary['top1']:.1f} %, codec {summary['artifact_bytes']:,} bytes"
        )
        click.echo(missed_aim(result.report), nl=False)


@main.command()
@click.argument("repo_or_folder")
@click.option("--revision", help="Branch, tag or commit of a Hub repo.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json.")
def inspect(repo_or_folder: str, revision: str | None, as_json: bool) -> None:
    """Show the report card of a converted model, also of one that failed its gate.

    The card is rendered from report.json; whether README.md says the same is verify's business.
    """
    from kvalign.load import fetch
    from kvalign.report import card
    from kvalign.report.read import read_report

    report = read_report(fetch(repo_or_folder, revision=revision, weights=False))
    if as_json:
        click.echo(json.dumps(report, indent=2, allow_nan=False))
        return
    text = card.render(report).split("\n---\n", 1)[-1]
    Console().print(Markdown(printable(text, keep="\n"), hyperlinks=False))


@main.command()
@click.argument("repo_or_folder")
@click.option("--base", help="Folder or repo of the base model, for layout `codec`.")
@click.option("--text", type=click.Path(path_type=Path, exists=True), help="The validation text, if not kvalign's own.")
@click.option("--revision", help="Branch, tag or commit of a Hub repo.")
@click.option("--json", "as_json", is_flag=True, help="Print the claims as one line of JSON.")
def verify(repo_or_folder: str, base: str | None, text: Path | None, revision: str | None, as_json: bool) -> None:
    """Measure a converted model's claims again. Exit code 1 when one does not hold."""
    from kvalign.verify import verify as run_verification

    def tell(what: str) -> None:
        if not as_json:
            click.echo(f"{what} ...", err=True)

    claims = run_verification(repo_or_folder, base=base, text=text, revision=revision, on_progress=tell)
    skipped = [claim for claim in claims if claim.skipped]
    failed = [claim for claim in claims if not claim.holds]
    if as_json:
        rows = [{**asdict(claim), "holds": claim.holds} for claim in claims]
        click.echo(json.dumps({"holds": not failed, "claims": rows}, allow_nan=False))
    else:
        table = Table("claim", "claimed", "measured", "tolerance", "")
        for claim in claims:
            cells = (claim.name, *(_short(value) for value in (claim.claimed, claim.measured, claim.tolerance)))
            said = "not measured" if claim.skipped else "holds" if claim.holds else "DOES NOT HOLD"
            table.add_row(*(escape(printable(cell)) for cell in cells), said)
        Console(width=None if sys.stdout.isatty() else 160).print(table)
        asked = len(claims) - len(skipped)
        click.echo(f"{asked - len(failed)} of {asked} claims hold, {len(skipped)} are not measured again")
    if failed:
        sys.exit(EXIT_FAILED)


@main.command()
@click.argument("repos_or_folders", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def compare(repos_or_folders: tuple[str, ...], as_json: bool) -> None:
    """Show the reports of several converted models side by side; give two at least."""
    from kvalign.load import fetch
    from kvalign.report.compare import compare as side_by_side
    from kvalign.report.read import read_report

    if len(set(repos_or_folders)) < 2:
        raise click.UsageError("name two different converted models at least.")
    found = side_by_side({name: read_report(fetch(name, weights=False)) for name in repos_or_folders})
    if as_json:
        click.echo(
            json.dumps({"models": found.names, "rows": dict(found.rows), "warnings": found.warnings}, allow_nan=False)
        )
        return
    table = Table("", *(escape(printable(name)) for name in found.names))
    for name, values in found.rows:
        shown = (name, *(_short(value, none="not measured") for value in values))
        table.add_row(*(escape(printable(cell)) for cell in shown))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for warning in found.warnings:
        click.echo(f"Note: {warning}")


def _short(value: Any, none: str = "exact") -> str:
    if value is None:
        return none
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)[:60]


@main.command()
@click.argument("repo_or_folder")
@click.option("--prompt", help="Text to continue; read from standard input when not given.")
@click.option("--max-new-tokens", default=64, show_default=True, type=click.IntRange(1, 4096))
@click.option("--max-kl", type=float, help="Step by its measured mean KL.")
@click.option("--ratio", type=float, help="Step by its measured ratio.")
@click.option("--revision", help="Branch, tag or commit of a Hub repo.")
@click.option("--base", help="Folder or repo of the base model, for layout `codec`.")
@click.option("--json", "as_json", is_flag=True, help="End with one line of JSON.")
def generate(
    repo_or_folder: str,
    prompt: str | None,
    max_new_tokens: int,
    max_kl: float | None,
    ratio: float | None,
    revision: str | None,
    base: str | None,
    as_json: bool,
) -> None:
    """Continue a prompt from its compressed cache, and from the uncompressed one beside it."""
    from kvalign.generation import continue_prompt
    from kvalign.load import load

    text = prompt if prompt is not None else sys.stdin.read()
    model, tokenizer, codec = load(repo_or_folder, revision=revision, base=base)
    found = continue_prompt(model, tokenizer, codec, text, max_new_tokens=max_new_tokens, max_kl=max_kl, ratio=ratio)
    if as_json:
        line = {
            "generated": found.text,
            "generated_uncompressed": found.text_uncompressed,
            "prompt_tokens": found.prompt_tokens,
            "cache_bytes": found.sizes.total,
            "cache_ratio": round(found.cache_ratio, 3),
        }
        click.echo(json.dumps(line))
        return
    click.echo(f"compressed ({found.sizes.total:,} bytes, {found.cache_ratio:.2f} times smaller):\n{found.text}\n")
    click.echo(f"uncompressed:\n{found.text_uncompressed}")


def _conversion_config(source: str, config_file: Path | None, options: dict[str, Any]) -> ConversionConfig:
    """Settings of the file, overridden by flags; names stand in where a local folder has none."""
    data = _read_settings(config_file) if config_file else {}
    name = name_of_folder(Path(source)) if Path(source).is_dir() else source
    data.setdefault("source", {"repo": name, "revision": options["revision"]})
    data.setdefault("target", {"repo": f"{name.split('/')[-1]}-kvalign", "layout": "codec"})
    for section, key, value in (
        ("codec", "max_kl", options["max_kl"]),
        ("codec", "ratio", options["ratio"]),
        ("calibration", "tokens", options["calibration_tokens"]),
        ("calibration", "dataset", _name_of(options["calibration_text"])),
        ("validation", "windows", options["windows"]),
        ("validation", "dataset", _name_of(options["validation_text"])),
    ):
        known = data.get(section, {})
        if value is not None and isinstance(known, dict):
            data[section] = {**known, key: value}
    return ConversionConfig.parse(data)


def name_of_folder(folder: Path) -> str:
    """What a local folder is called, in letters that a repo may have.

    >>> name_of_folder(Path("/models/My model (v2)"))
    'My-model-v2'
    """
    plain = re.sub(r"[^A-Za-z0-9_.]+|\.{2,}", "-", folder.resolve().name.removesuffix(".git"))
    return plain.strip("-.")[:80].strip("-.") or "model"


def _name_of(path: Path | None) -> str | None:
    return path.name if path else None


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        data = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise click.UsageError(f"{file} does not hold a table of settings.")
    return data


class _ProgressShown:
    """A bar on a terminal, a plain line for each stage elsewhere, nothing when quiet."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._quiet = quiet
        if self._console.is_terminal and not quiet:
            columns = (TextColumn("{task.description:10}"), BarColumn(), TextColumn("{task.fields[unit]}"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console)

    def __enter__(self) -> Any:
        if self._bar:
            self._bar.start()
        return self._show

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def _show(self, progress: Any) -> None:
        if self._quiet:
            return
        if self._bar:
            if progress.stage not in self._tasks:
                self._tasks[progress.stage] = self._bar.add_task(progress.stage, total=progress.total, unit="")
            self._bar.update(
                self._tasks[progress.stage], completed=progress.done, total=progress.total, unit=progress.unit
            )
        elif not progress.unit:
            click.echo(f"{progress.stage}: {'done' if progress.done else 'started'}", err=True)
