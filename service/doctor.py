"""`kvalign doctor`: every check at once, each with its time limit, one line each. Knows nothing that it checks.

Exit status: 0 nothing failed (warnings count as that), 1 something did.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvalign.errors import ConfigInvalid
from service.checks import CHECKS, Check, Finding, State
from service.served import read_note
from service.settings import ServiceSettings

CHECK_S = 5.0


@click.command()
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="KVALIGN_DATA_DIR",
    default=Path("~/.local/share/kvalign"),
    show_default=True,
    help="Of a 'kvalign serve', to examine that; not looked into where KVALIGN_SECRET_KEY is set.",
)
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON.")
def doctor(data_dir: Path, as_json: bool) -> None:
    """Check settings, database, Redis, Hub, disk, workers and kernels, as the API and workers would use them.

    Settings come from the KVALIGN_* environment variables that those are started with; for a 'kvalign serve', whose
    key and Redis are in no environment, from its data folder.
    """
    findings = examine(folder=data_dir.expanduser().absolute())
    ok = all(finding.state != State.FAIL for finding in findings.values())
    if as_json:
        checks = [_as_json(name, finding) for name, finding in findings.items()]
        click.echo(json.dumps({"ok": ok, "checks": checks}))
    else:
        for name, finding in findings.items():
            click.echo(f"{finding.state:<4}  {name:<9}  {' '.join(filter(None, (finding.fact, finding.remedy)))}")
    sys.exit(0 if ok else 1)


def examine(
    checks: Mapping[str, Check] = CHECKS, *, folder: Path | None = None, limit_s: float = CHECK_S
) -> dict[str, Finding]:
    """The settings, and when they can be read every check, all at the same time.

    folder   where a `kvalign serve` may have left its settings
    limit_s  seconds for one check; one that hangs has failed, and is left to end with this process
    """
    try:
        served = _served(folder)
        settings = ServiceSettings.load(**served)
    except ConfigInvalid as error:
        remedy = "Set what the API and workers are started with; no other check can run without it."
        return {"settings": Finding(State.FAIL, error.message, remedy)}
    running = {name: _Running(partial(check, settings)) for name, check in checks.items()}
    deadline = time.monotonic() + limit_s
    found = {name: each.finding(deadline, limit_s) for name, each in running.items()}
    source = f"settings of 'kvalign serve' in {folder}" if served else "KVALIGN_* settings"
    return {"settings": Finding(State.OK, f"The {source} can be read."), **found}


def _served(folder: Path | None) -> dict[str, str]:
    """What a `kvalign serve` left; nothing where the environment names a key, and so a deployment of its own."""
    if folder is None or "KVALIGN_SECRET_KEY" in os.environ:
        return {}
    try:
        return read_note(folder) or {}
    except (OSError, ValueError) as error:
        raise ConfigInvalid(
            f"The settings of 'kvalign serve' in {folder} cannot be read ({type(error).__name__})."
        ) from None


class _Running:
    """One check on a thread of its own, which does not keep the process from ending."""

    def __init__(self, check: "partial[Finding]") -> None:
        self._check = check
        self._finding: Finding | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finding(self, deadline: float, limit_s: float) -> Finding:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._finding or Finding(
            State.FAIL,
            f"No answer within {limit_s:g} s.",
            "See whether its host is up and the network lets it through.",
        )

    def _run(self) -> None:
        try:
            self._finding = self._check()
        except Exception as error:  # the edge of the thread; its message might hold a secret
            self._finding = Finding(
                State.FAIL, f"The check itself failed ({type(error).__name__}).", "Report it as a bug of kvalign."
            )


def _as_json(name: str, finding: Finding) -> dict[str, Any]:
    return {"name": name, "state": finding.state.value, "fact": finding.fact, "remedy": finding.remedy}
