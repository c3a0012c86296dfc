"""A job's event in words, the same for a terminal, a log and the page; must not know where they are shown."""

from typing import Any


def in_words(kind: str, data: dict[str, Any]) -> str:
    """One printable line; empty for what a person need not see."""
    return printable(_words(kind, data))


def printable(text: str) -> str:
    """The text without what could steer a terminal.

    >>> printable("red: \x1b[31m, two\\nlines")
    'red: ?[31m, two?lines'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def _words(kind: str, data: dict[str, Any]) -> str:
    if kind == "state":
        return f"{data['state']}{_reason(data)}"
    if kind == "stage" and data["status"] == "finished":
        return f"{data['stage']} finished in {data['seconds']:.1f} s"
    if kind == "stage":
        return f"{data['stage']} {data['status']}"
    if kind == "progress":
        return f"{data['stage']} {data['percent']:.0f}% {amount(data['done'], data['total'], data['unit'])}"
    return ""


def _reason(data: dict[str, object]) -> str:
    error = data.get("error")
    if isinstance(error, dict):
        return f": {error['code']}: {error['message']} {error['remedy']}".rstrip()
    return ""


def amount(done: int, total: int | None, unit: str) -> str:
    """What was done, in its unit: "12.0 of 270.0 MB", "3 of 30 layers"."""
    if unit == "bytes":
        return f"{_megabytes(done)} of {_megabytes(total)} MB" if total else f"{_megabytes(done)} MB"
    return (f"{done} of {total} {unit}" if total else f"{done} {unit}").rstrip()


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.1f}"
