"""The submit form: asks preflight before, or makes the job; what was typed stays until it is accepted."""

from fastapi import APIRouter, BackgroundTasks, Response
from fastapi.responses import RedirectResponse

from kvalign.errors import KvalignError
from service.auth import Caller
from service.errors import status_of
from service.pages.form import LABELS, SECTIONS, Entered, copied
from service.pages.rendering import page
from service.pages.session import PageCaller, PostedForm
from service.routes import jobs
from service.routes.preflight import PreflightView, run_preflight
from service.wiring import Wiring
from worker.store import IdempotencyConflict

router = APIRouter(include_in_schema=False)


@router.get("/submit")
def form_page(caller: PageCaller, wiring: Wiring, like: str = "") -> Response:
    """An empty form, or one filled in with the settings of an earlier job."""
    filled = copied(wiring.store.get(like, tenant=caller.tenant).config) if like else Entered({})
    return _form(caller, filled)


@router.post("/submit")
async def submit(form: PostedForm, caller: PageCaller, wiring: Wiring, afterwards: BackgroundTasks) -> Response:
    filled = Entered(form)
    config = filled.config()
    if config is None:
        return _form(caller, filled, status=422)
    try:
        if form.get("then") != "submit":
            return _form(caller, filled, answer=await run_preflight(config, caller, wiring))
        job = await jobs.submit(config, caller, wiring, Response(), afterwards, filled.key)
    except KvalignError as error:
        if status_of(error) == 500:
            raise
        if isinstance(error, IdempotencyConflict):
            filled.renew_key()
        filled.refuse(error)
        return _form(caller, filled, status=status_of(error))
    return RedirectResponse(f"/jobs/{job.id}", status_code=303)


def _form(caller: Caller, filled: Entered, *, answer: PreflightView | None = None, status: int = 200) -> Response:
    return page(
        "submit.html",
        status=status,
        tenant=caller.tenant,
        filled=filled,
        sections=SECTIONS,
        labels=LABELS,
        answer=answer,
    )
