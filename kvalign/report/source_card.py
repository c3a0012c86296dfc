"""What a model's README says in its front matter: typed, bounded, never rendered or executed.

A source README is data from a stranger: YAML can hold bombs, and prose can hold markup.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from kvalign.printable import printable

_MAX_FRONT_MATTER_BYTES = 64 * 1024
_MAX_TEXT = 2000
_TEXT_FIELDS = ("license", "license_name", "license_link")
_GATE_FIELD = re.compile(r"extra_gated_\w{1,48}", re.ASCII)


class _NoAliases(yaml.SafeLoader):
    """Anchors let a few bytes stand for gigabytes; no card needs them."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def carried_fields(folder: Path) -> dict[str, Any]:
    """Licence, language and gate fields of folder/README.md; empty when there is none that can be read."""
    front = _front_matter(folder / "README.md")
    carried: dict[str, Any] = {}
    for name in _TEXT_FIELDS:
        if isinstance(front.get(name), str):
            carried[name] = _text(front[name])
    language = front.get("language")
    if isinstance(language, str):
        language = [language]
    if isinstance(language, list):
        carried["language"] = [printable(item[:40]) for item in language if isinstance(item, str)][:50]
    for name, value in front.items():
        if isinstance(name, str) and _GATE_FIELD.fullmatch(name):
            kept = _plain(value)
            if kept is not None:
                carried[name] = kept
    return carried


def _front_matter(readme: Path) -> dict[Any, Any]:
    try:
        with readme.open(encoding="utf-8", errors="replace") as stream:
            head = stream.read(_MAX_FRONT_MATTER_BYTES)
    except OSError:
        return {}
    if not head.startswith("---\n") or (end := head.find("\n---", 4)) < 0:
        return {}
    try:
        found = yaml.load(head[4:end], _NoAliases)  # noqa: S506  a SafeLoader
    except Exception:  # PyYAML's constructors let through whatever a value trips them over
        return {}
    return found if isinstance(found, dict) else {}


def _text(value: str) -> str:
    return printable(value[:_MAX_TEXT], keep="\n\t")


def _plain(value: Any) -> Any:
    """Text, a flag, or one level of fields of text and flags; anything else is left out."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict) and len(value) <= 50:
        return {
            printable(str(key)[:200]): item if isinstance(item, bool) else _text(item)
            for key, item in value.items()
            if isinstance(item, str | bool)
        }
    return None
