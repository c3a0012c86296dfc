"""The Celery application, and the message that wakes a worker. Knows nothing of what a worker then does.

A message carries a job id and no more: the SQL row is the truth, so a message that is lost, doubled or late does
no harm (see worker.sweeper), and nothing secret ever reaches the broker.
"""

import logging

from celery import Celery
from kombu.exceptions import ChannelError, OperationalError

from worker.settings import WorkerSettings

QUEUE = "kvalign"
TASK = "kvalign.run_job"
CONNECT_TIMEOUT_S = 3.0
ANSWER_TIMEOUT_S = 5.0
ONE_MORE_TRY = {"max_retries": 1, "interval_start": 0, "interval_step": 0}  # a kept connection may be stale

_log = logging.getLogger(__name__)


def create_celery(settings: WorkerSettings) -> Celery:
    """A Celery application for the API (which only enqueues) and for workers; connects to nothing yet."""
    celery = Celery("kvalign", broker=_checking(settings.redis_url), set_as_current=False)
    celery.conf.update(
        task_default_queue=QUEUE,
        task_ignore_result=True,  # no result backend: with one, killing Redis in mid-task lost the job
        task_acks_late=True,
        # A killed pool process loses its message, too: until its lease runs out, another one would find nothing to run,
        # and the sweeper sends one then. (Celery 5.7 fails to send a task without a result again: TypeError.)
        task_retry_on_worker_lost=False,
        task_reject_on_worker_lost=False,
        worker_prefetch_multiplier=1,
        worker_max_tasks_per_child=1,  # memory is given back, and an abandoned transfer ends with its process
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": int(settings.job_time_limit_s) + 3600,
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": ANSWER_TIMEOUT_S,
            "socket_keepalive": True,
            "max_retries": 0,  # of connecting in order to publish; the worker itself tries for ever
        },
        worker_proc_alive_timeout=60.0,  # Celery kills a pool process that is not up in 4 s, as on a busy machine
        worker_enable_remote_control=False,
        worker_send_task_events=settings.task_events,
    )
    return celery


def _checking(redis_url: str) -> str:
    """A URL by which kombu checks a TLS server's certificate, as redis-py does: it asks for none otherwise."""
    if not redis_url.startswith("rediss://") or "ssl_cert_reqs=" in redis_url:
        return redis_url
    return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"


def enqueue(celery: Celery, job_id: str) -> bool:
    """Wake a worker for a job that is in the store. False when the broker does not answer, which heals itself.

    Takes twice ANSWER_TIMEOUT_S at most.
    """
    try:
        celery.send_task(TASK, args=[job_id], queue=QUEUE, ignore_result=True, retry=True, retry_policy=ONE_MORE_TRY)
    except OperationalError as error:
        _log.warning("job %s is stored; the broker did not take its message (%s)", job_id, error)
        return False
    return True


def count_messages(celery: Celery) -> int:
    """Messages that no worker has taken yet. Raises OperationalError when the broker does not answer."""
    with celery.connection_for_write() as connection:
        try:
            declared = connection.default_channel.queue_declare(QUEUE, passive=True)
        except ChannelError:  # Redis forgets an empty queue
            return 0
        except connection.connection_errors as error:  # of Redis itself, once there is a connection
            raise OperationalError(str(error)) from error
        return int(declared.message_count)
