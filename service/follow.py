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
from service.words import amount, in_words

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
                self._task(stage), completed=done, total=total or None, amount=amount(done, total, unit)
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
    return in_words(event.kind, event.data)


def _clock(event: Event) -> str:
    """HH:MM:SS of an ISO time, UTC."""
    return str(event.data.get("at", ""))[11:19]
