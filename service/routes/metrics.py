"""GET /metrics, for Prometheus: open, or behind a token of the operator's; it says nothing about any tenant."""

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from service.errors import PROBLEM_RESPONSES, RequestRefused
from service.metrics import StoreCollector
from service.wiring import Wiring

router = APIRouter(tags=["health"], responses=PROBLEM_RESPONSES)

_REMEDY = "Send the header 'Authorization: Bearer TOKEN' with the value of KVALIGN_METRICS_TOKEN."

_bearer = HTTPBearer(
    auto_error=False, scheme_name="MetricsToken", description="KVALIGN_METRICS_TOKEN, where the operator has set it"
)


def _may_scrape(wiring: Wiring, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]) -> None:
    """Refuses whoever does not know the operator's token, in a time that does not depend on what was sent."""
    expected = wiring.settings.metrics_token
    if expected is None:
        return
    if credentials is None:
        raise RequestRefused(401, "token_missing", "The request carries no bearer token.", _REMEDY)
    if not hmac.compare_digest(credentials.credentials.encode(), expected.get_secret_value().encode()):
        raise RequestRefused(401, "token_invalid", "The bearer token is not the one for metrics.", _REMEDY)


@router.get(
    "/metrics",
    summary="Metrics in the text format of Prometheus",
    dependencies=[Depends(_may_scrape)],
    response_class=Response,
    openapi_extra={"security": [{}]},  # the token is asked for only where the operator has set one
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
def metrics(request: Request, wiring: Wiring) -> Response:
    """Counted in the database at each scrape, and what this process alone knows; 503 when that does not answer."""
    collector = StoreCollector(
        wiring.store, worker_seen_within_s=wiring.settings.worker_seen_within_s, version=request.app.version
    )
    text = generate_latest(collector) + generate_latest(request.app.state.durations.registry)
    return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})
