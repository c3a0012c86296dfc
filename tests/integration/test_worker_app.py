"""Messages on a real Redis: what is in one, how many there are, and what happens when nobody answers."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError
from redis_tls import tls_front

from service.broker import open_broker
from worker.app import QUEUE, count_messages, create_celery, enqueue
from worker.settings import WorkerSettings

JOB = "job_" + "1" * 26


@pytest.fixture
def celery(redis_url: str, secret_key: str) -> Celery:
    return create_celery(WorkerSettings.load(secret_key=secret_key, redis_url=redis_url))


def test_a_message_carries_the_job_id_alone(celery: Celery, redis_url: str, secret_key: str) -> None:
    assert enqueue(celery, JOB)
    with redis.Redis.from_url(redis_url) as client:
        [message] = client.lrange(QUEUE, 0, -1)
        assert secret_key.encode() not in message
        assert json.loads(message)["headers"]["argsrepr"] == f"['{JOB}']"


def test_messages_are_counted(celery: Celery) -> None:
    assert count_messages(celery) == 0
    enqueue(celery, JOB)
    enqueue(celery, JOB)
    assert count_messages(celery) == 2


def test_a_broker_that_is_away_delays_nobody_for_long(celery: Celery, redis_server: Any) -> None:
    assert enqueue(celery, JOB)
    redis_server.kill()
    began = time.monotonic()
    assert not enqueue(celery, JOB)
    with pytest.raises(OperationalError):
        count_messages(celery)
    assert time.monotonic() - began < 3
    redis_server.start()
    assert enqueue(celery, JOB)  # over a connection made anew


@pytest.mark.parametrize("trusted", [True, False])
def test_a_broker_behind_tls_needs_its_password_and_a_certificate_that_we_trust(
    tmp_path: Path, redis_server: Any, secret_key: str, trusted: bool
) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        client.config_set("requirepass", "pw_canary")
    with tls_front(urlsplit(redis_server.url).port or 0, tmp_path) as (port, certificate):
        url = f"rediss://:pw_canary@127.0.0.1:{port}/0"
        if trusted:
            url += f"?ssl_ca_certs={certificate}"
        celery = create_celery(WorkerSettings.load(secret_key=secret_key, redis_url=url))
        assert enqueue(celery, JOB) == trusted
        with open_broker(url, answer_s=5) as client:
            if trusted:
                assert client.llen(QUEUE) == 1
            else:
                with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
                    client.ping()
        celery.close()


def test_settings_that_losses_taught(celery: Celery, secret_key: str) -> None:
    conf = celery.conf
    assert conf.task_ignore_result
    assert conf.result_backend is None
    assert conf.task_acks_late
    assert conf.worker_prefetch_multiplier == 1
    assert conf.worker_cancel_long_running_tasks_on_connection_loss is False
    limit = WorkerSettings.load(secret_key=secret_key).job_time_limit_s
    assert conf.broker_transport_options["visibility_timeout"] > limit
