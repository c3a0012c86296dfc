"""Whether a value out of a stranger's file can be sent on as JSON; knows no files."""

import json
from typing import Any


def is_sendable(value: Any) -> bool:
    """False for what JSON has no word for (NaN, dates, half of a surrogate pair) and for nesting without end."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def sendable_text(text: str) -> str:
    """The text with anything UTF-8 cannot carry replaced by "?"."""
    return text.encode("utf-8", "replace").decode()
