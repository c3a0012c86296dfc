"""What every answer of the real server has in common, and what its log never holds."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_harness import ALICE, BOB, Api, DevHub, body, command, config, environment, start_api, stop_api

from worker.leases import Leases


def test_security_headers_are_on_every_answer(service_api: Api) -> None:
    with service_api.client() as client:
        for path in ("/v1/jobs", "/nowhere", "/healthz", "/openapi.json"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"
            assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
            assert "server" not in headers
        assert client.get("/healthz", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"


def test_bodies_have_a_limit_chunked_or_not(service_api: Api) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * 1024

    kind = {"Content-Type": "application/json"}
    with service_api.client() as client:
        for content in (b" " * (64 * 1024 + 1), chunks()):
            answer = client.post("/v1/jobs", content=content, headers=kind)
            assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
        padded = json.dumps(body("alice/http-padded")).encode().ljust(64 * 1024)
        assert client.post("/v1/jobs", content=padded, headers=kind).status_code == 202


def test_the_document_lists_every_route_and_the_problems(service_api: Api) -> None:
    with service_api.client(None) as client:
        document = client.get("/openapi.json").json()
    routes = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert routes >= {
        ("post", "/v1/jobs"),
        ("get", "/v1/jobs"),
        ("get", "/v1/jobs/{job_id}"),
        ("post", "/v1/jobs/{job_id}/cancel"),
        ("post", "/v1/jobs/{job_id}/retry"),
        ("get", "/v1/jobs/{job_id}/events"),
        ("get", "/v1/jobs/{job_id}/report"),
        ("get", "/v1/jobs/{job_id}/report/{file}"),
        ("post", "/v1/preflight"),
        ("get", "/v1/support"),
        ("get", "/healthz"),
        ("get", "/readyz"),
    }
    for methods in document["paths"].values():
        for route in methods.values():
            assert "application/problem+json" in route["responses"]["4XX"]["content"]
            assert "422" not in route["responses"]
    assert document["paths"]["/v1/jobs"]["post"]["security"]


def test_the_support_matrix_is_open_to_all(service_api: Api) -> None:
    with service_api.client(None) as client:
        families = client.get("/v1/support").json()["families"]
    assert {"llama", "mamba"} <= {family["model_type"] for family in families}


def test_readiness_names_what_is_missing(service_api: Api, tmp_path: Path, service_hub: DevHub) -> None:
    with service_api.client(None) as client:
        answer = client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["checks"] == {"database": True, "broker": True, "worker": False}
        assert answer.json()["code"] == "not_ready"
        assert int(answer.headers["retry-after"]) > 0
        see_worker(service_api)
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def see_worker(api: Api) -> None:
    from worker.sweeper import seen

    seen(api.store, "test")


def test_without_a_broker_jobs_are_kept_all_the_same(tmp_path: Path, service_hub: DevHub) -> None:
    api = start_api(tmp_path, KVALIGN_HUB_ENDPOINT=service_hub.url, KVALIGN_REDIS_URL="redis://127.0.0.1:9/0")
    try:
        with api.client() as client:
            assert client.get("/readyz").json()["checks"]["broker"] is False
            answer = client.post("/v1/jobs", json=body("alice/http-no-broker"))
            assert answer.status_code == 202
            assert answer.elapsed.total_seconds() < 10
            assert client.get(answer.headers["location"]).json()["state"] == "queued"
    finally:
        stop_api(api)


def test_reports_are_served_as_data(service_api: Api) -> None:
    job = service_api.store.submit("alice", config("alice/http-report"), source_commit="0" * 40, token="none").job
    leases = Leases(service_api.store, lease_s=60, running_limit=99)
    lease = next(lease for lease in iter(lambda: leases.claim("test"), None) if lease.job.id == job.id)
    with service_api.client() as client:
        path = f"/v1/jobs/{job.id}/report"
        assert client.get(path).json()["code"] == "report_not_found"
        lease.save_report_file("report.json", b'{"gate": {"passed": true}}')
        lease.save_report_file("README.md", b"<script>alert(1)</script>")
        lease.save_report_file("figures/rate.png", b"\x89PNG")
        lease.save_report_file("figures/rate.svg", b"<svg/>")
        assert client.get(path).json() == {"gate": {"passed": True}}
        kinds = {
            name: client.get(f"{path}/{name}").headers["content-type"].partition(";")[0]
            for name in ("report.json", "README.md", "figures/rate.png", "figures/rate.svg")
        }
        assert list(kinds.values()) == ["application/json", "text/markdown", "image/png", "application/octet-stream"]
        assert client.get(f"{path}/README.md").headers["content-security-policy"] == "sandbox"
        for name in ("nothing.txt", "../secret.key", "%2e%2e%2fsecret.key", "a%00b"):
            answer = client.get(f"{path}/{name}")
            assert answer.status_code == 404, name
    lease.cancel()


def test_preflight_gives_every_check_with_its_reason(service_api: Api) -> None:
    with service_api.client() as client:
        good = client.post("/v1/preflight", json=body("alice/http-preflight"))
        assert good.status_code == 200, good.text
        assert good.json()["ok"]
        assert all(check["ok"] and check["reason"] for check in good.json()["checks"])
        assert len(good.json()["source"]["commit"]) == 40
        assert good.json()["estimate"]["download_bytes"] > 0
        bad = client.post("/v1/preflight", json=body("bob/mine", "carol/recurrent")).json()
        assert not bad["ok"]
        failing = {check["code"] for check in bad["checks"] if not check["ok"]}
        assert failing >= {"source_unsupported", "target_forbidden"}
        assert all(check["remedy"] for check in bad["checks"] if not check["ok"])
        assert client.post("/v1/preflight", json={}).json()["code"] == "config_invalid"


def test_no_token_is_logged_or_stored_readably(service_api: Api) -> None:
    with service_api.client() as client:
        client.get(f"/v1/jobs?label={ALICE}")
        client.get("/nowhere", headers={"Authorization": f"Bearer {BOB}"})
        client.post("/v1/jobs", json=body("alice/http-canary"), headers={"X-Request-Id": "canary-request"})
    lines = service_api.log.read_text().splitlines()
    assert any("canary-request" in line for line in lines)
    kept = b"".join(file.read_bytes() for file in service_api.log.parent.rglob("kvalign.db*"))
    for token in (ALICE, BOB):
        assert token not in service_api.log.read_text()
        assert token.encode() not in kept
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    mine = [record for record in records if record.get("request_id") == "canary-request"]
    assert any(record.get("job_id", "").startswith("job_") for record in mine)
    access = [record for record in mine if record["logger"] == "service.access"]
    assert [(record["status"], record["tenant"], record["path"]) for record in access] == [(202, "alice", "/v1/jobs")]


def test_the_api_loads_no_tensor_library() -> None:
    code = "import sys, service.app; print(sorted({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "KVALIGN_SECRET_KEY"),
        ({"KVALIGN_SECRET_KEY": "short-secret"}, "KVALIGN_SECRET_KEY"),
        ({"KVALIGN_PORT": "0"}, "--port"),
    ],
)
def test_a_bad_setting_stops_the_start(tmp_path: Path, settings: dict[str, str], word: str) -> None:
    done = subprocess.run(
        command("service.cli:api"),
        env=environment(KVALIGN_DATA_DIR=str(tmp_path), **settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert word in done.stderr
    assert "short-secret" not in done.stderr
    assert "Traceback" not in done.stderr
