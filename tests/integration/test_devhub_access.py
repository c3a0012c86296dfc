"""Who may do what, and attempts to get further, with the real client and with raw requests."""

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from devhub_fixture import ME, ME_READING, YOU, DevHub, devhub_process, devhub_server, hub_client, quiet_client
from huggingface_hub.errors import (
    BadRequestError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
)

__all__ = ["devhub_process", "devhub_server", "hub_client"]
pytestmark = quiet_client


def refused(status: int) -> pytest.RaisesExc[HfHubHTTPError]:
    return pytest.RaisesExc(HfHubHTTPError, check=lambda error: error.response.status_code == status)


def test_whoami(devhub_server: DevHub) -> None:
    me = devhub_server.api().whoami()
    assert (me["type"], me["name"], [org["name"] for org in me["orgs"]]) == ("user", "me", ["acme"])
    assert me["auth"]["accessToken"]["role"] == "write"
    assert devhub_server.api(ME_READING).whoami()["auth"]["accessToken"]["role"] == "read"


def test_unknown_token_is_told_from_a_missing_repo(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/known")
    stranger = devhub_server.api("hf_nobody")
    with refused(401):
        stranger.whoami()
    with pytest.raises(HfHubHTTPError, match="Invalid credentials") as refusal:
        stranger.model_info("me/known")
    assert not isinstance(refusal.value, RepositoryNotFoundError)


def test_private_repo_is_missing_for_others(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/private", private=True)
    devhub_server.api().model_info("me/private")
    devhub_server.api(ME_READING).model_info("me/private")
    for token, status in ((YOU, 404), (False, 401)):
        api = devhub_server.api(token)
        for call in (api.model_info, api.list_repo_refs, api.auth_check, api.list_repo_files):
            with pytest.raises(RepositoryNotFoundError) as refusal:
                call("me/private")
            assert refusal.value.response.status_code == status
    seen = devhub_server.get("/api/models/me/private", token=None)
    missing = devhub_server.get("/api/models/me/private-not", token=None)
    assert (seen.status_code, seen.text) == (missing.status_code, missing.text)


def test_organisation_members_share(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("acme/shared", private=True)
    devhub_server.api().auth_check("acme/shared", write=True)
    with pytest.raises(RepositoryNotFoundError):
        devhub_server.api(YOU).model_info("acme/shared")
    with refused(403):
        devhub_server.api(YOU).create_repo("acme/mine-now")


def test_gated_repo_shows_its_listing_and_keeps_its_files(devhub_server: DevHub, tmp_path: Path) -> None:
    owner, you, nobody = devhub_server.api(), devhub_server.api(YOU), devhub_server.api(token=False)
    owner.create_repo("me/gated")
    owner.upload_file(path_or_fileobj=b"1", path_in_repo="a.txt", repo_id="me/gated")
    owner.update_repo_settings("me/gated", gated="manual")
    assert you.model_info("me/gated").gated == "manual"
    assert "a.txt" in you.list_repo_files("me/gated")
    for api, status in ((you, 403), (nobody, 401)):
        with pytest.raises(GatedRepoError) as refusal:
            api.hf_hub_download("me/gated", "a.txt", local_dir=tmp_path)
        assert refusal.value.response.status_code == status
        with pytest.raises(GatedRepoError):
            api.auth_check("me/gated")
    owner.hf_hub_download("me/gated", "a.txt", local_dir=tmp_path / "owner")
    owner.grant_access("me/gated", "you")
    you.auth_check("me/gated")
    you.hf_hub_download("me/gated", "a.txt", local_dir=tmp_path / "accepted")
    owner.update_repo_settings("me/gated", gated=False)
    nobody.hf_hub_download("me/gated", "a.txt", local_dir=tmp_path / "open")


def test_visibility_can_be_changed(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/visible", private=True)
    devhub_server.api().update_repo_settings("me/visible", private=False)
    devhub_server.api(token=False).model_info("me/visible")
    with refused(403):
        devhub_server.api(YOU).update_repo_settings("me/visible", private=True)


def test_reading_token_and_strangers_change_nothing(devhub_server: DevHub) -> None:
    owner = devhub_server.api()
    owner.create_repo("me/mine")
    for token, status in ((ME_READING, 403), (YOU, 403), (False, 401)):
        api = devhub_server.api(token)
        for change in (
            lambda api=api: api.upload_file(path_or_fileobj=b"x", path_in_repo="a", repo_id="me/mine"),
            lambda api=api: api.create_branch("me/mine", branch="b"),
            lambda api=api: api.create_tag("me/mine", tag="t"),
            lambda api=api: api.update_repo_settings("me/mine", private=True),
            lambda api=api: api.move_repo("me/mine", "me/elsewhere"),
            lambda api=api: api.delete_repo("me/mine"),
            lambda api=api: api.create_repo("me/new"),
            lambda api=api: api.auth_check("me/mine", write=True),
        ):
            with refused(status):
                change()
    refs = owner.list_repo_refs("me/mine")
    assert ([b.name for b in refs.branches], refs.tags) == (["main"], [])
    owner.auth_check("me/mine", write=True)
    assert not owner.repo_exists("me/new")


def test_raw_writes_without_a_right_to(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/raw-writes")
    lines = '{"key":"header","value":{"summary":"x"}}\n'
    for path in ("/api/models/me/raw-writes/commit/main", "/me/raw-writes.git/info/lfs/objects/batch"):
        answer = devhub_server.http.post(f"{path}", content=lines, headers={"Authorization": f"Bearer {YOU}"})
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "/me/here/resolve/main/../../../../users.json",
        "/me/here/resolve/main/..%2F..%2F..%2F..%2Fusers.json",
        "/me/here/resolve/main/%2e%2e/%2e%2e/users.json",
        "/me/here/resolve/main//etc/passwd",
        "/me/here/resolve/main/%2Fetc%2Fpasswd",
        "/me/here/resolve/..%2F..%2Fusers.json/x",
        "/me/here/resolve/%00/x",
        "/..%2F..%2Fusers/here/resolve/main/a",
        "/api/models/..%2F../x",
        "/api/models/me/..%2F..%2Fusers.json",
        "/api/models/me/here/tree/main/..%2F..",
        "/api/models/-/gpt",
        "/api/models/me/.here.tmp",
    ],
)
def test_no_path_leads_out_of_a_repo(devhub_server: DevHub, path: str) -> None:
    devhub_server.api().create_repo("me/here", exist_ok=True)
    address = urlsplit(devhub_server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("GET", path, headers={"Authorization": f"Bearer {ME}"})  # sends the path untouched
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status in (307, 400, 404)
    assert b"tokens" not in body
    assert b"root:" not in body


@pytest.mark.parametrize(
    "path", ["../x", "a/../x", "/abs", "a//b", ".git/config", "a\\b", "a\nb", "x" * 256, "", "a/."]
)
def test_no_file_is_committed_under_a_bad_path(devhub_server: DevHub, path: str) -> None:
    devhub_server.api().create_repo("me/bad-paths", exist_ok=True)
    operation = {"key": "file", "value": {"path": path, "content": "eA==", "encoding": "base64"}}
    body = '{"key":"header","value":{"summary":"x"}}\n' + json.dumps(operation)
    answer = devhub_server.http.post(
        "/api/models/me/bad-paths/commit/main",
        content=body,
        headers={"Authorization": f"Bearer {ME}"},
    )
    assert answer.status_code == 400
    assert devhub_server.api().list_repo_files("me/bad-paths") == [".gitattributes"]


def test_downloads_are_inert_in_a_browser(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/html")
    devhub_server.storage.commit("me/html", {"index.html": b"<script>alert(1)</script>"})
    answer = devhub_server.get("/me/html/resolve/main/index.html", token=None)
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "sandbox" in answer.headers["Content-Security-Policy"]


def test_no_token_is_kept_in_clear(devhub_server: DevHub) -> None:
    users = devhub_server.root / "users.json"
    assert users.stat().st_mode & 0o077 == 0
    log = json.dumps(devhub_server.log())
    for token in (ME, ME_READING, YOU):
        assert token not in users.read_text()
        assert token not in log


def test_user_added_while_running_counts_at_once(devhub_server: DevHub) -> None:
    devhub_server.storage.add_user("late", "hf_late", role="read")
    assert devhub_server.api("hf_late").whoami()["name"] == "late"


def test_unknown_routes_say_so(devhub_server: DevHub) -> None:
    answer = devhub_server.get("/api/collections")
    assert answer.status_code == 404
    assert "devhub does not serve this" in answer.json()["error"]
    assert devhub_server.get("/api/repos/create").status_code == 405


def test_error_kinds_reach_the_caller_of_hf_hub_download(devhub_server: DevHub) -> None:
    devhub_server.api().create_repo("me/kinds-of-errors")
    with pytest.raises(EntryNotFoundError):
        devhub_server.api().hf_hub_download("me/kinds-of-errors", "nope")
    with pytest.raises(BadRequestError):
        devhub_server.api().get_paths_info("me/kinds-of-errors", ["../x"])
