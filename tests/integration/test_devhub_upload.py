"""Uploads and commits through the real client."""

import hashlib
import json
import os
from pathlib import Path

import pytest
from devhub_fixture import ME, MULTIPART_BYTES, YOU, DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete
from huggingface_hub.errors import BadRequestError, EntryNotFoundError, HfHubHTTPError, RevisionNotFoundError

__all__ = ["devhub_process", "devhub_server", "hub_client"]
pytestmark = quiet_client


def paths(hub: DevHub, repo: str, revision: str = "main") -> list[str]:
    return [path for path in hub.api().list_repo_files(repo, revision=revision) if path != ".gitattributes"]


def test_new_repo_has_one_commit_and_a_url(devhub_server: DevHub) -> None:
    url = devhub_server.api().create_repo("fresh")
    assert (url.repo_id, url.repo_type, str(url)) == ("me/fresh", "model", f"{devhub_server.url}/me/fresh")
    assert [c.title for c in devhub_server.api().list_repo_commits("me/fresh")] == ["initial commit"]
    assert devhub_server.api().list_repo_files("me/fresh") == [".gitattributes"]


def test_repo_that_exists_is_a_conflict_unless_that_is_fine(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    first = api.create_repo("me/twice")
    with pytest.raises(HfHubHTTPError) as refusal:
        api.create_repo("me/twice")
    assert refusal.value.response.status_code == 409
    assert api.create_repo("me/twice", exist_ok=True) == first


@pytest.mark.parametrize("name", ["me/tree", "api/x", "datasets/x", "me/refs"])
def test_repo_names_that_are_words_of_the_urls_are_refused(devhub_server: DevHub, name: str) -> None:
    owner, repo = name.split("/")
    body = {"name": repo, "organization": owner}
    answer = devhub_server.http.post("/api/repos/create", json=body, headers={"Authorization": f"Bearer {ME}"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "size",
    [1, MULTIPART_BYTES, MULTIPART_BYTES + 1, 3 * MULTIPART_BYTES, 3 * MULTIPART_BYTES + 17],
    ids=["one byte", "largest in one piece", "smallest in parts", "whole parts", "odd last part"],
)
def test_large_file_comes_back_as_it_was(devhub_server: DevHub, tmp_path: Path, size: int) -> None:
    api, repo = devhub_server.api(), f"me/large-{size}"
    api.create_repo(repo)
    content = os.urandom(size)
    api.upload_file(path_or_fileobj=content, path_in_repo="deep/er/model.safetensors", repo_id=repo)
    got = api.hf_hub_download(repo, "deep/er/model.safetensors", local_dir=tmp_path)
    assert Path(got).read_bytes() == content
    info = api.get_paths_info(repo, ["deep/er/model.safetensors"])[0]
    assert info.lfs.sha256 == hashlib.sha256(content).hexdigest()
    assert info.size == info.lfs.size == size


def test_parts_were_really_used(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/parts")
    before = len(devhub_server.log())
    api.upload_file(path_or_fileobj=os.urandom(5 * MULTIPART_BYTES), path_in_repo="a.bin", repo_id="me/parts")
    puts = [entry["path"] for entry in devhub_server.log()[before:] if entry["method"] == "PUT"]
    assert sorted(puts) == [f"/devhub/uploads/.../{number}" for number in range(1, 6)]


def test_small_file_has_the_id_git_gives_it(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/git-id")
    api.upload_file(path_or_fileobj=b"hello world\n", path_in_repo="hello.txt", repo_id="me/git-id")
    info = api.get_paths_info("me/git-id", ["hello.txt"])[0]
    assert info.blob_id == "3b18e512dba79e4c8300dd08aeb37f8e728b8dad"  # git hash-object
    assert info.lfs is None


def test_binary_without_a_telling_name_is_large_and_empty_is_small(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/kinds")
    additions = [CommitOperationAdd("mystery", b"\x00\xff" * 40), CommitOperationAdd("empty.safetensors", b"")]
    api.create_commit("me/kinds", additions, commit_message="two files")
    info = {item.path: item for item in api.get_paths_info("me/kinds", ["mystery", "empty.safetensors"])}
    assert info["mystery"].lfs is not None
    assert info["empty.safetensors"].lfs is None
    assert info["empty.safetensors"].size == 0


def test_upload_folder_and_unchanged_files_make_no_second_commit(devhub_server: DevHub, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "weights.bin").write_bytes(os.urandom(2000))
    (tmp_path / "notes with space & ünïcode.txt").write_text("hi")
    api = devhub_server.api()
    api.create_repo("me/folder")
    first = api.upload_folder(repo_id="me/folder", folder_path=tmp_path)
    second = api.upload_folder(repo_id="me/folder", folder_path=tmp_path)
    assert first.oid == second.oid
    assert paths(devhub_server, "me/folder") == ["notes with space & ünïcode.txt", "sub/weights.bin"]


def test_stale_parent_is_refused_and_changes_nothing(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/stale")
    start = api.model_info("me/stale").sha
    assert start is not None
    api.create_commit("me/stale", [CommitOperationAdd("a", b"1")], commit_message="1", parent_commit=start)
    with pytest.raises(HfHubHTTPError, match="A commit has happened since") as refusal:
        api.create_commit("me/stale", [CommitOperationAdd("b", b"2")], commit_message="2", parent_commit=start)
    assert refusal.value.response.status_code == 412
    assert paths(devhub_server, "me/stale") == ["a"]


def test_short_parent_is_enough(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/short")
    start = api.model_info("me/short").sha or ""
    api.create_commit("me/short", [CommitOperationAdd("a", b"1")], commit_message="1", parent_commit=start[:7])
    assert paths(devhub_server, "me/short") == ["a"]


def test_delete_file_and_folder_and_rename_a_large_file(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/deletes")
    names = ["keep.txt", "gone.txt", "dir/a.txt", "dir/deeper/b.txt", "directory.txt", "old.bin"]
    additions = [CommitOperationAdd(name, name.encode() + b"\0" * (name == "old.bin")) for name in names]
    api.create_commit("me/deletes", additions, commit_message="all")
    changes = [
        CommitOperationDelete("gone.txt"),
        CommitOperationDelete("dir/"),
        CommitOperationCopy("old.bin", "new.bin"),
        CommitOperationDelete("old.bin"),
    ]
    api.create_commit("me/deletes", changes, commit_message="fewer")
    assert paths(devhub_server, "me/deletes") == ["directory.txt", "keep.txt", "new.bin"]


def test_deleting_what_is_not_there(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/nothing")
    with pytest.raises(EntryNotFoundError, match="A file with this name doesn't exist"):
        devhub_server.api().delete_file("nope.txt", "me/nothing")


def test_path_cannot_be_file_and_folder(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/both")
    api.upload_file(path_or_fileobj=b"x", path_in_repo="a", repo_id="me/both")
    with pytest.raises(BadRequestError, match="file and a folder"):
        api.upload_file(path_or_fileobj=b"x", path_in_repo="a/b", repo_id="me/both")


def test_commit_to_a_branch_that_is_not_there(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/branchless")
    with pytest.raises(RevisionNotFoundError):
        devhub_server.api().upload_file(
            path_or_fileobj=b"x", path_in_repo="a", repo_id="me/branchless", revision="nope"
        )


def test_pull_requests_and_xet_are_refused_clearly(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/no-pr")
    with pytest.raises(HfHubHTTPError, match="no pull requests") as refusal:
        devhub_server.api().upload_file(path_or_fileobj=b"x", path_in_repo="a", repo_id="me/no-pr", create_pr=True)
    assert refusal.value.response.status_code == 501
    xet = devhub_server.get("/api/models/me/no-pr/xet-write-token/main")
    assert "HF_HUB_DISABLE_XET" in xet.headers["X-Error-Message"]


def test_hash_alone_gives_no_right_to_the_content(devhub_server: DevHub) -> None:
    """A stranger who knows a private file's sha256 can neither commit nor skip uploading it."""
    mine, yours = devhub_server.api(), devhub_server.api(YOU)
    mine.create_repo("me/secret", private=True)
    content = os.urandom(1000)
    mine.upload_file(path_or_fileobj=content, path_in_repo="s.bin", repo_id="me/secret")
    yours.create_repo("you/thief")
    sha256 = hashlib.sha256(content).hexdigest()
    auth = {"Authorization": f"Bearer {YOU}"}
    operation = {"key": "lfsFile", "value": {"path": "s.bin", "algo": "sha256", "oid": sha256, "size": 1000}}
    lines = '{"key":"header","value":{"summary":"x"}}\n' + json.dumps(operation)
    commit = devhub_server.http.post("/api/models/you/thief/commit/main", content=lines, headers=auth)
    assert commit.status_code == 400
    batch = devhub_server.http.post(
        "/you/thief.git/info/lfs/objects/batch",
        json={"operation": "upload", "transfers": ["basic"], "objects": [{"oid": sha256, "size": 1000}]},
        headers=auth,
    ).json()
    assert "upload" in batch["objects"][0]["actions"]


@pytest.mark.parametrize("body", [b"short", b"x" * 1000, b"x" * 2000], ids=["short", "wrong", "long"])
def test_upload_of_other_bytes_than_announced_is_refused(devhub_server: DevHub, body: bytes) -> None:
    repo = f"me/lies-{len(body)}"
    devhub_server.api().create_repo(repo)
    sha256 = hashlib.sha256(b"y" * 1000).hexdigest()
    batch = devhub_server.http.post(
        f"/{repo}.git/info/lfs/objects/batch",
        json={"operation": "upload", "transfers": ["basic"], "objects": [{"oid": sha256, "size": 1000}]},
        headers={"Authorization": f"Bearer {ME}"},
    ).json()
    href = batch["objects"][0]["actions"]["upload"]["href"]
    assert devhub_server.http.put(href, content=body).status_code == 400
    assert devhub_server.http.put(href, content=b"y" * 1000).status_code == 200
    assert devhub_server.http.put(href, content=b"y" * 1000).status_code == 200  # as after an answer that was lost
    assert devhub_server.http.put("/devhub/uploads/guessed", content=b"y").status_code == 404


def test_two_commits_at_once_both_arrive(devhub_server: DevHub) -> None:
    api = devhub_server.api()
    api.create_repo("me/race")
    futures = [
        api.run_as_future(
            devhub_server.api().upload_file, path_or_fileobj=b"x", path_in_repo=f"f{i}", repo_id="me/race"
        )
        for i in range(8)
    ]
    assert len({future.result().oid for future in futures}) == 8
    assert paths(devhub_server, "me/race") == [f"f{i}" for i in range(8)]


def test_title_that_no_file_can_hold_is_made_harmless(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/surrogate")
    answer = devhub_server.http.post(
        "/api/models/me/surrogate/commit/main",
        content=b'{"key":"header","value":{"summary":"half \\ud800"}}\n',
        headers={"Authorization": f"Bearer {ME}"},
    )
    assert answer.status_code == 200
    assert devhub_server.api().list_repo_commits("me/surrogate")[0].title == "half ?"


def test_commit_bodies_that_make_no_sense(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/nonsense")
    header = b'{"key":"header","value":{"summary":"x"}}\n'
    bodies = [
        b"",
        b"not json\n",
        b'{"key":"deletedFile","value":{"path":"a"}}\n' + header,
        header + b'{"key":"file","value":{"path":"a","content":"?","encoding":"base64"}}\n',
        header + b'{"key":"file","value":{"path":"../a","content":"aa"}}\n',
        header + b'{"key":"lfsFile","value":{"path":"a","oid":"../../x"}}\n',
        header + b'{"key":"surprise","value":{"path":"a"}}\n',
        header + b"[" * 100_000 + b"\n",
        header + b'{"key":"file","value":{"path":"\\ud800","content":"aa"}}\n',
    ]
    for body in bodies:
        answer = devhub_server.http.post(
            "/api/models/me/nonsense/commit/main",
            content=body,
            headers={"Authorization": f"Bearer {ME}"},
        )
        assert answer.status_code == 400, body[:80]
    assert paths(devhub_server, "me/nonsense") == []
