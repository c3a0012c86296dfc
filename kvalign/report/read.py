"""report.json of a converted model, read as a stranger's: of bounded size, each key once, of the form of schema.py."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvalign.config import describe
from kvalign.errors import ArtifactInvalid
from kvalign.printable import printable
from kvalign.report.schema import SCHEMA_VERSION, Report

NAME = "report.json"
_MOST_BYTES = 32 * 1024**2


def read_report(folder: Path) -> dict[str, Any]:
    """The report as it is written, once it was found to be one; raises ArtifactInvalid."""
    try:
        report = _parsed(folder / NAME)
        version = report["schema_version"] if isinstance(report, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"its schema version is {str(version)[:20]}, not {SCHEMA_VERSION}")
        Report.model_validate(report)
    except ValidationError as error:
        raise _unreadable(folder, describe(error)) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise _unreadable(folder, str(error)) from error
    assert isinstance(report, dict)
    return report


def _parsed(file: Path) -> Any:
    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES:,} bytes")
    return json.loads(file.read_bytes().decode(), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one key, readers choose as they like."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _unreadable(folder: Path, why: str) -> ArtifactInvalid:
    return ArtifactInvalid(
        f"{folder.name} holds no {NAME} that this kvalign reads: {printable(why[:300]).rstrip('.')}.",
        "Pull the artifact again, or update kvalign.",
    )
