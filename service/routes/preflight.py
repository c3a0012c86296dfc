"""POST /v1/preflight: may this be converted, and at what cost. Stores nothing."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvalign.config import ConversionConfig
from service.auth import CurrentCaller
from service.errors import PROBLEM_RESPONSES
from service.submission import check_config
from service.wiring import Wiring
from worker.preflight import preflight

router = APIRouter(tags=["preflight"], responses=PROBLEM_RESPONSES)
