"""Downloads, whole, in parts and interrupted, and what the client makes of faults."""

import os
import re
import time
from pathlib import Path

import httpx2
import pytest
from devhub_fixture import DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

__all__ = ["devhub_process", "devhub_server", "hub_client"]
pytestmark = quiet_client

MIB = 1 << 20


@pytest.fixture
def model(devhub_server: DevHub, request: pytest.FixtureRequest) -> tuple[str, bytes]:
    """A repo of its own for each test, and the bytes of its model.safetensors."""
    name = f"me/{re.sub('[^a-z0-9]+', '-', request.node.name)[:60].strip('-')}"
    devhub_server.storage.create_repo(name)
    weights = os.urandom(3 * MIB)
    files: dict[str, bytes | Path] = {
        "model.safetensors": weights,
        "pytorch_model.bin": b"\0" * 1000,
        "config.json": b"{}",
        "sub/tokenizer.json": b"[]",
    }
    devhub_server.storage.commit(name, files)
    return name, weights


def test_snapshot_takes_only_what_is_allowed(devhub_server: DevHub, model: tuple[str, bytes], tmp_path: Path) -> None:
    name, weights = model
    folder = Path(
        devhub_server.api().snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors"], local_dir=tmp_path / "got"
        )
    )
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts}
    assert found == {"config.json", "model.safetensors", "sub/tokenizer.json"}
    assert (folder / "model.safetensors").read_bytes() == weights
    fetched = [entry["path"].split("/")[-1] for entry in devhub_server.log() if entry["method"] == "GET"]
    assert "pytorch_model.bin" not in fetched


def test_cache_download_and_checksums(devhub_server: DevHub, model: tuple[str, bytes], tmp_path: Path) -> None:
    name, _ = model
    api = devhub_server.api()
    folder = Path(api.snapshot_download(name, local_dir=tmp_path / "there"))
    clean = api.verify_repo_checksums(name, local_dir=folder)
    assert (clean.checked_count, clean.mismatches, clean.missing_paths) == (5, [], [])
    cached = Path(api.snapshot_download(name, cache_dir=tmp_path / "cache"))
    assert (cached / "config.json").read_text() == "{}"
    (folder / "config.json").write_text("[]")
    assert [m["path"] for m in api.verify_repo_checksums(name, local_dir=folder).mismatches] == ["config.json"]


def test_cut_download_is_resumed_where_it_broke(
    devhub_server: DevHub, model: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, weights = model
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    devhub_server.fault(method="GET", path_regex=r"/resolve/.*model\.safetensors", cut_after_bytes=MIB, times=2)
    before = len(devhub_server.log())
    got = devhub_server.api().hf_hub_download(name, "model.safetensors", local_dir=tmp_path)
    assert Path(got).read_bytes() == weights
    statuses = [entry["status"] for entry in devhub_server.log()[before:] if entry["method"] == "GET"]
    assert statuses == [200, 206, 206]


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [("bytes=0-9", 0, 9), ("bytes=100-", 100, 3 * MIB - 1), ("bytes=-7", 3 * MIB - 7, 3 * MIB - 1)],
)
def test_ranges(devhub_server: DevHub, model: tuple[str, bytes], asked: str, first: int, last: int) -> None:
    name, weights = model
    answer = devhub_server.get(f"/{name}/resolve/main/model.safetensors", Range=asked)
    assert answer.status_code == 206
    assert answer.headers["Content-Range"] == f"bytes {first}-{last}/{len(weights)}"
    assert answer.content == weights[first : last + 1]


def test_range_past_the_end(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    answer = devhub_server.get(f"/{model[0]}/resolve/main/model.safetensors", Range=f"bytes={3 * MIB}-")
    assert (answer.status_code, answer.headers["Content-Range"]) == (416, f"bytes */{3 * MIB}")


def test_head_tells_what_get_would_send(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    name, _ = model
    sha = devhub_server.api().model_info(name).sha
    large = devhub_server.http.head(f"/{name}/resolve/main/model.safetensors")
    assert large.headers["X-Repo-Commit"] == sha
    assert large.headers["X-Linked-Etag"] == large.headers["ETag"]
    assert int(large.headers["X-Linked-Size"]) == int(large.headers["Content-Length"]) == 3 * MIB
    small = devhub_server.http.head(f"/{name}/resolve/main/config.json")
    assert small.headers["ETag"] == '"9e26dfeeb6e641a33dae4961196235bdb965b21b"'  # git hash-object of {}
    assert "X-Linked-Etag" not in small.headers
    missing = devhub_server.http.head(f"/{name}/resolve/main/nope")
    assert (missing.status_code, missing.headers["X-Error-Code"]) == (404, "EntryNotFound")
    assert missing.headers["X-Repo-Commit"] == sha
    assert missing.content == b""


def test_old_revision_keeps_its_files(devhub_server: DevHub, model: tuple[str, bytes], tmp_path: Path) -> None:
    name, _ = model
    api = devhub_server.api()
    old = api.model_info(name).sha
    api.create_commit(name, [CommitOperationAdd("config.json", b'{"new": 1}')], commit_message="new")
    got = api.hf_hub_download(name, "config.json", revision=old, local_dir=tmp_path)
    assert Path(got).read_text() == "{}"


def test_busy_answers_are_tried_again(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    devhub_server.fault(method="GET", path_regex="/tree/", status=503, times=1, headers={"Retry-After": "0"})
    assert "config.json" in devhub_server.api().list_repo_files(model[0])
    devhub_server.fault(method="GET", path_regex="/tree/", status=429, times=1, headers={"Retry-After": "0"})
    assert "config.json" in devhub_server.api().list_repo_files(model[0])


def test_fault_waits_and_is_used_up(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    devhub_server.fault(path_regex="/api/whoami-v2", delay_s=0.3)
    start = time.monotonic()
    devhub_server.api().whoami()
    assert time.monotonic() - start >= 0.3
    start = time.monotonic()
    devhub_server.api().whoami()
    assert time.monotonic() - start < 0.3


def test_commit_that_happened_while_its_answer_was_lost(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    name, _ = model
    api = devhub_server.api()
    head = api.model_info(name).sha
    devhub_server.fault(method="POST", path_regex="/commit/", apply_then_cut=True)
    with pytest.raises(httpx2.RemoteProtocolError):
        api.create_commit(name, [CommitOperationAdd("a", b"1")], commit_message="unclear", parent_commit=head)
    commits = api.list_repo_commits(name)
    assert (commits[0].title, commits[1].commit_id) == ("unclear", head)


def test_commit_that_was_refused_did_not_happen(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    name, _ = model
    api = devhub_server.api()
    devhub_server.fault(method="POST", path_regex="/commit/", status=409)
    with pytest.raises(HfHubHTTPError):
        api.create_commit(name, [CommitOperationAdd("a", b"1")], commit_message="busy")
    assert not api.file_exists(name, "a")


def test_upload_survives_a_failing_part(devhub_server: DevHub, model: tuple[str, bytes], tmp_path: Path) -> None:
    name, _ = model
    api = devhub_server.api()
    devhub_server.fault(method="PUT", path_regex="/devhub/uploads/.*/2$", status=500)
    content = os.urandom(300_000)
    api.upload_file(path_or_fileobj=content, path_in_repo="big.bin", repo_id=name)
    assert Path(api.hf_hub_download(name, "big.bin", local_dir=tmp_path)).read_bytes() == content


def test_faults_can_be_cleared_and_must_make_sense(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    devhub_server.fault(path_regex=".", status=500, times=1000)
    devhub_server.clear_faults()
    assert devhub_server.api().whoami()["name"] == "me"
    for bad in ({"times": 0}, {"status": 200}, {"path_regex": "("}, {"wat": 1}, {"delay_s": -1}):
        assert devhub_server.http.post("/devhub/faults", json=bad).status_code == 400


def test_log_says_who_asked_what(devhub_server: DevHub, model: tuple[str, bytes]) -> None:
    with pytest.raises(EntryNotFoundError):
        devhub_server.api().hf_hub_download(model[0], "nope")
    assert devhub_server.log()[-1] == {
        "method": "HEAD",
        "path": f"/{model[0]}/resolve/main/nope",
        "query": "",
        "status": 404,
        "account": "me",
    }
