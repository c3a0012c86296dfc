"""GET /v1/support: which model families are converted. Open to all: it tells nothing about anyone."""

from typing import Any

from fastapi import APIRouter

from kvalign.support import support_matrix
from service.errors import PROBLEM_RESPONSES

router = APIRouter(tags=["support"], responses=PROBLEM_RESPONSES)


@router.get("/v1/support", summary="The support matrix")
def support() -> dict[str, Any]:
    return support_matrix()
