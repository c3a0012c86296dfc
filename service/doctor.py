"""`kvalign doctor`: every check at once, each with its time limit, one line each. Knows nothing that it checks.

Exit status: 0 nothing failed (warnings count as that), 1 something did.
"""

import json
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

from kvalign.errors import ConfigInvalid
from service.checks import CHECKS, Check, Finding, State
from service.settings import ServiceSettings

CHECK_S = 5.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON.")
def doctor(as_json: bool) -> None:
    """Check settings, database, Redis, Hub, disk, workers and kernels, as the API and workers would use them.

    Settings come from the KVALIGN_* environment variables that those are started with.
    """
    findings = examine()
    ok = all(finding.state != State.FAIL for finding in findings.values())
    if as_json:
        checks = [_as_json(name, finding) for name, finding in findings.items()]
        click.echo(json.dumps({"ok": ok, "checks": checks}))
    else:
        for name, finding in findings.items():
            click.echo(f"{finding.state:<4}  {name:<9}  {' '.join(filter(None, (finding.fact, finding.remedy)))}")
    sys.exit(0 if ok else 1)


def examine(checks: Mapping[str, Check] = CHECKS, *, limit_s: float = CHECK_S) -> dict[str, Finding]:
    """The settings, and when they can be read every check, all at the same time.

    limit_s  seconds for one check; one that hangs has failed, and is left to end with this process
    """
    try:
        settings = ServiceSettings.load()
    except ConfigInvalid as error:
        remedy = "Set what the API and workers are started with; no other check can run without it."
        return {"settings": Finding(State.FAIL, error.message, remedy)}
    running = {name: _Running(partial(check, settings)) for name, check in checks.items()}
    deadline = time.monotonic() + limit_s
    found = {name: each.finding(deadline, limit_s) for name, each in running.items()}
    return {"settings": Finding(State.OK, "The KVALIGN_* settings can be read."), **found}


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
