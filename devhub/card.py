"""The YAML front matter of a README: read safely and checked as the Hub checks it; knows no repos.

A card is a stranger's text. Aliases are refused (a few lines of them unfold to gigabytes), and only what JSON
can carry is built.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from devhub.sendable import is_sendable

MAX_CARD_BYTES = 1 << 20
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\r?\n(.*?\n)??---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_RELATIONS = ("adapter", "finetune", "merge", "quantized")


@dataclass
class CardCheck:
    """What the Hub says of a card: `errors` refuse it, `warnings` do not. `data` is its front matter."""

    data: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_card(text: str) -> CardCheck:
    """Read and check a README's front matter; never raises."""
    match = _FRONT_MATTER.match(text)
    if match is None or not (match[1] or "").strip():
        return CardCheck(warnings=["empty or missing yaml metadata in repo card"])
    if len(match[1]) > MAX_CARD_BYTES:
        return CardCheck(errors=[f"The metadata is longer than {MAX_CARD_BYTES} characters."])
    try:
        data = yaml.load(match[1], Loader=_PlainLoader)  # noqa: S506 - a SafeLoader without aliases
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return CardCheck(errors=[f"Invalid YAML: {error or type(error).__name__}"])
    if not isinstance(data, dict) or not is_sendable(data):
        return CardCheck(errors=["The metadata must be a mapping of names to plain values."])
    return CardCheck(data=data, errors=list(_complaints(data)))


class _PlainLoader(yaml.SafeLoader):
    """SafeLoader that knows no aliases and leaves dates as the text they are."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a repo card")
        return super().compose_node(parent, index)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        value = super().construct_object(node, deep=deep)
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value


def _as_text(loader: _PlainLoader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


def _as_text_map(loader: _PlainLoader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    pairs = ((loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value)
    return {str(key): value for key, value in pairs}


for _tag in ("timestamp", "binary"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _as_text)
for _tag in ("map", "set"):
    _PlainLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _as_text_map)


def _complaints(data: dict[str, Any]) -> list[str]:
    """The Hub's rules for the fields that change what it shows or does."""
    complaints = [
        f'"{name}" must be a string or a list of strings'
        for name in ("license", "language", "base_model", "datasets", "metrics")
        if not _is_text_or_list(data.get(name))
    ]
    complaints += [
        f'"{name}" must be a string'
        for name in ("library_name", "license_link", "license_name", "pipeline_tag")
        if not isinstance(data.get(name, ""), str)
    ]
    if not (isinstance(data.get("tags", []), list) and _is_text_or_list(data.get("tags"))):
        complaints.append('"tags" must be a list of strings')
    if data.get("base_model_relation", "finetune") not in _RELATIONS:
        complaints.append(f'"base_model_relation" must be one of {", ".join(_RELATIONS)}')
    index = data.get("model-index", [])
    if not isinstance(index, list) or any(not _is_index_entry(entry) for entry in index):
        complaints.append('"model-index" must be a list of mappings, each with "name" and a list "results"')
    return complaints


def _is_text_or_list(value: Any) -> bool:
    return (
        value is None or isinstance(value, str) or (isinstance(value, list) and all(isinstance(v, str) for v in value))
    )


def _is_index_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("results"), list)
