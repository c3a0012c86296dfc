"""The pages a person sees who follows a repo's URL."""

import base64

from devhub_fixture import ME, YOU, DevHub, devhub_process, devhub_server, hub_client

__all__ = ["devhub_process", "devhub_server", "hub_client"]


def basic(token: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anyone:{token}".encode()).decode()}


def test_page_shows_files_and_card_and_runs_nothing_of_them(devhub_server: DevHub) -> None:
    devhub_server.storage.create_repo("me/seen")
    commit = devhub_server.storage.commit("me/seen", {"README.md": b"<script>alert(1)</script>", "a&b c.txt": b"12"})
    for path in ("/me/seen", "/me/seen/tree/main", f"/me/seen/commit/{commit.oid}"):
        page = devhub_server.http.get(path)
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert "<script>" not in page.text
        assert "&lt;script&gt;" in page.text
        assert f'href="/me/seen/resolve/{commit.oid}/a%26b%20c.txt"' in page.text
    assert devhub_server.http.get(f"/me/seen/resolve/{commit.oid}/a%26b%20c.txt").text == "12"


def test_private_page_asks_for_a_token(devhub_server: DevHub) -> None:
    devhub_server.storage.create_repo("me/hidden", private=True)
    asked = devhub_server.http.get("/me/hidden")
    assert (asked.status_code, asked.headers["WWW-Authenticate"]) == (401, 'Basic realm="devhub"')
    assert devhub_server.http.get("/me/hidden", headers=basic(ME)).status_code == 200
    assert devhub_server.http.get("/me/hidden", headers=basic(YOU)).status_code == 404
    assert devhub_server.http.get("/me/hidden", headers={"Authorization": "Basic !"}).status_code == 401


def test_index_lists_what_the_visitor_may_see(devhub_server: DevHub) -> None:
    devhub_server.storage.create_repo("me/index-public", kind="datasets")
    devhub_server.storage.create_repo("me/index-private", private=True)
    assert 'href="/datasets/me/index-public"' in devhub_server.http.get("/").text
    assert "index-private" not in devhub_server.http.get("/").text
    assert "index-private" in devhub_server.http.get("/", headers=basic(ME)).text


def test_browser_password_changes_nothing(devhub_server: DevHub) -> None:
    answer = devhub_server.http.post("/api/repos/create", json={"name": "by-browser"}, headers=basic(ME))
    assert answer.status_code == 401
