"""The page's parts that need no server: cookies, where signing in may lead, numbers, the form, problems as HTML."""

from typing import Any

import anyio
import httpx
import pytest
from cryptography.fernet import Fernet
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from kvalign.config import ConversionConfig
from kvalign.errors import TargetExists
from service.errors import install_error_handlers
from service.middleware import RequestContext
from service.pages.form import SECTIONS, Entered, copied
from service.pages.job import stage_rows
from service.pages.problems import ProblemPages
from service.pages.session import Sessions, local_path
from service.views import job_view

KEY = Fernet.generate_key().decode()
REPOS = {"source.repo": "carol/tiny", "target.repo": "alice/tiny-kvalign"}


def test_a_cookie_opens_for_every_process_of_its_service() -> None:
    assert Sessions(KEY, 60).opened(Sessions(KEY, 60).seal("hf_token")) == "hf_token"


def test_what_else_the_service_encrypts_is_no_session() -> None:
    sessions = Sessions(KEY, 60)
    sealed = sessions.seal("hf_token")
    old = sessions._cipher.encrypt_at_time(b"hf_token", 1_700_000_000).decode()
    foreign = Sessions(Fernet.generate_key().decode(), 60).seal("hf_token")
    as_in_the_database = Fernet(KEY).encrypt(b"hf_token").decode()
    for other in (old, foreign, as_in_the_database, sealed[:-4], "A" + sealed[1:], "", "hf_token", "\N{SNOWMAN}"):
        assert sessions.opened(other) is None, other


@pytest.mark.parametrize(("scheme", "name"), [("http", "kvalign="), ("https", "__Host-kvalign=")])
def test_the_cookie_is_as_strict_as_can_be(scheme: str, name: str) -> None:
    request = Request({"type": "http", "scheme": scheme, "headers": [], "path": "/", "server": ("h", 1)})
    response = Response()
    Sessions(KEY, 3600).begin(request, response, "hf_token")
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(name)
    assert {"HttpOnly", "Path=/", "SameSite=strict", "Max-Age=3600"} <= set(cookie.split("; "))
    assert ("Secure" in cookie) == (scheme == "https")
    assert "hf_token" not in cookie


@pytest.mark.parametrize(
    "elsewhere",
    [
        "https://evil.example/",
        "//evil.example",
        "/\\evil.example",
        "\\\\evil.example",
        "/\t/evil.example",
        "/\n/evil.example",
        "javascript:alert(1)",
        "evil.example",
        "",
        "/" + "x" * 3000,
        '/"><script>',
        "/é",
    ],
)
def test_signing_in_leads_nowhere_else(elsewhere: str) -> None:
    assert local_path(elsewhere) == "/"


def test_the_form_leaves_what_is_empty_to_the_configuration() -> None:
    filled = Entered(
        {**REPOS, "codec.ratio": "20", "validation.gate.max_kl": " 0.1 ", "labels": "team = a=b\n\n run=1"}
    )
    config = filled.config()
    assert config is not None, filled.errors
    assert (config.codec.ratio, config.codec.max_kl, config.validation.gate.max_kl) == (20, None, 0.1)
    assert config.labels == {"team": "a=b", "run": "1"}
    assert (
        config.calibration == ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "a/c"}}).calibration
    )


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"source.repo": "../x"}, "source.repo"),
        ({"source.repo": ""}, "source.repo"),
        ({"codec.max_kl": "0.1", "codec.ratio": "3"}, "codec.max_kl"),
        ({"codec.ratio": "1e999"}, "codec.ratio"),
        ({"calibration.tokens": "many"}, "calibration.tokens"),
        ({"calibration.metric": "<b>"}, "calibration.metric"),
        ({"validation.gate.min_top1": "2"}, "validation.gate.min_top1"),
        ({"labels": "no value"}, "labels"),
        ({"labels": "k" * 65 + "=v"}, "labels"),
        ({"target.repo": REPOS["source.repo"]}, ""),
    ],
)
def test_what_is_wrong_is_told_at_its_field(fields: dict[str, str], place: str) -> None:
    filled = Entered({**REPOS, **fields})
    assert filled.config() is None
    assert list(filled.errors) == [place]
    assert all(filled.values[name] == text for name, text in fields.items())


def test_unknown_fields_say_nothing() -> None:
    assert Entered({**REPOS, "": "x", "codec": "x", "webhook": "http://x", "codec.nothing": "1"}).config() is not None


def test_errors_of_the_api_find_their_field() -> None:
    filled = Entered(REPOS)
    filled.refuse(TargetExists("alice/x is there already.", "Choose another name."))
    assert filled.errors == {"target.repo": "alice/x is there already. Choose another name."}


def test_a_form_like_an_earlier_job_makes_the_same_configuration() -> None:
    config = ConversionConfig.parse(
        {
            "source": {"repo": "a/b", "revision": "v1"},
            "target": {"repo": "a/c", "visibility": "public"},
            "codec": {"ratio": 8, "recomputed_layers": 0},
            "labels": {"team": "x"},
        }
    )
    assert copied(config).config() == config


def test_every_setting_that_the_api_takes_is_in_the_form() -> None:
    def leaves(data: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            name
            for key, value in data.items()
            for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key})
        }

    config = ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "a/c"}})
    asked = {one.name for section in SECTIONS for one in section.fields}
    assert asked == leaves(config.model_dump()) - {"webhook"}


def test_a_key_that_is_none_of_ours_is_replaced() -> None:
    for key in ("", "x" * 4000, "a\0b", "A" * 32):
        assert len(Entered({"idempotency_key": key}).key) == 32
    kept = "0123456789abcdef" * 2
    assert Entered({"idempotency_key": kept}).key == kept


def test_stages_of_a_job_that_stopped(job: Any) -> None:
    rows = {row.name: row for row in stage_rows(job_view(job))}
    assert [rows[name].state for name in ("pull", "fit", "publish")] == ["done", "failed", "not begun"]
    assert rows["pull"].share == 1.0


@pytest.fixture
def job() -> Any:
    from datetime import UTC, datetime

    from worker.jobs import Job, JobState, Progress, Stage

    config = ConversionConfig.parse({"source": {"repo": "a/b"}, "target": {"repo": "a/c"}})
    at = datetime.now(UTC)
    progress = Progress(Stage.FIT, 1, 2, "groups")
    return Job("job_1", "a", JobState.FAILED, config, "0" * 40, at, at, progress, 1, {"pull": 2.0})


def test_problems_are_pages_for_browsers_alone() -> None:
    app = FastAPI(middleware=[Middleware(ProblemPages), Middleware(RequestContext)])
    install_error_handlers(app)

    @app.get("/{path:path}")
    def bug(path: str) -> None:
        raise ZeroDivisionError(f"secret {path}")

    async def ask(path: str, accept: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers={"Accept": accept})

    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    shown = anyio.run(ask, "/jobs/x", browser)
    assert (shown.status_code, shown.headers["content-type"]) == (500, "text/html; charset=utf-8")
    assert shown.headers["x-request-id"] in shown.text
    assert "script-src 'self'" in shown.headers["content-security-policy"]
    assert "secret" not in shown.text
    for path, accept in (("/jobs/x", "*/*"), ("/jobs/x", "application/json"), ("/v1/jobs", browser), ("/jobs/x", "")):
        assert anyio.run(ask, path, accept).headers["content-type"] == "application/problem+json", (path, accept)
