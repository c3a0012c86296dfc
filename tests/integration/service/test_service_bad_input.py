"""Nonsense on every route: each answer is a problem with its code and remedy, and the API goes on. And foreign ids:
every route of the document that names a job is asked for somebody else's, so that a new one cannot be forgotten.
"""

import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from service_harness import ALICE, BOB, Api, body, config

OPEN = {("get", "/healthz"), ("get", "/readyz"), ("get", "/metrics"), ("get", "/v1/support")}
TRICKS = [
    "../x",
    "a/../b",
    "a//b",
    "/a",
    "a/b/c",
    "a\\b",
    "a/b%2f..",
    "a/b.git",
    "a/b\0",
    "a/ b",
    "ａ/b",
    "a/b?x",
    "a/b#x",
    "a/b\n",
]
TRICKS += [
    "",
    " ",
    "a/-b",
    "a/b-",
    "a/b--c",
    "a/" + "b" * 97,
    "https://hub/a/b",
    "a/b@main",
    "\u202ea/b",
    "a/\U0001f600",
]
REVISIONS = ["../../etc", "/etc/passwd", "a\0", "a b", "", "a?b", "a#b", "x" * 129, "..", "ﬀ"]
HUGE = "9" * 5000


@pytest.fixture(scope="module")
def client(service_api: Api) -> Iterator[httpx.Client]:
    with service_api.client() as client:
        yield client


@pytest.fixture(autouse=True)
def the_api_goes_on(service_api: Api) -> Iterator[None]:
    yield
    log = service_api.log.read_text()
    assert "unhandled error" not in log
    assert "Traceback" not in log
    assert httpx.get(f"{service_api.url}/healthz", trust_env=False).is_success


def check_problem(answer: httpx.Response, *statuses: int) -> dict[str, Any]:
    assert answer.status_code in (statuses or range(400, 500)), (answer.status_code, answer.text[:500])
    assert answer.headers["content-type"] == "application/problem+json", answer.text[:500]
    problem: dict[str, Any] = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["code"]
    assert problem["detail"]
    assert problem["remedy"]
    return problem


def send(client: httpx.Client, content: Any, path: str = "/v1/jobs", **headers: str) -> httpx.Response:
    kind = {"Content-Type": "application/json", **headers}
    encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
    return client.post(path, content=encoded, headers=kind)


def operations(api: Api) -> list[tuple[str, str, dict[str, Any]]]:
    document = httpx.get(f"{api.url}/openapi.json", trust_env=False).json()
    return [(m, path, route) for path, methods in document["paths"].items() for m, route in methods.items()]


def test_every_route_is_behind_a_token_or_known_to_be_open(service_api: Api) -> None:
    with service_api.client(None) as nobody, service_api.client("hf_no_such_token") as stranger:
        for method, path, route in operations(service_api):
            if (method, path) in OPEN:
                assert [one for one in route.get("security", [{}]) if not one] == [{}], path
                continue
            assert route["security"], path
            url = path.replace("{job_id}", "job_x").replace("{file}", "report.json")
            assert check_problem(nobody.request(method, url), 401)["code"] == "token_missing", path
            assert check_problem(stranger.request(method, url), 401)["code"] == "token_invalid", path


def test_a_foreign_job_is_not_there_on_any_route(service_api: Api, client: httpx.Client) -> None:
    webhook = {"url": "https://example.org/hook"}
    job = service_api.store.submit("alice", config("alice/isolated"), source_commit="0" * 40, token="none").job
    asked = 0
    with service_api.client(BOB) as stranger:
        for method, path, _ in sorted(operations(service_api), key=lambda operation: "{job_id}" in operation[1]):
            if "{job_id}" in path:
                url = path.replace("{job_id}", job.id).replace("{file}", "report.json")
                answer = stranger.request(method, url, json=webhook if method == "put" else None)
                assert check_problem(answer, 404)["code"] == "job_not_found", (method, path)
                asked += 1
            elif method == "get":
                assert job.id not in stranger.get(path).text, path
        assert asked >= 9
        entries = stranger.get("/v1/audit").json()["data"]
    assert {(entry["action"], entry["outcome"]) for entry in entries} >= {("cancel", "job_not_found")}
    assert client.get(f"/v1/jobs/{job.id}").json()["state"] == "queued"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/preflight"])
def test_bodies_that_are_no_conversion(client: httpx.Client, path: str) -> None:
    good = json.dumps(body("alice/nonsense"))
    for content in (
        *(b"", b"{", b"[" * 30_000, b'{"a":' * 9_000, b"\xff\xfe", b"\x00", b'"\xed\xa0\x80"'),
        *(
            b"null",
            b"true",
            b"[]",
            b'"text"',
            b"1",
            b"NaN",
            good.replace("{", '{"codec": {"max_kl": NaN}, ', 1).encode(),
        ),
        good.replace("{", f'{{"calibration": {{"tokens": {HUGE}}}, ', 1).encode(),
        good.replace("{", '{"labels": {"a": "\\ud800"}, ', 1).encode(),
        good.replace("{", '{"\\udfff": 1, ', 1).encode(),
    ):
        check_problem(send(client, content, path), 400, 422)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a", ""):
        answer = send(client, good.encode(), path, **{"Content-Type": kind})
        assert check_problem(answer, 415)["code"] == "content_type_unsupported", kind


def test_settings_of_the_wrong_kind_are_named(client: httpx.Client) -> None:
    wrong: list[dict[str, Any]] = [
        *({"source": value} for value in (None, 1, [], "carol/tiny", {}, {"repo": 1}, {"repo": ["a"]}, {"repo": None})),
        *(
            {"codec": value}
            for value in ({"max_kl": "much"}, {"max_kl": -1}, {"ratio": 1e400}, {"sink_tokens": 10**30})
        ),
        *({"calibration": {"tokens": value}} for value in (0, -1, 2**63, 10**100, 1.5, "1e9", True, [1], {})),
        *({"labels": value} for value in ([], {"a": 1}, {"a": None}, {"": "b"}, {"a\0": "b"}, {"a": "\u2028"})),
        *({"webhook": value} for value in ("https://example.org", [], {}, {"url": None}, {"url": "x", "more": 1})),
        *(
            {key: 1}
            for key in ("surprise", "__proto__", "constructor", "tenant", "token", "hub_endpoint", "Source", "")
        ),
    ]
    for more in wrong:
        problem = check_problem(send(client, {**body("alice/wrong"), **more}), 422)
        assert problem["code"] == "config_invalid", more
        assert str(next(iter(more)))[:10] in problem["detail"], (more, problem["detail"])


def test_names_and_revisions_with_tricks_are_refused(client: httpx.Client) -> None:
    for trick in TRICKS:
        for more in ({"source": {"repo": trick}}, {"target": {"repo": trick}}):
            problem = check_problem(send(client, {**body("alice/tricked"), **more}), 422)
            assert problem["code"] == "config_invalid", trick
    for revision in REVISIONS:
        source = {"repo": "carol/tiny", "revision": revision}
        assert check_problem(send(client, {**body("alice/tricked"), "source": source}), 422)["code"] == "config_invalid"
    for revision in ("refs/pr/1", "feature/x/y", "v1.0+build"):  # such a one can be
        source = {"repo": "carol/tiny", "revision": revision}
        problem = check_problem(send(client, {**body("alice/tricked"), "source": source}), 422)
        assert problem["code"] == "source_not_found"


def test_a_body_of_ten_megabytes_is_not_read_to_its_end(client: httpx.Client, service_api: Api) -> None:
    for path in ("/v1/jobs", "/v1/preflight", "/v1/jobs/job_x/webhook", "/v1/jobs/job_x/cancel", "/nowhere"):
        method = "PUT" if path.endswith("webhook") else "POST"
        answer = client.request(method, path, content=b" " * 10_000_000, headers={"Content-Type": "application/json"})
        assert check_problem(answer, 413)["code"] == "body_too_large", path
    host, port = service_api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n"
            "Content-Length: 10000000000000\r\n\r\n".encode()
        )
        assert b"413" in raw.recv(4096)


def test_numbers_and_words_in_queries_and_headers(client: httpx.Client) -> None:
    job = client.post("/v1/jobs", json=body("alice/numbers")).json()["id"]
    for value in (
        "-1",
        "0x10",
        "1e3",
        "1.5",
        "",
        " ",
        str(2**63),
        HUGE,
        "NaN",
        "%00",
        "%ff",
        "%ed%a0%80",
        "null",
        "[]",
    ):
        for path in ("/v1/jobs?limit=", "/v1/audit?limit=", "/v1/audit?after=", f"/v1/jobs/{job}/deliveries?after="):
            check_problem(client.get(path + value), 422)
        check_problem(client.get(f"/v1/jobs/{job}/events?limit={value}", headers={"Accept": "application/json"}), 422)
        check_problem(client.get(f"/v1/jobs?state={value}"), 422)
        sent = value.replace("%00", "\x01").replace("%ff", "\xff").replace("%ed%a0%80", "½")
        sent = sent.strip() or "x"
        for header in ("Last-Event-ID", "Accept"):
            answer = client.get(f"/v1/jobs/{job}/events", headers={header: sent.encode("latin-1")})
            if "\x01" in sent:
                assert answer.status_code == 400  # no HTTP: the server's parser answers, in plain text
            else:
                check_problem(answer, 400, 406, 422)
    for key in (b"a b", b"x" * 201, b"\xff\xfe", "ключ".encode()):
        check_problem(client.post("/v1/jobs", json=body("alice/keys"), headers={"Idempotency-Key": key}), 422)
    for identifier in (b"x" * 129, b"\xff", b"a b", b"<script>"):
        answer = client.get("/v1/jobs", headers={"X-Request-Id": identifier})
        assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    for token in (b"\xff", "tök".encode(), b"a b", b"x" * 5000, b","):
        check_problem(client.get("/v1/jobs", headers={"Authorization": b"Bearer " + token}), 401)


def test_job_ids_and_paths_with_tricks(client: httpx.Client) -> None:
    for job_id in (
        "x",
        "job_" + "0" * 26,
        "j" * 10_000,
        "%00",
        "%ff",
        "%2e%2e",
        "..%2f..%2fetc",
        "job_x%0a",
        "JOB_X",
        "ｊob",
        "'--",
    ):
        for path in (
            "",
            "/events",
            "/deliveries",
            "/report",
            "/report/..%2f..%2fkvalign.db",
            "/report/%00",
            "/report/%ff",
        ):
            check_problem(client.get(f"/v1/jobs/{job_id}{path}"), 404)
        for path in ("/cancel", "/retry"):
            check_problem(client.post(f"/v1/jobs/{job_id}{path}"), 404)
    for path in ("/v1//jobs", "/v1/jobs/", "/v1", "/%", "/v1/jobs/x/unknown", "/favicon.ico", "/docs"):
        check_problem(client.get(path), 404)
    for method, path in (
        ("DELETE", "/v1/jobs"),
        ("PATCH", "/v1/jobs/x"),
        ("TRACE", "/healthz"),
        ("PROPFIND", "/v1/audit"),
    ):
        answer = client.request(method, path)
        check_problem(answer, 405)
        assert "GET" in answer.headers["allow"]


def test_a_replayed_key_with_another_body_is_refused(client: httpx.Client) -> None:
    key = {"Idempotency-Key": "bad-input-1"}
    first = client.post("/v1/jobs", json=body("alice/replayed"), headers=key)
    assert first.status_code == 202
    for more in ({"labels": {"a": "b"}}, {"codec": {"max_kl": 0.5}}, {"target": {"repo": "alice/other"}}):
        answer = client.post("/v1/jobs", json={**body("alice/replayed"), **more}, headers=key)
        assert check_problem(answer, 422)["code"] == "idempotency_conflict"
    again = client.post("/v1/jobs", json=body("alice/replayed"), headers=key)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
