"""POST /v1/preflight: may this be converted, and at what cost. Stores nothing."""

from dataclasses import asdict

from anyio import to_thread
from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvalign.config import ConversionConfig
from service.auth import Caller, Submitter
from service.errors import ACCOUNT_RESPONSES
from service.submission import check_config, preflight_of
from service.wiring import ServiceParts, Wiring
from worker.preflight import Preflight

router = APIRouter(tags=["preflight"], responses=ACCOUNT_RESPONSES)


class CheckView(BaseModel):
    name: str
    ok: bool
    reason: str = Field(description="the fact that decided")
    code: str | None = Field(description="the error code that a job would end with; null when ok")
    remedy: str


class EstimateView(BaseModel):
    download_bytes: int
    disk_bytes: int = Field(description="the most that the job needs at once")
    memory_bytes: int
    seconds: float = Field(description="rough, from the model's size")


class SourceView(BaseModel):
    repo: str
    commit: str
    private: bool
    gated: str | None
    licence: str | None


class PreflightView(BaseModel):
    ok: bool
    checks: list[CheckView]
    estimate: EstimateView | None = Field(description="null when the source cannot be read")
    source: SourceView | None


@router.post("/v1/preflight", summary="May this be converted, and at what cost")
async def run_preflight(config: ConversionConfig, caller: Submitter, wiring: Wiring) -> PreflightView:
    return _view(await to_thread.run_sync(_preflight, wiring, caller, config, limiter=wiring.hub_threads))


def _preflight(wiring: ServiceParts, caller: Caller, config: ConversionConfig) -> Preflight:
    check_config(wiring, config)
    return preflight_of(wiring, caller, config)


def _view(found: Preflight) -> PreflightView:
    source = found.source
    return PreflightView(
        ok=found.first_error() is None,
        checks=[CheckView(**asdict(check)) for check in found.checks],
        estimate=EstimateView(**asdict(found.estimate)) if found.estimate else None,
        source=SourceView(
            repo=source.repo,
            commit=source.commit,
            private=source.private,
            gated=source.gated,
            licence=source.card.get("license"),
        )
        if source
        else None,
    )
