"""The API's log: the lines of worker.logs, with uvicorn made to speak the same way. Knows no route."""

import logging

from worker import logs


def configure_logging(level: str = "INFO") -> None:
    """As worker.logs does it; uvicorn's own lines included, its access lines left out."""
    logs.configure_logging(level)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    # The access line is ours (service.middleware): uvicorn's carries query strings.
    logging.getLogger("uvicorn.access").disabled = True
