"""What Celery keeps of one message while its task runs; mends what Redis' transport forgets. Knows no job."""

import logging

from celery.worker.request import Request
from kombu.transport import virtual

_log = logging.getLogger(__name__)


class ForgivingRequest(Request):
    """Frees its slot also where the broker was away when the task had ended.

    Celery (5.7) logs that an acknowledgement failed and goes on, while kombu still counts the message as one that is
    being worked on: with one message at a time the worker then never takes another, and looks alive. The message stays
    in Redis' list of unacknowledged ones and comes again much later, to find nothing to run (worker.sweeper).
    """

    def acknowledge(self) -> None:
        super().acknowledge()
        message = self.message
        if not message.acknowledged:
            _log.warning("the broker was away when a task had ended; its message is given up")
            virtual.QoS.ack(message.channel.qos, message.delivery_tag)
