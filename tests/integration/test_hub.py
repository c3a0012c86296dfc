"""worker.hub against a real devhub through the real client: reading, downloading, publishing, and what breaks."""

import hashlib
import json
import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devhub_fixture import ME, ME_READING, YOU, DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from safetensors.numpy import save_file

from devhub.importer import import_folder
from devhub.names import parse_repo_spec
from kvalign.config import Target
from kvalign.errors import (
    Canceled,
    ConfigInvalid,
    DatasetInvalid,
    DiskFull,
    HubUnavailable,
    KvalignError,
    SourceGated,
    SourceInvalid,
    SourceNotFound,
    TargetExists,
    TargetForbidden,
    WeightsUnsafe,
)
from kvalign.source import check_source
from worker.hub import Hub, SourceInfo, TokenInvalid

__all__ = ["devhub_process", "devhub_server", "hub_client"]

pytestmark = quiet_client

PAUSES_S = (0.01, 0.01, 0.01)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
CARD = "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\nextra_gated_prompt: Agree?\n---\n# A model\n"


def ignore(*_: Any) -> None:
    """A callback that nobody listens to."""


def hub_of(devhub: DevHub, token: str = ME) -> Hub:
    return Hub(devhub.url, token, pauses_s=PAUSES_S)


def put(devhub: DevHub, repo: str, folder: Path) -> str:
    return import_folder(devhub.storage, parse_repo_spec(repo), folder).oid


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with everything a repo may hold, wanted and unwanted."""
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE").write_text("Do good.")
    save_file(
        {"model.embed_tokens.weight": np.random.default_rng(0).random((16, 8), np.float32)},
        folder / "model.safetensors",
        metadata={"padding": "x" * 300_000},
    )
    for unwanted in ("pytorch_model.bin", "modeling.py", "training_args.pt", "other.safetensors", "onnx/model.onnx"):
        (folder / unwanted).write_bytes(b"never fetched")
    return folder


WANTED = {"config.json", "tokenizer.json", "README.md", "LICENSE", "model.safetensors"}


@pytest.fixture
def artifact(tmp_path: Path) -> dict[str, Path]:
    """What a conversion publishes, small."""
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "kvalign_config.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: other\n---\nA card.\n")
    (folder / "kvalign_codec.safetensors").write_bytes(os.urandom(350_000))
    return {path.name: path for path in folder.iterdir()}


class Published:
    """A source in devhub, and publishing its conversion."""

    def __init__(self, devhub: DevHub, repo: str, artifact: dict[str, Path], model: Path) -> None:
        put(devhub, f"you/{repo}-source", model)
        self.devhub = devhub
        self.hub = hub_of(devhub)
        self.source = self.hub.source(f"you/{repo}-source")
        self.target = Target(repo=f"me/{repo}")
        self.files = artifact
        self.intended = False

    def publish(self, job_id: str = "job_one", **changes: Any) -> Any:
        options: dict[str, Any] = {
            "job_id": job_id,
            "message": "Add the codec",
            "on_bytes": ignore,
            "before_commit": ignore,
            "before_create": self.intend,
            "created": self.intended,
        }
        return self.hub.publish(self.target, self.source, self.files, **options | changes)

    def intend(self) -> None:
        self.intended = True

    def titles(self) -> list[str]:
        return [commit.title for commit in self.devhub.api().list_repo_commits(self.target.repo)]

    def exists(self) -> bool:
        return self.devhub.api().repo_exists(self.target.repo)


@pytest.fixture
def publishing(
    devhub_server: DevHub, request: pytest.FixtureRequest, artifact: dict[str, Path], model: Path
) -> Published:
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return Published(devhub_server, f"p-{name}", artifact, model)


# Accounts


def test_whoami(devhub_server: DevHub) -> None:
    account = hub_of(devhub_server).whoami()
    assert (account.name, account.orgs, account.can_write) == ("me", ("acme",), True)
    assert not hub_of(devhub_server, ME_READING).whoami().can_write


@pytest.mark.parametrize("token", ["", "hf_wrong", "two\nlines", "hf_ü"])
def test_a_bad_token_is_refused_and_never_shown(devhub_server: DevHub, token: str) -> None:
    with pytest.raises(TokenInvalid) as caught:
        hub_of(devhub_server, token).whoami()
    assert caught.value.code == "source_forbidden"
    assert not token or token not in str(caught.value)


def test_an_anonymous_hub_never_takes_a_token_from_this_machine(
    devhub_server: DevHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(devhub_server, "me/mine-alone", model)
    devhub_server.api().update_repo_settings("me/mine-alone", private=True)
    monkeypatch.setenv("HF_TOKEN", ME)
    Path(constants.HF_TOKEN_PATH).parent.mkdir(parents=True)
    Path(constants.HF_TOKEN_PATH).write_text(ME)
    with pytest.raises(SourceNotFound):
        hub_of(devhub_server, "").source("me/mine-alone")
    with pytest.raises(SourceNotFound):
        hub_of(devhub_server, YOU).source("me/mine-alone")


# Sources


def test_source_is_pinned_with_sizes_hashes_and_licence(devhub_server: DevHub, model: Path) -> None:
    commit = put(devhub_server, "me/a-source", model)
    source = hub_of(devhub_server, "").source("me/a-source")
    weights = source.files["model.safetensors"]
    assert (source.repo, source.commit, source.private, source.gated) == ("me/a-source", commit, False, None)
    assert weights.size == (model / "model.safetensors").stat().st_size
    assert weights.sha256 == hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert source.files["config.json"].sha256 is None
    assert source.card == {
        "license": "other",
        "license_name": "own",
        "license_link": "LICENSE",
        "extra_gated_prompt": "Agree?",
    }


@pytest.mark.parametrize(
    ("repo", "revision", "named"),
    [
        ("me/nothing", "main", "not on the Hub"),
        ("me/an-old-source", "v9", "no such revision"),
        ("a//b", "main", "name"),
    ],
)
def test_a_source_that_is_not_there(devhub_server: DevHub, model: Path, repo: str, revision: str, named: str) -> None:
    put(devhub_server, "me/an-old-source", model)
    with pytest.raises(SourceNotFound, match=named) as caught:
        hub_of(devhub_server).source(repo, revision)
    assert caught.value.remedy


def test_a_gated_source(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "you/gated", model)
    devhub_server.api(YOU).update_repo_settings("you/gated", gated="manual")
    with pytest.raises(SourceGated, match="gated") as caught:
        hub_of(devhub_server).source("you/gated")
    assert f"{devhub_server.url}/you/gated" in caught.value.remedy
    devhub_server.storage.find(parse_repo_spec("you/gated")).accept("me")
    source = hub_of(devhub_server).source("you/gated")
    assert source.gated == "manual"
    hub_of(devhub_server).download(source, tmp_path / "into", ignore)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_a_busy_hub_is_asked_again(devhub_server: DevHub, model: Path, status: int) -> None:
    put(devhub_server, "me/busy", model)
    devhub_server.fault(path_regex="/api/models/me/busy/revision", status=status, times=len(PAUSES_S))
    assert hub_of(devhub_server).source("me/busy").repo == "me/busy"


def test_a_hub_that_stays_busy_is_unavailable(devhub_server: DevHub) -> None:
    devhub_server.fault(path_regex="/api/models/me/any", status=503, times=100)
    with pytest.raises(HubUnavailable, match="503"):
        hub_of(devhub_server).source("me/any")


def test_a_hub_that_asks_for_a_long_wait_is_unavailable_at_once(devhub_server: DevHub) -> None:
    devhub_server.fault(path_regex="/api/models/me/any", status=429, headers={"Retry-After": "3600"})
    began = time.monotonic()
    with pytest.raises(HubUnavailable, match="3600 s"):
        hub_of(devhub_server).source("me/any")
    assert time.monotonic() - began < 5


def test_no_hub_at_all(hub_client: None) -> None:
    with pytest.raises(HubUnavailable, match="did not answer"):
        Hub("http://127.0.0.1:9", ME, pauses_s=PAUSES_S).source("me/any")


# Downloads


def test_download_fetches_what_is_needed_and_nothing_else(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/whole", model)
    hub, into, seen = hub_of(devhub_server), tmp_path / "into", []
    hub.download(hub.source("me/whole"), into, lambda done, total: seen.append((done, total)))
    assert {path.name for path in into.iterdir()} == WANTED
    assert all((into / name).read_bytes() == (model / name).read_bytes() for name in WANTED)
    total = sum((model / name).stat().st_size for name in WANTED)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert check_source(into).parameters == 128


def test_download_again_fetches_only_what_is_damaged(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/again", model)
    hub, into = hub_of(devhub_server), tmp_path / "into"
    hub.download(hub.source("me/again"), into, ignore)
    (into / "tokenizer.json").write_text("[]")
    before = len(devhub_server.log())
    hub.download(hub.source("me/again"), into, ignore)
    asked = [entry["path"] for entry in devhub_server.log()[before:] if "/resolve/" in entry["path"]]
    assert [path.rpartition("/")[2] for path in asked] == ["tokenizer.json"]
    assert (into / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("cut", [0, 1, 100_000])
def test_download_resumes_after_a_cut(devhub_server: DevHub, model: Path, tmp_path: Path, cut: int) -> None:
    put(devhub_server, "me/cut", model)
    hub, into = hub_of(devhub_server), tmp_path / "into"
    devhub_server.fault(method="GET", path_regex=r"me/cut/resolve/.*/model.safetensors", cut_after_bytes=cut, times=2)
    hub.download(hub.source("me/cut"), into, ignore)
    assert (into / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


def test_download_takes_up_the_part_of_an_earlier_attempt(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/part", model)
    hub, into, whole = hub_of(devhub_server), tmp_path / "into", (model / "model.safetensors").read_bytes()
    into.mkdir()
    (into / "model.safetensors.part").write_bytes(whole[:200_000])
    hub.download(hub.source("me/part"), into, ignore)
    assert (into / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("extra", [b"", b"more than the file holds"])
def test_a_part_of_another_file_is_fetched_anew(
    devhub_server: DevHub, model: Path, tmp_path: Path, extra: bytes
) -> None:
    put(devhub_server, "me/foreign-part", model)
    hub, into, whole = hub_of(devhub_server), tmp_path / "into", (model / "model.safetensors").read_bytes()
    into.mkdir()
    (into / "model.safetensors.part").write_bytes(b"\0" * len(whole) + extra)
    hub.download(hub.source("me/foreign-part"), into, ignore)
    assert (into / "model.safetensors").read_bytes() == whole


def test_bytes_that_are_not_those_listed_are_refused(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/damaged", model)
    hub, into = hub_of(devhub_server), tmp_path / "into"
    source = hub.source("me/damaged")
    wrong = replace(source.files["tokenizer.json"], git_sha1="0" * 40)
    with pytest.raises(HubUnavailable, match="me/damaged arrived twice"):
        hub.download(replace(source, files={**source.files, "tokenizer.json": wrong}), into, ignore)
    assert not (into / "tokenizer.json").exists()


def test_a_file_longer_than_listed_stops_at_once(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/longer", model)
    hub = hub_of(devhub_server)
    source = hub.source("me/longer")
    wrong = replace(source.files["model.safetensors"], size=1000)
    with pytest.raises(HubUnavailable, match="than the 1000 bytes"):
        hub.download(replace(source, files={**source.files, "model.safetensors": wrong}), tmp_path / "into", ignore)


def test_cancel_stops_a_download_at_once(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/canceled", model)
    hub = hub_of(devhub_server)

    def cancel(done: int, total: int) -> None:
        if done > 50_000:
            raise Canceled("The owner canceled the job.")

    with pytest.raises(Canceled):
        hub.download(hub.source("me/canceled"), tmp_path / "into", cancel)
    assert not (tmp_path / "into" / "model.safetensors").exists()


def test_cancel_ends_the_waiting_for_a_dead_hub(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/stalled", model)
    hub = Hub(devhub_server.url, ME, pauses_s=(60.0,))
    source, canceled = hub.source("me/stalled"), threading.Event()
    devhub_server.fault(path_regex="me/stalled/resolve/.*/README.md", status=503, times=100)
    threading.Timer(0.5, canceled.set).start()

    def check(done: int, total: int) -> None:
        if canceled.is_set():
            raise Canceled("The owner canceled the job.")

    began = time.monotonic()
    with pytest.raises(Canceled):
        hub.download(source, tmp_path / "into", check)
    assert time.monotonic() - began < 5


def test_no_room_for_a_file(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/large-for-the-disk", model)
    hub, limits = hub_of(devhub_server), resource.getrlimit(resource.RLIMIT_FSIZE)
    source = hub.source("me/large-for-the-disk")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(DiskFull, match="The disk is full"):
            hub.download(source, tmp_path / "into", ignore)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_source_whose_files_are_refused_in_the_middle(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "you/closing", model)
    hub = hub_of(devhub_server)
    source = hub.source("you/closing")
    devhub_server.api(YOU).update_repo_settings("you/closing", gated="manual")
    with pytest.raises(SourceGated):
        hub.download(source, tmp_path / "into", ignore)


def test_only_pickles(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    for path in model.glob("*.safetensors"):
        path.unlink()
    put(devhub_server, "me/pickles", model)
    hub = hub_of(devhub_server)
    with pytest.raises(WeightsUnsafe, match="pickles only"):
        hub.download(hub.source("me/pickles"), tmp_path / "into", ignore)
    assert not (tmp_path / "into").exists()


def test_shards_come_with_their_index(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    put(devhub_server, "me/shards", model)
    hub, into = hub_of(devhub_server), tmp_path / "into"
    hub.download(hub.source("me/shards"), into, ignore)
    expected = WANTED - {"model.safetensors"} | {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    assert {path.name for path in into.iterdir()} == expected


def test_remote_headers_are_read_by_range(devhub_server: DevHub, model: Path) -> None:
    put(devhub_server, "me/ranges", model)
    hub = hub_of(devhub_server)
    source = hub.source("me/ranges")
    files, whole = hub.files(source), (model / "model.safetensors").read_bytes()
    assert files.read("model.safetensors", 0, 8) == whole[:8]
    assert files.read("model.safetensors", 200_000, 1_000_000) == whole[200_000:]
    assert files.read("model.safetensors", 5, 0) == b""
    assert "onnx/model.onnx" not in files.sizes()


# Datasets


def test_a_dataset_gives_its_training_text(devhub_server: DevHub, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "test.jsonl").write_text("{}")
    (folder / "data" / "train.jsonl").write_text('{"text": "hello"}\n')
    put(devhub_server, "datasets/me/texts", folder)
    path = hub_of(devhub_server).download_dataset("me/texts", "main", tmp_path / "into", ignore)
    assert path == tmp_path / "into" / "train.jsonl"
    assert path.read_text() == '{"text": "hello"}\n'


def test_datasets_that_cannot_be_used(devhub_server: DevHub, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"")
    put(devhub_server, "datasets/you/images", folder)
    hub = hub_of(devhub_server)
    with pytest.raises(DatasetInvalid, match=r"holds no \.parquet"):
        hub.dataset("you/images")
    devhub_server.api(YOU).update_repo_settings("you/images", repo_type="dataset", gated="auto")
    with pytest.raises(DatasetInvalid, match="gated") as caught:
        hub.dataset("you/images")
    assert f"{devhub_server.url}/datasets/you/images" in caught.value.remedy
    with pytest.raises(DatasetInvalid, match="not on the Hub"):
        hub.dataset("you/none")


# Publishing


def test_publish_makes_a_private_repo_with_one_commit(publishing: Published) -> None:
    seen: list[tuple[int, int]] = []
    published = publishing.publish(on_bytes=lambda done, total: seen.append((done, total)))
    api = publishing.devhub.api()
    info = api.model_info(publishing.target.repo)
    assert (published.repo, published.commit) == (publishing.target.repo, info.sha)
    assert published.url == f"{publishing.devhub.url}/{publishing.target.repo}"
    assert info.private
    assert publishing.titles() == ["Add the codec (job_one)", "initial commit"]
    assert {*api.list_repo_files(info.id)} == {".gitattributes", *publishing.files}
    total = sum(path.stat().st_size for path in publishing.files.values())
    assert seen[-1] == (total, total)
    assert len({done for done, _ in seen}) > len(publishing.files)
    assert publishing.intended


def test_publish_in_public_when_asked(publishing: Published) -> None:
    publishing.target = Target(repo=publishing.target.repo, visibility="public")
    publishing.publish()
    assert publishing.devhub.api(False).model_info(publishing.target.repo).private is False


def test_a_target_without_an_owner_is_the_accounts_own(publishing: Published) -> None:
    publishing.target = Target(repo=publishing.target.repo.partition("/")[2])
    assert publishing.publish().repo == f"me/{publishing.target.repo}"


def test_publish_into_an_organisation(publishing: Published) -> None:
    publishing.target = Target(repo=publishing.target.repo.replace("me/", "acme/"))
    assert publishing.publish().repo.startswith("acme/")


def test_publish_again_returns_the_commit_that_is_there(publishing: Published) -> None:
    first = publishing.publish()
    api = publishing.devhub.api()
    api.upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=publishing.target.repo)
    assert publishing.publish() == first
    assert publishing.publish(created=False) == first
    assert len(publishing.titles()) == 3


@pytest.mark.parametrize(
    "fault",
    [
        {"apply_then_cut": True},
        {"status": 500},
        {"status": 503},
        {"status": 409},
        {"status": 412},
        {"cut_after_bytes": 0},
    ],
    ids=str,
)
def test_an_unclear_commit_is_made_exactly_once(publishing: Published, fault: dict[str, Any]) -> None:
    publishing.devhub.fault(method="POST", path_regex=f"{publishing.target.repo}/commit/main", **fault)
    published = publishing.publish()
    assert publishing.titles() == ["Add the codec (job_one)", "initial commit"]
    assert published.commit == publishing.devhub.api().model_info(publishing.target.repo).sha


def test_a_hub_that_takes_no_commit_is_unavailable_and_the_repo_is_kept_for_the_retry(publishing: Published) -> None:
    publishing.devhub.fault(method="POST", path_regex=f"{publishing.target.repo}/commit/main", status=503, times=100)
    with pytest.raises(HubUnavailable, match="does not take the commit"):
        publishing.publish()
    publishing.devhub.clear_faults()
    assert publishing.titles() == ["initial commit"]
    publishing.publish()
    assert len(publishing.titles()) == 2


def test_an_unanswered_creation_is_taken_up(publishing: Published) -> None:
    publishing.devhub.fault(method="POST", path_regex="/api/repos/create", apply_then_cut=True)
    publishing.publish()
    assert len(publishing.titles()) == 2


def test_a_crash_after_creation_is_taken_up(publishing: Published) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publishing.publish(before_commit=crash)
    assert publishing.titles() == ["initial commit"]
    with pytest.raises(TargetExists):
        publishing.publish("job_two", created=False)
    publishing.publish()
    assert len(publishing.titles()) == 2


def test_an_existing_repo_is_never_written_to(publishing: Published) -> None:
    api = publishing.devhub.api()
    api.create_repo(publishing.target.repo, private=True)
    for target in (publishing.target, Target(repo=publishing.target.repo, on_existing="update")):
        publishing.target = target
        with pytest.raises(TargetExists) as caught:
            publishing.publish()
        assert caught.value.remedy
        with pytest.raises(TargetExists):
            publishing.hub.check_target(target, job_id=None)
    assert publishing.titles() == ["initial commit"]


def test_a_repo_that_appears_in_between_is_never_written_to(publishing: Published) -> None:
    def somebody_else_is_quicker() -> None:
        publishing.devhub.api().create_repo(publishing.target.repo, private=True)

    with pytest.raises(TargetForbidden, match="409"):
        publishing.publish(before_create=somebody_else_is_quicker)
    assert publishing.titles() == ["initial commit"]


def test_update_replaces_an_earlier_conversion_and_keeps_what_is_not_ours(publishing: Published) -> None:
    publishing.publish()
    api, repo = publishing.devhub.api(), publishing.target.repo
    api.create_commit(
        repo,
        [CommitOperationAdd(name, os.urandom(2000)) for name in ("notes.txt", "model.safetensors", "figures/old.png")],
        commit_message="by hand",
    )
    publishing.target = Target(repo=repo, on_existing="update")
    publishing.files["README.md"].write_text("---\nlicense: other\n---\nA better card.\n")
    publishing.publish("job_two", created=False)
    assert {*api.list_repo_files(repo)} == {".gitattributes", "notes.txt", *publishing.files}
    assert len(publishing.titles()) == 4


def test_update_without_a_change_makes_no_commit(publishing: Published) -> None:
    first = publishing.publish()
    publishing.target = Target(repo=publishing.target.repo, on_existing="update")
    assert publishing.publish("job_two", created=False) == first


def test_update_follows_a_target_that_moves_on(publishing: Published) -> None:
    publishing.publish()
    publishing.target = Target(repo=publishing.target.repo, on_existing="update")
    publishing.files["README.md"].write_text("---\nlicense: other\n---\nA better card.\n")
    moves = iter([True, True])

    def move() -> None:
        if next(moves, False):
            publishing.devhub.api().upload_file(
                path_or_fileobj=os.urandom(9), path_in_repo="notes.txt", repo_id=publishing.target.repo
            )

    publishing.publish("job_two", created=False, before_commit=move)
    assert publishing.titles()[0] == "Add the codec (job_two)"
    assert len(publishing.titles()) == 5


def test_a_new_repo_that_someone_writes_to_meanwhile_is_left_alone(publishing: Published) -> None:
    def write() -> None:
        publishing.devhub.api().upload_file(
            path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=publishing.target.repo
        )

    with pytest.raises(TargetExists):
        publishing.publish(before_commit=write)
    assert len(publishing.titles()) == 2


def test_update_does_not_publish_in_a_public_repo_by_default(publishing: Published) -> None:
    publishing.target = Target(repo=publishing.target.repo, visibility="public")
    publishing.publish()
    publishing.target = Target(repo=publishing.target.repo, on_existing="update")
    with pytest.raises(ConfigInvalid, match="is public"):
        publishing.publish("job_two", created=False)


def test_a_gated_source_makes_a_gated_target_before_anything_is_in_it(publishing: Published) -> None:
    publishing.devhub.api(YOU).update_repo_settings(publishing.source.repo, gated="auto")
    publishing.devhub.storage.find(parse_repo_spec(publishing.source.repo)).accept("me")
    gates: list[Any] = []

    def look() -> None:
        gates.append(publishing.devhub.api().model_info(publishing.target.repo).gated)

    publishing.publish(before_commit=look)
    assert gates == ["auto"]


@pytest.mark.parametrize("change", [{"gated": "auto"}, {"private": True}])
def test_a_restricted_source_cannot_become_public(publishing: Published, change: dict[str, Any]) -> None:
    api = publishing.devhub.api()
    put(publishing.devhub, "me/restricted", publishing.files["README.md"].parent)
    api.update_repo_settings("me/restricted", private=False, gated=False)
    api.update_repo_settings("me/restricted", **change)
    source = publishing.hub.source("me/restricted")
    target = Target(repo=publishing.target.repo, visibility="public")
    with pytest.raises(ConfigInvalid, match="cannot be public") as caught:
        publishing.hub.check_target(target, job_id=None, source=source)
    assert "private" in caught.value.remedy
    publishing.source, publishing.target = source, target
    with pytest.raises(ConfigInvalid):
        publishing.publish()
    assert not publishing.exists()


def test_access_to_the_source_is_checked_again_before_publishing(publishing: Published) -> None:
    publishing.devhub.api(YOU).update_repo_settings(publishing.source.repo, gated="manual")
    with pytest.raises(SourceGated):
        publishing.publish()
    assert not publishing.exists()


def test_the_target_is_never_the_source(publishing: Published) -> None:
    put(publishing.devhub, "me/itself", publishing.files["README.md"].parent)
    source = publishing.hub.source("me/itself")
    with pytest.raises(ConfigInvalid, match="source itself"):
        publishing.hub.check_target(Target(repo="itself", on_existing="update"), job_id=None, source=source)


@pytest.mark.parametrize(
    ("token", "repo", "named"),
    [(ME_READING, "me/x", "may not write"), (ME, "you/x", "belongs neither"), (YOU, "acme/x", "belongs neither")],
)
def test_where_an_account_may_not_write(devhub_server: DevHub, token: str, repo: str, named: str) -> None:
    with pytest.raises(TargetForbidden, match=named) as caught:
        hub_of(devhub_server, token).check_target(Target(repo=repo), job_id=None)
    assert caught.value.remedy


def test_check_target_of_a_free_name(devhub_server: DevHub) -> None:
    assert hub_of(devhub_server).check_target(Target(repo="free"), job_id=None) == "me/free"


def raises_canceled(*_: Any) -> None:
    raise Canceled("The owner canceled the job.")


def cancel_in_upload(done: int, total: int) -> None:
    if done > 100_000:
        raise Canceled("The owner canceled the job.")


@pytest.mark.parametrize("where", [{"before_commit": raises_canceled}, {"on_bytes": cancel_in_upload}])
def test_cancel_before_the_commit_leaves_nothing_behind(publishing: Published, where: dict[str, Any]) -> None:
    with pytest.raises(Canceled):
        publishing.publish(**where)
    assert publishing.intended
    assert not publishing.exists()


def test_cancel_never_removes_a_repo_with_something_in_it(publishing: Published) -> None:
    publishing.publish()
    publishing.target = Target(repo=publishing.target.repo, on_existing="update")
    publishing.files["README.md"].write_text("---\nlicense: other\n---\nA better card.\n")
    with pytest.raises(Canceled):
        publishing.publish("job_two", before_commit=raises_canceled)
    assert len(publishing.titles()) == 2


def test_settle_removes_an_empty_repo_of_this_job(publishing: Published) -> None:
    api, settle = publishing.devhub.api(), publishing.hub.settle
    assert settle(publishing.target, job_id="job_one", created=True) is None
    api.create_repo(publishing.target.repo)
    assert settle(publishing.target, job_id="job_one", created=False) is None
    assert publishing.exists()
    assert settle(publishing.target, job_id="job_one", created=True) is None
    assert not publishing.exists()


def test_settle_finds_a_commit_that_has_happened(publishing: Published) -> None:
    published = publishing.publish("job_one")
    assert publishing.hub.settle(publishing.target, job_id="job_one", created=True) == published
    assert publishing.hub.settle(publishing.target, job_id="job_two", created=True) is None
    assert publishing.exists()


def test_an_upload_is_retried_and_a_lost_token_is_not(publishing: Published) -> None:
    publishing.devhub.fault(method="POST", path_regex="info/lfs/objects/batch", status=401)
    with pytest.raises(TargetForbidden, match="token"):
        publishing.publish()
    publishing.devhub.fault(method="PUT", path_regex="/devhub/uploads/", status=500)
    publishing.publish()
    assert len(publishing.titles()) == 2


def test_a_card_that_the_hub_refuses(publishing: Published) -> None:
    publishing.files["README.md"].write_text("---\nlicense: [\n---\n")
    with pytest.raises(KvalignError, match="refuses the model card"):
        publishing.publish()


def test_the_token_is_in_no_error(devhub_server: DevHub) -> None:
    devhub_server.fault(path_regex="/api/models/", status=403, headers={"X-Error-Message": f"token {ME} is bad"})
    with pytest.raises(KvalignError) as caught:
        hub_of(devhub_server).source("me/any")
    assert "[token] is bad" in str(caught.value)
    assert ME not in repr(caught.value)
    assert caught.value.__cause__ is None


def test_source_info_is_plain_data(devhub_server: DevHub, model: Path) -> None:
    put(devhub_server, "me/plain", model)
    assert type(hub_of(devhub_server).source("me/plain")) is SourceInfo


def test_a_licence_of_absurd_size_is_refused(devhub_server: DevHub, model: Path, tmp_path: Path) -> None:
    put(devhub_server, "me/wordy", model)
    hub = hub_of(devhub_server)
    source = hub.source("me/wordy")
    wrong = replace(source.files["LICENSE"], size=65_000_000)
    with pytest.raises(SourceInvalid, match="LICENSE has 65000000 bytes"):
        hub.download(replace(source, files={**source.files, "LICENSE": wrong}), tmp_path / "into", ignore)


def test_removed_files_are_not_committed(devhub_server: DevHub, publishing: Published) -> None:
    publishing.publish()
    devhub_server.api().create_commit(
        publishing.target.repo, [CommitOperationDelete("kvalign_config.json")], commit_message="by hand"
    )
    publishing.target = Target(repo=publishing.target.repo, on_existing="update")
    with pytest.raises(TargetExists, match=r"holds no kvalign_config\.json"):
        publishing.publish("job_two", created=False)
