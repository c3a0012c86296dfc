"""docker-compose.yml as Compose would read it: merged, its variables filled in. Knows no test."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
COMPOSE, DOCKERFILE = ROOT / "docker-compose.yml", ROOT / "Dockerfile"

_VARIABLE = re.compile(r"\$\$|\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<other>[^}]*))?\}")


def as_written() -> dict[str, Any]:
    """Anchors merged, variables as they stand."""
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return found


def filled(values: Mapping[str, str]) -> dict[str, Any]:
    """With variables filled in. Raises KeyError for one that has no value and no default."""

    def fill(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        value = values.get(found["name"], "")
        if not value and found["kind"] != "-":
            raise KeyError(found["name"])
        return value or str(found["other"])

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: walk(value) for key, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return _VARIABLE.sub(fill, node) if isinstance(node, str) else node

    filled_in: dict[str, Any] = walk(as_written())
    return filled_in


def variables() -> dict[str, set[str]]:
    """Names of variables by what stands for a missing one: "?" for a refusal, else the default."""
    found: dict[str, set[str]] = {}
    for match in _VARIABLE.finditer(COMPOSE.read_text()):
        if match[0] != "$$":
            kind = "?" if match["kind"] == "?" else str(match["other"])
            found.setdefault(kind, set()).add(match["name"])
    return found


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, in order, with continued lines joined."""
    text = re.sub(r"\\\n", " ", "\n".join(x for x in DOCKERFILE.read_text().splitlines() if not x.startswith("#")))
    lines = (line.strip().partition(" ") for line in text.splitlines() if line.strip())
    return [(word, " ".join(rest.split())) for word, _, rest in lines]
