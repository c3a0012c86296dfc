"""One JSON line for each log record of any process of ours; must never let a token through, whoever logged it.

Shared by API and worker. What a request or a job is known by is bound once and stands on every line said meanwhile.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType

_FIELDS = (
    *("request_id", "tenant", "job_id", "attempt", "stage"),
    *("method", "path", "status", "duration_ms", "check", "action", "outcome", "address"),
)
# They say a line for each request that they send, and those of uploads hold signed URLs.
_TALKATIVE = ("httpx", "httpx2", "httpcore", "httpcore2", "huggingface_hub", "alembic", "sse_starlette")

# Nothing here logs a token. This is the second lock: an error message of a library may quote a header.
_SECRETS = re.compile(
    r"hf_[\w\-]{4,}|whsec_[\w+/=]{4,}|(?:(?<=earer )|(?<=EARER ))[^\s\"'\\,;)]+"
    r"|(?<=://)[^/\s@]+(?=@)|(?<=X-Amz-Signature=)\w+"
)

_bound: ContextVar[Mapping[str, object]] = ContextVar("bound", default=MappingProxyType({}))
_log = logging.getLogger(__name__)


def configure_logging(level: str = "INFO") -> None:
    """Send every record of this process and of its forks to stderr as one JSON line, warnings and last words too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    sys.excepthook = _log_last_words
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def bound(**fields: object) -> Iterator[None]:
    """Put fields on every line that is said inside, also by threads that are started with a copy of the context."""
    mark = _bound.set({**_bound.get(), **{name: value for name, value in fields.items() if value not in (None, "")}})
    try:
        yield
    finally:
        _bound.reset(mark)


class JsonLines(logging.Formatter):
    """{"at", "level", "logger", "message", ...fields, "error"}; newlines are escaped by JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        line.update(_bound.get())
        line.update({name: value for name in _FIELDS if (value := getattr(record, name, None)) is not None})
        if record.exc_info:
            line["error"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


def redact(text: str) -> str:
    """The text without Hub tokens, bearer credentials, webhook secrets, passwords in URLs and signatures of them.

    >>> redact("Authorization: Bearer abc.def at redis://:secret@127.0.0.1")
    'Authorization: Bearer *** at redis://***@127.0.0.1'
    """
    return _SECRETS.sub("***", text)


def _log_last_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        _log.critical("ended by %s", kind.__name__, exc_info=(kind, error, trace))
