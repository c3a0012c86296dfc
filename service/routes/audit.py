"""GET /v1/audit: what was done in the name of the caller's account, and from where."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from service.auth import CurrentCaller
from service.errors import ACCOUNT_RESPONSES
from service.wiring import Wiring

router = APIRouter(tags=["audit"], responses=ACCOUNT_RESPONSES)


class AuditEntryView(BaseModel):
    """One act."""

    id: int = Field(description="grows with time; the last one of a page is the next one's `after`")
    at: datetime
    action: str = Field(description="submit, cancel, retry or webhook")
    outcome: str = Field(description="what came of it, or the code of the error that it was refused with")
    job_id: str | None
    request_id: str
    remote_address: str


class AuditPage(BaseModel):
    data: list[AuditEntryView]
    has_more: bool


@router.get("/v1/audit", summary="Who did what with your account, newest first")
def audit(
    caller: CurrentCaller,
    wiring: Wiring,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[int | None, Query(ge=0, le=2**53, description="last id of the page before")] = None,
) -> AuditPage:
    found = wiring.store.audit(tenant=caller.tenant, after=after, limit=limit + 1)
    data = [
        AuditEntryView(
            id=entry.id,
            at=entry.at,
            action=entry.action,
            outcome=entry.outcome,
            job_id=entry.job_id,
            request_id=entry.request_id,
            remote_address=entry.address,
        )
        for entry in found[:limit]
    ]
    return AuditPage(data=data, has_more=len(found) > limit)
