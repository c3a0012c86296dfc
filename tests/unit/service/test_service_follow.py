"""What a person sees of a job's events."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from service.api_client import Event
from service.follow import Bars, JsonLines, Lines, plain_line, show_all

AT = "2026-01-02T03:04:05+00:00"


def event(number: int, kind: str, **data: Any) -> Event:
    return Event(number, kind, {"at": AT, **data})


def progress(number: int, done: int, total: int = 1000, unit: str = "bytes") -> Event:
    percent = round(100 * done / total, 1) if total else None
    return event(number, "progress", stage="pull", done=done, total=total, unit=unit, percent=percent)


LIFE = [
    event(1, "state", state="queued"),
    event(2, "state", state="running", attempt=1),
    event(3, "stage", stage="preflight", status="kept"),
    event(4, "stage", stage="pull", status="started"),
    *(progress(5 + n, 10 * n) for n in range(101)),
    progress(200, 7, 0, "files"),
    event(201, "stage", stage="pull", status="finished", seconds=12.34),
    event(202, "log", lines=["noise"]),
    event(203, "state", state="failed", error={"code": "disk_full", "message": "Full.", "remedy": "Wait."}),
]


def test_lines_are_few_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    show_all(Lines(), LIFE)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 + 10
    assert all(line.startswith("03:04:05 ") for line in lines)
    assert lines[-2].endswith("pull finished in 12.3 s")
    assert lines[-1].endswith("failed: disk_full: Full. Wait.")


def test_a_stage_that_counts_anew_is_shown_anew(capsys: pytest.CaptureFixture[str]) -> None:
    passes = [progress(n + 1, 250 * (n % 4 + 1), unit=f"windows at step {n // 4}") for n in range(8)]
    show_all(Lines(err=True), passes)
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 8
    assert shown.out == ""


def test_json_lines_hold_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    show_all(JsonLines(), LIFE)
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["id"] for record in records] == [event.id for event in LIFE]


def test_bars_show_the_stages() -> None:
    screen = io.StringIO()
    show_all(Bars(Console(file=screen, force_terminal=True, width=100)), LIFE)
    assert "pull" in screen.getvalue()
    assert "finished" in screen.getvalue()
    assert "disk_full" in screen.getvalue()


def test_a_terminal_cannot_be_steered() -> None:
    line = plain_line(event(1, "state", state="failed", error={"code": "x", "message": "\x1b[2J\n", "remedy": ""}))
    assert line.isprintable()
