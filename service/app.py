"""Puts the HTTP API together. Must load neither torch nor transformers: a test in a fresh interpreter holds it.

uvicorn --factory service.app:create_app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from starlette.middleware import Middleware

from service.durations import Durations, TimedAnswers
from service.errors import install_error_handlers
from service.middleware import BodyLimit, RequestContext
from service.pages import install_pages
from service.pages.problems import ProblemPages
from service.routes import audit, events, health, jobs, metrics, preflight, report, support, webhooks
from service.settings import ServiceSettings
from service.wiring import wire

_ABOUT = """\
Converts Hugging Face Hub models so that their KV cache is many times smaller, and proves how good the result is.
Every error is RFC 9457 problem+json with a `code` for programs and a `remedy` for people.
"""


def create_app(settings: ServiceSettings | None = None) -> FastAPI:
    """The application, its database open and up to date; settings come from the environment unless given.

    Raises ConfigInvalid for bad settings, SQLAlchemyError when the database does not answer.
    """
    chosen = settings or ServiceSettings.load()
    parts, durations = wire(chosen), Durations()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts.sender.start()
        yield
        parts.close()

    app = FastAPI(
        title="kvalign",
        description=_ABOUT,
        version=_version(),
        lifespan=lifespan,
        # Their pages load scripts from elsewhere; /openapi.json is the document.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Spans of requests alone; who gets them is worker.tracing's matter.
        telemetry={"auto_configure": False, "operation_spans": False, "metrics": False, "logs": False},
        middleware=[
            Middleware(ProblemPages),
            Middleware(TimedAnswers, durations=durations),
            Middleware(RequestContext),
            Middleware(BodyLimit, limit_bytes=chosen.body_limit_bytes),
        ],
    )
    app.state.parts = parts
    app.state.durations = durations
    install_error_handlers(app)
    for room in (jobs, events, report, webhooks, audit, preflight, support, health, metrics):
        app.include_router(room.router)
    install_pages(app, chosen)
    return app


def _version() -> str:
    try:
        return version("kvalign")
    except PackageNotFoundError:
        return "0"
