"""A log record is one JSON line without credentials."""

import json
import logging
import sys

import pytest

from worker.logs import JsonLines, bound, redact


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("service", logging.INFO, "file.py", 1, message, None, None)
    vars(made).update(fields)
    return made


def test_a_record_is_one_line_with_its_fields() -> None:
    with bound(request_id="req-1", stage="", attempt=None):
        line = JsonLines().format(record("two\nlines \u2028", job_id="job_1", status=200))
    assert len(line.splitlines()) == 1
    data = json.loads(line)
    assert data["message"] == "two\nlines \u2028"
    assert (data["request_id"], data["job_id"], data["status"]) == ("req-1", "job_1", 200)
    assert data["level"] == "info"
    assert not {"stage", "attempt"} & set(data)
    assert "request_id" not in json.loads(JsonLines().format(record("later")))


def test_a_traceback_stays_on_the_line_and_loses_tokens() -> None:
    try:
        raise ValueError("Authorization: Bearer hf_canary1234")
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    line = JsonLines().format(made)
    assert len(line.splitlines()) == 1
    assert "canary" not in line
    assert "ValueError" in line


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("token hf_AbCdEfGh leaked", "token *** leaked"),
        ("authorization: bearer eyJ.abc-_x", "authorization: bearer ***"),
        ("redis://:pass@127.0.0.1:1/0", "redis://***@127.0.0.1:1/0"),
        ("postgresql://me:pw@host/db", "postgresql://***@host/db"),
        ("https://host/a@b", "https://host/a@b"),
        ("signed by whsec_c2VjcmV0+/==", "signed by ***"),
        ("PUT https://s3/x?X-Amz-Signature=0a1b&part=2", "PUT https://s3/x?X-Amz-Signature=***&part=2"),
        ("HF_HUB_OFFLINE=1", "HF_HUB_OFFLINE=1"),
    ],
)
def test_redaction(text: str, kept: str) -> None:
    assert redact(text) == kept
