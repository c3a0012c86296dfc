"""Who asked, for a job's log and trace: the id of the request at hand, and where it stands in its trace."""

from typing import Annotated

from fastapi import Depends, Request

from worker.jobs import Origin
from worker.tracing import current_traceparent


async def _origin(request: Request) -> Origin:
    return Origin(request.state.request_id, current_traceparent())


CurrentOrigin = Annotated[Origin, Depends(_origin)]
