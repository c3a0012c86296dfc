"""One JSON line for each log record; must never let a token through, whoever logged it."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str] = ContextVar("request_id", default="")

_FIELDS = ("tenant", "job_id", "method", "path", "status", "duration_ms", "check", "action", "outcome", "address")

# Nothing here logs a token. This is the second lock: an error message of a library may quote a header.
_SECRETS = re.compile(r"hf_\w{4,}|(?<=earer )[^\s\"'\\,;)]+|(?<=://)[^/\s@]+(?=@)")


def configure_logging(level: str = "INFO") -> None:
    """Send every record of this process to stderr as one JSON line; uvicorn's own lines included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    # The access line is ours (service.middleware): uvicorn's carries query strings.
    logging.getLogger("uvicorn.access").disabled = True
    for name in ("httpx", "httpx2", "httpcore", "huggingface_hub", "alembic", "sse_starlette"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """{"at", "level", "logger", "message", "request_id", ...fields, "error"}; newlines are escaped by JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if current := request_id.get():
            line["request_id"] = current
        line.update({name: getattr(record, name) for name in _FIELDS if hasattr(record, name)})
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def redact(text: str) -> str:
    """The text without Hub tokens, bearer credentials and passwords in URLs.

    >>> redact("Authorization: Bearer abc.def at redis://:secret@127.0.0.1")
    'Authorization: Bearer *** at redis://***@127.0.0.1'
    """
    return _SECRETS.sub("***", text)
