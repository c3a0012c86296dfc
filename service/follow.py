"""Shows a job's events to a person or a program while they come; must not know how they are fetched.

On a terminal one bar a stage; elsewhere one line for each thing that a log reader wants; as JSON every event.
"""

import json
from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from service.api_client import Event

_STEP_PERCENT = 10.0


class View(Protocol):
    def __enter__(self) -> "View": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, event: Event) -> None: ...


def show_all(view: View, events: Iterable[Event]) -> None:
    with view:
        for event in events:
            view.show(event)


class Bars:
    """A progress bar for the stage that runs; finished stages stay above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<11}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        stage = str(event.data.get("stage", ""))
        if event.kind == "progress":
            done, total, unit = event.data["done"], event.data["total"], event.data["unit"]
            self._progress.update(
                self._task(stage), completed=done, total=total or None, amount=_amount(done, total, unit)
            )
        elif event.kind == "stage" and event.data["status"] == "started":
            self._progress.reset(self._task(stage), total=None)
        elif event.kind == "stage":
            self._progress.update(self._task(stage), completed=1, total=1, amount=event.data["status"])
            self._progress.stop_task(self._task(stage))
        elif line := plain_line(event):
            self._progress.console.print(escape(line), highlight=False)

    def _task(self, stage: str) -> TaskID:
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(escape(stage), total=None, amount="")
        return self._tasks[stage]


class Lines:
    """One line for each state and stage, and one for every tenth of what a stage counts; on stderr if `err`."""

    def __init__(self, *, err: bool = False) -> None:
        self._err = err
        self._counted = ("", "")
        self._shown_percent = 0.0

    def __enter__(self) -> "Lines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, event: Event) -> None:
        if event.kind == "progress":
            counted, percent = (event.data["stage"], event.data["unit"]), event.data["percent"]
            if counted != self._counted:
                self._counted, self._shown_percent = counted, 0.0
            if percent is None or percent < self._shown_percent + _STEP_PERCENT:
                return
            self._shown_percent = percent
        if line := plain_line(event):
            click.echo(f"{_clock(event)} {line}", err=self._err)


class JsonLines:
    """Every event as one JSON line."""

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def show(self, event: Event) -> None:
        click.echo(json.dumps({"id": event.id, "kind": event.kind, "data": event.data}))


def plain_line(event: Event) -> str:
    """The event in words; empty for what a person need not see."""
    return printable(_in_words(event))


def printable(text: str) -> str:
    """The text without what could steer a terminal.

    >>> printable("red: \x1b[31m, two\\nlines")
    'red: ?[31m, two?lines'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _in_words(event: Event) -> str:
    data = event.data
    if event.kind == "state":
        return f"{data['state']}{_reason(data)}"
    if event.kind == "stage" and data["status"] == "finished":
        return f"{data['stage']} finished in {data['seconds']:.1f} s"
    if event.kind == "stage":
        return f"{data['stage']} {data['status']}"
    if event.kind == "progress":
        return f"{data['stage']} {data['percent']:.0f}% {_amount(data['done'], data['total'], data['unit'])}"
    return ""


def _reason(data: dict[str, object]) -> str:
    error = data.get("error")
    if isinstance(error, dict):
        return f": {error['code']}: {error['message']} {error['remedy']}".rstrip()
    return ""


def _amount(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{_megabytes(done)} of {_megabytes(total)} MB" if total else f"{_megabytes(done)} MB"
    return (f"{done} of {total} {unit}" if total else f"{done} {unit}").rstrip()


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}"


def _clock(event: Event) -> str:
    """HH:MM:SS of an ISO time, UTC."""
    return str(event.data.get("at", ""))[11:19]
