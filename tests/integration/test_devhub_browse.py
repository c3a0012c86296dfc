"""Looking at repos, branches, tags, history and renamed repos through the real client."""

import os
from pathlib import Path

import pytest
from devhub_fixture import ME, DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder

__all__ = ["devhub_process", "devhub_server", "hub_client"]
pytestmark = quiet_client

CARD = """---
license: other
license_name: my-licence
license_link: LICENSE
base_model: me/base
tags: [kv-cache]
library_name: transformers
---
# A model
"""


def test_model_info_shows_what_the_files_say(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/info", private=True)
    weights = os.urandom(5000)
    additions = [
        CommitOperationAdd("README.md", CARD.encode()),
        CommitOperationAdd("config.json", b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "x": 1}'),
        CommitOperationAdd("model.safetensors", weights),
    ]
    oid = api.create_commit("me/info", additions, commit_message="files").oid
    info = api.model_info("me/info", files_metadata=True)
    assert (info.id, info.author, info.sha, info.private, info.gated) == ("me/info", "me", oid, True, False)
    assert info.card_data is not None
    assert info.card_data.license_name == "my-licence"
    assert info.tags == ["kv-cache", "transformers", "license:other", "base_model:me/base"]
    assert info.library_name == "transformers"
    assert info.config == {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert info.created_at is not None
    assert info.siblings is not None
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings}
    assert sizes["model.safetensors"] == 5000
    assert [s.rfilename for s in info.siblings if s.lfs is not None] == ["model.safetensors"]
    plain = api.model_info("me/info")
    assert plain.siblings is not None
    assert all(sibling.size is None for sibling in plain.siblings)
    only = api.model_info("me/info", expand=["sha", "gated"])
    assert (only.sha, only.gated, only.siblings, only.private) == (oid, False, None, None)


def test_broken_config_and_card_do_not_hide_the_model(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/broken")
    files: dict[str, bytes | Path] = {"config.json": b"{", "README.md": b"---\na: [\n---\n"}
    for config in (b"{", b"[]", b'{"model_type": "\\ud800"}', b"\xff", b"[" * 100_000):
        devhub_server.storage.commit("me/broken", {**files, "config.json": config})
        info = devhub_server.api().model_info("me/broken")
        assert (info.config, info.card_data) == ({}, None)


def test_tree_by_folder_and_as_a_whole(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/tree-model")
    names = ["a.txt", "b/c.txt", "b/d/e.txt", "b.txt"]
    devhub_server.storage.commit("me/tree-model", {name: name.encode() for name in names})
    flat = list(api.list_repo_tree("me/tree-model"))
    assert [(type(item), item.path) for item in flat] == [
        (RepoFile, ".gitattributes"),
        (RepoFile, "a.txt"),
        (RepoFolder, "b"),
        (RepoFile, "b.txt"),
    ]
    inside = [item.path for item in api.list_repo_tree("me/tree-model", "b/d")]
    assert inside == ["b/d/e.txt"]
    deep = [item.path for item in api.list_repo_tree("me/tree-model", recursive=True)]
    assert deep == [".gitattributes", "a.txt", "b", "b.txt", "b/c.txt", "b/d", "b/d/e.txt"]
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree("me/tree-model", "nope"))


def test_long_listings_come_in_pages(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/pages")
    devhub_server.storage.commit("me/pages", {f"data/{i:04}.txt": b"same" for i in range(2100)})
    before = len(devhub_server.log())
    assert len(list(api.list_repo_tree("me/pages", recursive=True))) == 2102
    assert len(devhub_server.log()) - before == 3
    assert len(list(api.list_repo_tree("me/pages", "data", expand=True))) == 2100


def test_expand_names_the_last_commit_of_each_path(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/expand")
    devhub_server.storage.commit("me/expand", {"a": b"1", "d/b": b"1"}, title="first")
    devhub_server.storage.commit("me/expand", {"d/b": b"2"}, title="second")
    last = {item.path: item.last_commit for item in api.list_repo_tree("me/expand", recursive=True, expand=True)}
    titles = {path: commit.title for path, commit in last.items() if commit}
    assert titles == {".gitattributes": "initial commit", "a": "first", "d": "second", "d/b": "second"}


def test_paths_info_ignores_what_is_missing(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/paths")
    devhub_server.storage.commit("me/paths", {"a b&c.txt": b"1", "d/e": b"1"})
    found = api.get_paths_info("me/paths", ["a b&c.txt", "d", "nope"], expand=True)
    assert [(type(item), item.path) for item in found] == [(RepoFile, "a b&c.txt"), (RepoFolder, "d")]
    assert found[0].last_commit is not None


def test_branches_and_tags(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/refs-model")
    first = api.model_info("me/refs-model").sha or ""
    api.create_tag("me/refs-model", tag="v1.0", tag_message="one")
    api.create_branch("me/refs-model", branch="feature/x")
    second = api.upload_file(path_or_fileobj=b"1", path_in_repo="a", repo_id="me/refs-model", revision="feature/x").oid
    api.create_branch("me/refs-model", branch="from-tag", revision="v1.0")
    refs = api.list_repo_refs("me/refs-model")
    assert {branch.name: branch.target_commit for branch in refs.branches} == {
        "main": first,
        "feature/x": second,
        "from-tag": first,
    }
    assert [(tag.ref, tag.target_commit) for tag in refs.tags] == [("refs/tags/v1.0", first)]
    with pytest.raises(HfHubHTTPError, match="exists already"):
        api.create_tag("me/refs-model", tag="v1.0")
    api.create_tag("me/refs-model", tag="v1.0", exist_ok=True)
    api.create_branch("me/refs-model", branch="main", exist_ok=True)
    api.delete_tag("me/refs-model", tag="v1.0")
    api.delete_branch("me/refs-model", branch="feature/x")
    for call in (
        lambda: api.delete_tag("me/refs-model", tag="v1.0"),
        lambda: api.delete_branch("me/refs-model", branch="feature/x"),
        lambda: api.create_branch("me/refs-model", branch="z", revision="nope"),
        lambda: api.create_tag("me/refs-model", tag="z", revision="nope"),
    ):
        with pytest.raises(RevisionNotFoundError):
            call()
    with pytest.raises(BadRequestError):
        api.delete_branch("me/refs-model", branch="main")
    with pytest.raises(BadRequestError):
        api.create_branch("me/refs-model", branch="refs/pr/1")


@pytest.mark.parametrize("revision", ["feature/x", "refs/heads/feature/x", "refs/tags/v/1", "v/1", "SHORT", "FULL"])
def test_revisions_of_every_kind(devhub_server: DevHub, tmp_path: Path, revision: str) -> None:
    api, repo = devhub_server.api(), "me/revisions"
    api.create_repo(repo, exist_ok=True)
    api.create_branch(repo, branch="feature/x", exist_ok=True)
    oid = api.upload_file(path_or_fileobj=b"here", path_in_repo="f.txt", repo_id=repo, revision="feature/x").oid
    api.create_tag(repo, tag="v/1", revision="feature/x", exist_ok=True)
    revision = {"SHORT": oid[:8], "FULL": oid}.get(revision, revision)
    assert api.model_info(repo, revision=revision).sha == oid
    assert "f.txt" in api.list_repo_files(repo, revision=revision)
    got = api.hf_hub_download(repo, "f.txt", revision=revision, local_dir=tmp_path)
    assert Path(got).read_text() == "here"
    assert "f.txt" not in api.list_repo_files(repo)


def test_what_is_missing_is_told_apart(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/missing")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("me/not-there")
    with pytest.raises(RepositoryNotFoundError):
        devhub_server.api(token=False).model_info("me/not-there")
    with pytest.raises(RevisionNotFoundError):
        api.model_info("me/missing", revision="refs/pr/1")
    with pytest.raises(RevisionNotFoundError):
        api.hf_hub_download("me/missing", "a", revision="0" * 40)
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("me/missing", "a")
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info("me/missing")
    assert not api.file_exists("me/missing", "a")
    assert not api.repo_exists("me/not-there")
    assert not api.revision_exists("me/missing", "nope")


def test_history_is_newest_first(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/history")
    for number in range(3):
        api.create_commit(
            "me/history",
            [CommitOperationAdd("f", str(number).encode())],
            commit_message=f"<b>{number}</b>",
            commit_description="why",
        )
    commits = api.list_repo_commits("me/history", formatted=True)
    assert [commit.title for commit in commits] == ["<b>2</b>", "<b>1</b>", "<b>0</b>", "initial commit"]
    assert (commits[0].message, commits[0].authors) == ("why", ["me"])
    assert commits[0].formatted_title == "&lt;b&gt;2&lt;/b&gt;"
    assert len(api.list_repo_commits("me/history", revision=commits[2].commit_id)) == 2


def test_dataset_goes_the_same_ways(devhub_server: DevHub, tmp_path: Path) -> None:
    api = devhub_server.api()
    url = api.create_repo("me/data", repo_type="dataset")
    assert (url.repo_id, url.repo_type) == ("me/data", "dataset")
    api.upload_file(path_or_fileobj=os.urandom(300), path_in_repo="d/x.parquet", repo_id="me/data", repo_type="dataset")
    info = api.dataset_info("me/data", files_metadata=True)
    assert [s.rfilename for s in info.siblings or []] == [".gitattributes", "d/x.parquet"]
    folder = api.snapshot_download("me/data", repo_type="dataset", local_dir=tmp_path)
    assert (Path(folder) / "d" / "x.parquet").stat().st_size == 300
    api.delete_repo("me/data", repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info("me/data")


def test_spaces_are_refused_clearly(devhub_server: DevHub) -> None:
    with pytest.raises(BadRequestError, match="devhub keeps models and datasets"):
        devhub_server.api().create_repo("me/space", repo_type="space", space_sdk="static")


def test_model_without_an_owner(devhub_server: DevHub, tmp_path: Path) -> None:
    devhub_server.storage.create_repo("gpt2")
    devhub_server.storage.commit("gpt2", {"sub/config.json": b"{}"})
    api = devhub_server.api()
    assert api.model_info("gpt2", revision="main").id == "gpt2"
    assert [f.path for f in api.list_repo_tree("gpt2", "sub")] == ["sub/config.json"]
    assert api.list_repo_refs("gpt2").branches[0].name == "main"
    assert Path(api.hf_hub_download("gpt2", "sub/config.json", local_dir=tmp_path)).read_text() == "{}"
    with pytest.raises(HfHubHTTPError) as refusal:
        api.upload_file(path_or_fileobj=b"x", path_in_repo="a", repo_id="gpt2")
    assert refusal.value.response.status_code == 403


def test_renamed_repo_answers_under_both_names(devhub_server: DevHub, tmp_path: Path) -> None:
    api = devhub_server.api()
    api.create_repo("me/old-name")
    api.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id="me/old-name")
    api.move_repo("me/old-name", "me/middle-name")
    api.move_repo("me/middle-name", "acme/new-name")
    info = api.model_info("me/old-name", revision="main")
    assert info.id == "acme/new-name"
    assert Path(api.hf_hub_download("me/old-name", "a.txt", local_dir=tmp_path)).read_text() == "1"
    content = os.urandom(500)
    api.upload_file(path_or_fileobj=content, path_in_repo="b.bin", repo_id="me/old-name")
    assert "b.bin" in api.list_repo_files("acme/new-name")
    raw = devhub_server.get("/api/models/me/old-name/tree/main?recursive=true", token=ME)
    assert (raw.status_code, raw.headers["Location"]) == (307, "/api/models/acme/new-name/tree/main?recursive=true")
    api.create_repo("me/old-name")
    assert api.model_info("me/old-name").id == "me/old-name"


def test_move_onto_another_repo_or_into_a_foreign_namespace(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/move-a")
    api.create_repo("me/move-b")
    for target, status in (("me/move-b", 409), ("you/move-a", 403)):
        with pytest.raises(HfHubHTTPError) as refusal:
            api.move_repo("me/move-a", target)
        assert refusal.value.response.status_code == status
    assert api.repo_exists("me/move-a")


def test_deleted_repo_is_gone(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/doomed")
    api.delete_repo("me/doomed")
    api.delete_repo("me/doomed", missing_ok=True)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("me/doomed")
    api.create_repo("me/doomed")
