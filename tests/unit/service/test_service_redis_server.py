"""The Redis of one machine: private, durable, and never two on one folder."""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from kvalign.errors import ConfigInvalid
from service.redis_server import RedisServer, end_stale_redis, prepare_redis

Start = Callable[[RedisServer], subprocess.Popen[bytes]]


def answers(server: RedisServer) -> bool:
    try:
        with redis.Redis.from_url(server.url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(server: RedisServer) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(server.command)
        started.append(process)
        deadline = time.monotonic() + 10
        while not answers(server):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_it_keeps_what_was_queued_through_kill_9(tmp_path: Path, start: Start) -> None:
    first = prepare_redis(tmp_path / "a folder")
    process = start(first)
    with redis.Redis.from_url(first.url) as client:
        client.rpush("queue", "job_1")
    process.kill()
    process.wait()
    second = prepare_redis(tmp_path / "a folder")
    start(second)
    with redis.Redis.from_url(second.url) as client:
        assert client.lrange("queue", 0, -1) == [b"job_1"]


def test_it_asks_for_its_password(tmp_path: Path, start: Start) -> None:
    server = prepare_redis(tmp_path)
    start(server)
    address = server.url.rpartition("@")[2]
    with redis.Redis.from_url(f"redis://{address}") as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_the_password_is_in_no_command_line_and_no_open_file(tmp_path: Path, start: Start) -> None:
    server = prepare_redis(tmp_path)
    process = start(server)
    password = server.url.removeprefix("redis://:").partition("@")[0]
    assert password not in " ".join(psutil.Process(process.pid).cmdline())
    assert password not in " ".join(server.command)
    assert password not in repr(server)
    assert (tmp_path / "redis.conf").stat().st_mode & 0o777 == 0o600


def test_one_left_behind_is_ended_before_the_next(tmp_path: Path, start: Start) -> None:
    left = start(prepare_redis(tmp_path))
    prepare_redis(tmp_path)
    assert left.wait(10) == 0


def test_a_pid_file_that_names_a_stranger_harms_nobody(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (tmp_path / "redis.pid").write_text(f"{stranger.pid}\n")
        end_stale_redis(tmp_path)
        assert stranger.poll() is None
        stranger.kill()
    (tmp_path / "redis.pid").write_text("nonsense")
    end_stale_redis(tmp_path)


def test_a_folder_that_the_configuration_cannot_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="characters"):
        prepare_redis(tmp_path / 'a"b')
