"""Every refusal is problem+json, whoever raised it and whatever it quotes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import httpx
import pytest
from fastapi import FastAPI, Query
from sqlalchemy import create_engine
from starlette.middleware import Middleware

from kvalign.config import ConversionConfig
from kvalign.errors import HubUnavailable, KvalignError, SourceGated, SourceNotFound, TargetExists
from service.errors import RequestRefused, install_error_handlers
from service.middleware import BodyLimit, RequestContext

FIELDS = {"type", "title", "status", "detail", "code", "remedy", "request_id"}
ERRORS = {
    "SourceNotFound": SourceNotFound("There is no such model.", "Check the name."),
    "SourceGated": SourceGated("It is gated.", "Accept its terms."),
    "TargetExists": TargetExists("It is there.", "Choose another."),
    "HubUnavailable": HubUnavailable("No answer.", "Try later."),
    "Unknown": KvalignError("Odd.", ""),
    "Refused": RequestRefused(404, "report_not_found", "No report.", "Wait."),
}


def app() -> FastAPI:
    application = FastAPI(middleware=[Middleware(RequestContext), Middleware(BodyLimit, limit_bytes=1000)])
    install_error_handlers(application)

    @application.get("/raise/{name}")
    def raises(name: str) -> None:
        raise ERRORS[name]

    @application.get("/bug")
    def bug() -> None:
        raise ZeroDivisionError("a secret detail")

    @application.get("/no-database")
    def no_database() -> None:
        with create_engine("sqlite:////nowhere/jobs.db").connect():
            pass

    @application.get("/query")
    def query(limit: Annotated[int, Query(ge=1)]) -> int:
        return limit

    @application.get("/config")
    def get_config() -> str:
        return "none"

    @application.post("/config")
    def config(body: ConversionConfig) -> str:
        return body.source.repo

    return application


def ask(method: str, path: str, **request: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(go())


def check_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert set(body) >= FIELDS
    assert body["status"] == status
    assert body["code"] == code
    assert body["type"].endswith(code)
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("SourceNotFound", 422, "source_not_found"),
        ("SourceGated", 403, "source_gated"),
        ("TargetExists", 409, "target_exists"),
        ("HubUnavailable", 503, "hub_unavailable"),
        ("Unknown", 500, "internal"),
        ("Refused", 404, "report_not_found"),
    ],
)
def test_our_errors_have_their_status(name: str, status: int, code: str) -> None:
    body = check_problem(ask("GET", f"/raise/{name}"), status, code)
    assert body["detail"] == ERRORS[name].message
    assert body["remedy"] == ERRORS[name].remedy


def test_a_busy_hub_says_when_to_come_back() -> None:
    assert int(ask("GET", "/raise/HubUnavailable").headers["retry-after"]) > 0


def test_a_bug_answers_500_without_its_details() -> None:
    answer = ask("GET", "/bug")
    check_problem(answer, 500, "internal")
    assert "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_database_that_is_away_is_not_a_bug() -> None:
    answer = ask("GET", "/no-database")
    check_problem(answer, 503, "database_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "nowhere" not in answer.text


def test_unknown_paths_and_methods() -> None:
    check_problem(ask("GET", "/nowhere"), 404, "not_found")
    answer = ask("DELETE", "/config")
    check_problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"


def test_head_is_get_without_its_body_and_options_tells_the_methods() -> None:
    asked, told = ask("GET", "/config"), ask("HEAD", "/config")
    assert (told.status_code, told.content) == (asked.status_code, b"")
    assert told.headers["content-type"] == asked.headers["content-type"]
    assert told.headers["content-length"] == asked.headers["content-length"]
    assert ask("HEAD", "/nowhere").status_code == 404
    answer = ask("OPTIONS", "/config")
    assert (answer.status_code, answer.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
    check_problem(ask("OPTIONS", "/nowhere"), 404, "not_found")


def test_a_wrong_query_names_the_parameter() -> None:
    body = check_problem(ask("GET", "/query?limit=0"), 422, "request_invalid")
    assert "limit" in body["detail"]


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"source": {"repo": "a/b"}}, "target: Field required"),
        ({"source": {"repo": "a/b"}, "target": {"repo": "a/c"}, "codecs": {}}, "did you mean 'codec'"),
        ({"source": {"repo": "a/b"}, "target": {"repo": "a/c"}, "codec": {"max_kl": -1}}, "codec.max_kl"),
        ([], "body"),
    ],
)
def test_a_wrong_config_names_the_key(config: Any, fact: str) -> None:
    content = json.dumps(config).encode()
    answer = ask("POST", "/config", content=content, headers={"content-type": "application/json"})
    body = check_problem(answer, 422, "config_invalid")
    assert fact in body["detail"]


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe{", b'{"a": ' + b"[" * 900])
def test_what_is_not_json(content: bytes) -> None:
    answer = ask("POST", "/config", content=content, headers={"content-type": "application/json"})
    check_problem(answer, 400, "request_invalid")


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_what_is_not_declared_as_json(headers: dict[str, str]) -> None:
    answer = ask("POST", "/config", content=b"{}", headers=headers)
    check_problem(answer, 415, "content_type_unsupported")


def test_a_body_too_large_by_its_header() -> None:
    answer = ask("POST", "/config", content=b" " * 1001, headers={"content-type": "application/json"})
    check_problem(answer, 413, "body_too_large")


def test_a_body_too_large_in_chunks() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield b" " * 100

    answer = ask("POST", "/config", content=chunks(), headers={"content-type": "application/json"})
    check_problem(answer, 413, "body_too_large")


@pytest.mark.parametrize("source", [{"repo": "a/b", "\ud800": 1}, {"repo": "a/\ud800"}])
def test_half_a_character_is_refused(source: dict[str, Any]) -> None:
    content = json.dumps({"source": source, "target": {"repo": "a/c"}}).encode()
    answer = ask("POST", "/config", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 422}
    check_problem(answer, answer.status_code, answer.json()["code"])


def test_request_ids_are_kept_or_replaced() -> None:
    assert ask("GET", "/nowhere", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    forged = ask("GET", "/nowhere", headers={"X-Request-Id": "a b\tc"}).headers["x-request-id"]
    assert len(forged) == 32
