"""What a `kvalign serve` on a data folder works with, left there for `kvalign doctor`. Starts and checks nothing."""

import json
import os
from pathlib import Path

KEY_FILE = "secret.key"
_NOTE = "serve.json"


def write_note(folder: Path, settings: dict[str, str]) -> None:
    """Leave the settings, for the owner's eyes alone; the key has a file of its own."""
    kept = {name: value for name, value in settings.items() if name != "secret_key"}
    draft = folder / f"{_NOTE}.new"
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(kept, file)
    draft.replace(folder / _NOTE)


def read_note(folder: Path) -> dict[str, str] | None:
    """The settings of the last `kvalign serve` there; None where there was none. Raises OSError, ValueError."""
    if not (folder / _NOTE).exists():
        return None
    found: dict[str, str] = json.loads((folder / _NOTE).read_text())
    return {**found, "secret_key": (folder / KEY_FILE).read_text().strip()}
