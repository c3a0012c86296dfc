"""A job's webhook: whom it tells, and what came of telling. Parse, call, map."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from kvalign.config import Webhook
from service.auth import CurrentCaller
from service.errors import ACCOUNT_RESPONSES
from service.submission import set_webhook
from service.views import DeliveryPage, WebhookView, delivery_view
from service.wiring import JobId, Wiring

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["webhooks"], responses=ACCOUNT_RESPONSES)


@router.put("/webhook", summary="Tell another address of the job's changes of state")
def put(job_id: JobId, webhook: Webhook, caller: CurrentCaller, wiring: Wiring) -> WebhookView:
    """Messages that still wait go to the new address, signed with the new secret."""
    _, made = set_webhook(wiring, caller, job_id, webhook)
    return WebhookView(url=webhook.url, events=list(webhook.events), secret=made)


@router.delete("/webhook", status_code=204, summary="Tell nobody any more")
def remove(job_id: JobId, caller: CurrentCaller, wiring: Wiring) -> Response:
    set_webhook(wiring, caller, job_id, None)
    return Response(status_code=204)


@router.get("/deliveries", summary="What came of telling the job's webhook, newest first")
def deliveries(
    job_id: JobId,
    caller: CurrentCaller,
    wiring: Wiring,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="last sequence of the page before")] = None,
) -> DeliveryPage:
    found = wiring.store.deliveries(job_id, tenant=caller.tenant, after=after, limit=limit + 1)
    return DeliveryPage(data=[delivery_view(one) for one in found[:limit]], has_more=len(found) > limit)
