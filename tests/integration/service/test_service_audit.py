"""The audit log over HTTP: each tenant's acts, refusals included, and nobody else's; failed logins for the operator."""

import json

from service_harness import ALICE, BOB, Api, body
from sqlalchemy import select

from worker.schema import AuditRow


def test_acts_and_refusals_are_noted_for_their_tenant(service_api: Api) -> None:
    with service_api.client() as client, service_api.client(BOB) as stranger:
        job = client.post("/v1/jobs", json=body("alice/audited"), headers={"X-Request-Id": "audit-1"}).json()
        client.put(f"/v1/jobs/{job['id']}/webhook", json={"url": "https://127.0.0.1/"})
        client.post(f"/v1/jobs/{job['id']}/cancel")
        client.post(f"/v1/jobs/{job['id']}/retry")
        client.post("/v1/jobs", json=body("bob/mine"))
        stranger.post(f"/v1/jobs/{job['id']}/cancel")
        page = client.get("/v1/audit", params={"limit": 2}).json()
        rest = client.get("/v1/audit", params={"after": page["data"][-1]["id"]}).json()
        foreign = stranger.get("/v1/audit").json()["data"]
    entries = page["data"] + rest["data"]
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert [(e["action"], e["outcome"], e["job_id"] == job["id"]) for e in entries] == [
        ("submit", "target_forbidden", False),
        ("retry", "queued", True),
        ("cancel", "canceled", True),
        ("webhook", "config_invalid", True),
        ("submit", "queued", True),
    ]
    assert (entries[-1]["request_id"], entries[-1]["remote_address"]) == ("audit-1", "127.0.0.1")
    assert [(e["action"], e["outcome"]) for e in foreign] == [("cancel", "job_not_found")]
    lines = [json.loads(line) for line in service_api.log.read_text().splitlines()]
    told = [line for line in lines if line.get("request_id") == "audit-1" and "action" in line]
    assert [(line["action"], line["outcome"], line["address"]) for line in told] == [("submit", "queued", "127.0.0.1")]


def test_failed_logins_are_the_operator_s_to_read(service_api: Api) -> None:
    with service_api.client("hf_wrong_canary") as client:
        assert client.get("/v1/audit", headers={"X-Request-Id": "login-1"}).status_code == 401
    with service_api.store.database.read() as session:
        [row] = session.scalars(select(AuditRow).where(AuditRow.request_id == "login-1"))
        assert (row.tenant, row.action, row.outcome, row.address) == (None, "login", "token_invalid", "127.0.0.1")
    with service_api.client(ALICE) as client:
        assert "login" not in client.get("/v1/audit").text
    assert "wrong_canary" not in service_api.log.read_text()
