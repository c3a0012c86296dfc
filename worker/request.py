"""What Celery keeps of one message while its task runs; mends what Redis' transport forgets. Knows no job."""

from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker.request import Request
from kombu.transport import virtual


class ForgivingRequest(Request):
    """Frees its slot also where the broker is away when the task has ended.

    Celery (5.7) logs that an acknowledgement failed and goes on, while kombu still counts the message as one that is
    being worked on: with one message at a time the worker then never takes another, and looks alive. The message stays
    in Redis' list of unacknowledged ones and comes again much later, to find nothing to run (worker.sweeper).
    """

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        message.ack = partial(_acknowledge, message, message.ack)  # called later, by Celery's event loop


def _acknowledge(message: Any, ack: Callable[..., None], **kwargs: Any) -> None:
    try:
        ack(**kwargs)
    except Exception:
        virtual.QoS.ack(message.channel.qos, message.delivery_tag)
        raise
