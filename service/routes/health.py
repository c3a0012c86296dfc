"""GET /healthz and /readyz, for those who operate the service; they say nothing about jobs or tenants."""

import logging
from collections.abc import Callable

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from service.broker import open_broker
from service.errors import PROBLEM_RESPONSES, RETRY_AFTER_S, problem
from service.wiring import ServiceParts, Wiring

log = logging.getLogger(__name__)

router = APIRouter(tags=["health"], responses=PROBLEM_RESPONSES)

_BROKER_TIMEOUT_S = 2.0


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Jobs can be accepted and done", response_class=Response)
def readyz(request: Request, wiring: Wiring) -> Response:
    """503 when the database, the broker or every worker is away; `checks` says which."""
    checks = {
        "database": _works("database", wiring.store.ping),
        "broker": _works("broker", lambda: _ping_broker(wiring)),
        "worker": _works("worker", lambda: _see_worker(wiring)),
    }
    if all(checks.values()):
        return JSONResponse({"status": "ok", "checks": checks})
    failing = [name for name, works in checks.items() if not works]
    return problem(
        request.state.request_id,
        503,
        "not_ready",
        f"Not ready: {', '.join(failing)}.",
        "Jobs are kept and go on once it is back.",
        headers={"Retry-After": str(RETRY_AFTER_S)},
        checks=checks,
    )


def _works(name: str, check: Callable[[], None]) -> bool:
    """Any failure counts, whatever the driver raises; its reason goes to the log, not to strangers."""
    try:
        check()
    except Exception as error:
        log.warning("%s is not ready: %s", name, error, extra={"check": name})
        return False
    return True


def _ping_broker(wiring: ServiceParts) -> None:
    with open_broker(wiring.settings.redis_url, answer_s=_BROKER_TIMEOUT_S) as client:
        client.ping()


def _see_worker(wiring: ServiceParts) -> None:
    if not wiring.store.live_workers(wiring.settings.worker_seen_within_s):
        raise RuntimeError("no worker was seen lately")
