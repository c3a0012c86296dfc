"""Webhooks: a real receiver on the loopback, real databases, a real API process; and where they must not go."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from service_harness import ALICE, BOB, Api, DevHub, body, start_api, stop_api
from sqlalchemy import update
from standardwebhooks.webhooks import Webhook as Verifier
from webhook_receiver import Receiver, running_receiver
from worker_harness import claim, submit, wait_for

from service.webhooks.address import Endpoint, WebhookRefused, resolve_endpoint, system_resolver
from service.webhooks.post import Poster
from service.webhooks.sender import Sender
from worker.jobs import ErrorCode, JobError
from worker.outbox import Outbox, Outcome
from worker.schema import DeliveryRow, WebhookSecretRow
from worker.store import JobStore

SECRET = "whsec_" + "c2VjcmV0IG9mIHRoZSB3ZWJob29rIHRlc3Rz"
BAD_PATHS = {
    "/broken": (500, "answered 500"),
    "/redirect": (307, "redirects"),
    "/hang": (None, "too long"),
    "/drip": (None, "too long"),
    "/garbage": (None, "not answer in HTTP"),
}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@contextmanager
def sending(store: JobStore, **options: Any) -> Iterator[None]:
    settings = {"allow_private": True, "poll_s": 0.05, "pauses_s": [0.01, 0.01], **options}
    sender = Sender(Outbox(store.database, store.cipher), Poster(whole_s=1.0), **settings)
    sender.start()
    try:
        yield
    finally:
        sender.stop()


def canceled_job(store: JobStore, url: str, name: str = "out", tenant: str = "alice", **webhook: Any) -> str:
    """A job with a webhook that has ended: by default one message waits."""
    job = submit(store, name, tenant, webhook={"url": url, "secret": SECRET, **webhook})
    store.request_cancel(job.id, tenant=tenant)
    return job.id


def ended(store: JobStore, job_id: str, tenant: str = "alice") -> Callable[[], bool]:
    return lambda: all(one.state != "pending" for one in store.deliveries(job_id, tenant=tenant))


def test_states_are_told_signed_and_again_after_a_failure(store: JobStore) -> None:
    events = ["job.queued", "job.running", "job.failed"]
    with running_receiver() as receiver, sending(store):
        job = submit(
            store, labels={"team": "blue"}, webhook={"url": f"{receiver.url}/flaky", "secret": SECRET, "events": events}
        )
        wait_for(ended(store, job.id))
        claim(store).fail(JobError(ErrorCode.TIMEOUT, "It took too long.", "Wait."))
        wait_for(ended(store, job.id))
    told = [Verifier(SECRET).verify(content, headers) for headers, content in receiver.at("/flaky")]
    kinds = [message["type"] for message in told]
    assert (kinds[:2], sorted(kinds[2:])) == (["job.queued"] * 2, ["job.failed", "job.running"])
    assert told[0] == told[1]
    assert len({headers["webhook-id"] for headers, _ in receiver.at("/flaky")}) == 3
    [failed] = [message["data"] for message in told if message["type"] == "job.failed"]
    assert (failed["id"], failed["labels"], failed["error"]["code"]) == (job.id, {"team": "blue"}, "timeout")
    log = {one.type: one for one in store.deliveries(job.id, tenant="alice")}
    assert [entry["status"] for entry in log["job.queued"].log] == [500, 200]
    assert {one.state for one in log.values()} == {"delivered"}
    forged = dict(receiver.at("/flaky")[0][0]) | {"webhook-id": "msg_other"}
    with pytest.raises(Exception, match="signature"):
        Verifier(SECRET).verify(receiver.at("/flaky")[0][1], forged)


def test_receivers_that_misbehave_are_given_up_in_bounded_time(store: JobStore, receiver: Receiver) -> None:
    """Each for a tenant of its own: one that hangs must not hold up the others."""
    jobs = {
        path: canceled_job(store, receiver.url + path, path[1:], path[1:]) for path in (*BAD_PATHS, "/endless", "/gone")
    }
    before = len(receiver.at("/ok"))
    with sending(store):
        for path, job_id in jobs.items():
            wait_for(ended(store, job_id, path[1:]))
    for path, (status, word) in BAD_PATHS.items():
        [delivery] = store.deliveries(jobs[path], tenant=path[1:])
        assert (delivery.state, delivery.next_at) == ("failed", None)
        assert [(entry["attempt"], entry["status"]) for entry in delivery.log] == [(n, status) for n in (1, 2, 3)]
        assert word in delivery.log[0]["error"]
    [endless] = store.deliveries(jobs["/endless"], tenant="endless")
    assert (endless.state, endless.log[0]["status"]) == ("delivered", 200)
    [gone] = store.deliveries(jobs["/gone"], tenant="gone")
    assert (gone.state, len(gone.log)) == ("failed", 1)
    assert len(receiver.at("/ok")) == before, "a redirect was followed"


def test_several_senders_send_each_message_once(store: JobStore) -> None:
    with running_receiver() as receiver:
        jobs = [canceled_job(store, f"{receiver.url}/ok", f"n{n}", f"t{n % 5}") for n in range(20)]
        with sending(store), sending(store), sending(store):
            for number, job_id in enumerate(jobs):
                wait_for(ended(store, job_id, f"t{number % 5}"))
        ids = [headers["webhook-id"] for headers, _ in receiver.at("/ok")]
    assert len(ids) == len(set(ids)) == 20


def test_one_tenant_s_backlog_does_not_hold_up_another(store: JobStore) -> None:
    for number in range(12):
        canceled_job(store, "http://127.0.0.1:9/", f"m{number}")
    late = canceled_job(store, "http://127.0.0.1:9/", tenant="bob")
    outbox = Outbox(store.database, store.cipher)
    taken = outbox.take(8, per_tenant=2)
    assert sorted(one.tenant for one in taken) == ["alice", "alice", "bob"]
    assert late in {one.job_id for one in taken}
    assert outbox.take(8, per_tenant=2, busy=["alice", "bob"]) == []


def test_a_sender_that_died_is_followed_by_another_and_may_no_longer_settle(store: JobStore) -> None:
    job_id = canceled_job(store, "http://127.0.0.1:9/")
    outbox = Outbox(store.database, store.cipher)
    [lost] = outbox.take(8, per_tenant=2)
    assert outbox.take(8, per_tenant=2) == []
    past = datetime.now(UTC) - timedelta(seconds=1)
    with store.database.write() as session:
        session.execute(update(DeliveryRow).values(next_at=past))
    [taken] = outbox.take(8, per_tenant=2)
    assert (lost.attempt, taken.attempt, lost.id) == (1, 2, taken.id)
    outbox.settle(lost, Outcome(200), [1, 1])
    assert store.deliveries(job_id, tenant="alice")[0].state == "pending"
    outbox.settle(taken, Outcome(200), [1, 1])
    [delivery] = store.deliveries(job_id, tenant="alice")
    assert (delivery.state, [entry["attempt"] for entry in delivery.log]) == ("delivered", [2])


def test_secrets_are_stored_encrypted_and_a_removed_webhook_ends_what_waits(
    store: JobStore, receiver: Receiver
) -> None:
    job_id = canceled_job(store, f"{receiver.url}/removed")
    with store.database.read() as session:
        assert SECRET not in session.get_one(WebhookSecretRow, job_id).ciphertext
    [taken] = Outbox(store.database, store.cipher).take(1, per_tenant=1)
    assert taken.secret == SECRET
    assert SECRET not in repr(taken)
    job, _ = store.set_webhook(job_id, None, tenant="alice")
    assert job.config.webhook is None
    with store.database.write() as session:
        session.execute(update(DeliveryRow).values(next_at=datetime.now(UTC)))
        assert session.get(WebhookSecretRow, job_id) is None
    with sending(store):
        wait_for(ended(store, job_id))
    assert receiver.at("/removed") == []


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "127.1.2.3",
            "10.0.0.1",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
        ),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1"),
        *("fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "fec0::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::7f00:1"),
        *(
            "64:ff9b::7f00:1",
            "64:ff9b::808:808",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001:0:1::1",
            "2001:db8::1",
            "nonsense",
        ),
    ],
)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    def resolve(host: str, port: int) -> list[str]:
        return ["93.184.215.14", address]

    with pytest.raises(WebhookRefused, match="not on the public Internet") as refusal:
        resolve_endpoint("https://hooks.test/", allow_private=False, resolve=resolve)
    assert address not in refusal.value.message
    assert refusal.value.remedy


@pytest.mark.parametrize("host", ["2130706433", "0x7f.1", "127.1", "localhost", "[::1]", "[::ffff:127.0.0.1]"])
def test_other_spellings_of_this_machine_are_refused(host: str) -> None:
    with pytest.raises(WebhookRefused):
        resolve_endpoint(f"https://{host}/", allow_private=False, resolve=system_resolver)


def test_a_name_that_changes_its_address_leads_nowhere(store: JobStore, receiver: Receiver) -> None:
    """DNS rebinding: public when it is checked, private when it is sent."""
    answers = [["93.184.215.14"], ["127.0.0.1"], ["93.184.215.14", "127.0.0.1"], ["::ffff:127.0.0.1"]]
    url = f"https://rebinding.test:{receiver.port}/rebound"
    resolve_endpoint(url, allow_private=False, resolve=lambda *_: answers.pop(0))
    job_id = canceled_job(store, url)
    with sending(store, allow_private=False, resolve=lambda *_: answers.pop(0)):
        wait_for(ended(store, job_id))
    [delivery] = store.deliveries(job_id, tenant="alice")
    assert [entry["status"] for entry in delivery.log] == [None] * 3
    assert all(entry["error"].endswith("not on the public Internet.") for entry in delivery.log)
    assert (answers, receiver.at("/rebound")) == ([], [])


def test_tls_is_verified_for_the_name_although_the_address_was_looked_up(tmp_path: Path) -> None:
    at = datetime.now(UTC)
    with running_receiver(_server_tls(tmp_path, "hooks.test")) as receiver:
        trusting = Poster(ssl.create_default_context(cafile=str(tmp_path / "cert.pem")))

        def post(poster: Poster, host: str) -> Outcome:
            endpoint = Endpoint(f"https://{host}:{receiver.port}/tls", host, receiver.port, ("127.0.0.1",))
            return poster.post(endpoint, SECRET, "msg_1", at, "{}")

        assert post(trusting, "hooks.test") == Outcome(204)
        assert receiver.at("/tls")[0][0]["host"] == f"hooks.test:{receiver.port}"
        for refused in (post(trusting, "other.test"), post(Poster(), "hooks.test")):
            assert refused.status is None
            assert "certificate" in refused.error
        assert len(receiver.at("/tls")) == 1


def test_an_unreachable_address_is_followed_by_the_next(receiver: Receiver) -> None:
    def post(*addresses: str) -> Outcome:
        endpoint = Endpoint(f"{receiver.url}/next", "127.0.0.1", receiver.port, addresses)
        return Poster().post(endpoint, SECRET, "msg_1", datetime.now(UTC), "{}")

    assert post("127.0.0.2", "127.0.0.1").status in {204, None}
    assert (
        "could not be reached"
        in Poster()
        .post(Endpoint("http://127.0.0.1:9/", "127.0.0.1", 9, ("127.0.0.1",)), SECRET, "msg_1", datetime.now(UTC), "{}")
        .error
    )


def test_over_http_a_webhook_is_checked_told_changed_and_read(
    tmp_path: Path, service_hub: DevHub, service_redis: str, receiver: Receiver
) -> None:
    settings = {"KVALIGN_HUB_ENDPOINT": service_hub.url, "KVALIGN_REDIS_URL": service_redis}
    api = start_api(tmp_path, **settings, KVALIGN_WEBHOOK_ALLOW_PRIVATE="true", KVALIGN_WEBHOOK_POLL_S="0.1")
    try:
        _over_http(api, receiver)
    finally:
        stop_api(api)


def _over_http(api: Api, receiver: Receiver) -> None:
    with api.client() as client, api.client(BOB) as stranger:
        answer = client.post("/v1/jobs", json=body("alice/hooked", webhook={"url": f"{receiver.url}/over-http"}))
        assert answer.status_code == 202, answer.text
        job, secret = answer.json(), answer.json()["webhook_secret"]
        assert job["config"]["webhook"]["url"] == f"{receiver.url}/over-http"
        repeat = client.post("/v1/jobs", json=body("alice/hooked", webhook={"url": f"{receiver.url}/other"}))
        assert (repeat.status_code, repeat.json()["webhook_secret"]) == (200, None)
        client.post(f"/v1/jobs/{job['id']}/cancel")
        [(headers, content)] = wait_for(lambda: receiver.at("/over-http"))
        assert Verifier(secret).verify(content, headers)["data"]["state"] == "canceled"
        deliveries = job["links"]["deliveries"]
        [delivery] = wait_for(lambda: [d for d in client.get(deliveries).json()["data"] if d["state"] != "pending"])
        assert (delivery["type"], delivery["id"]) == ("job.canceled", headers["webhook-id"])
        assert [attempt["status"] for attempt in delivery["attempts"]] == [204]

        path = f"/v1/jobs/{job['id']}/webhook"
        changed = client.put(path, json={"url": f"{receiver.url}/changed", "events": ["job.queued"]})
        assert changed.json()["secret"] != secret
        client.post(f"/v1/jobs/{job['id']}/retry")
        [(headers, content)] = wait_for(lambda: receiver.at("/changed"))
        assert Verifier(changed.json()["secret"]).verify(content, headers)["type"] == "job.queued"
        assert client.put(path, json={"url": f"{receiver.url}/x", "secret": SECRET}).json()["secret"] is None
        assert client.put(path, json={"url": "https://user@example.org"}).status_code == 422
        assert client.delete(path).status_code == 204
        assert client.get(f"/v1/jobs/{job['id']}").json()["config"]["webhook"] is None
        wait_for(lambda: all(d["state"] == "delivered" for d in client.get(deliveries).json()["data"]))
        first = client.get(deliveries, params={"limit": 1}).json()
        rest = client.get(deliveries, params={"after": first["data"][0]["sequence"]}).json()
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert [d["type"] for d in first["data"] + rest["data"]] == ["job.queued", "job.canceled"]
        for answer in (stranger.get(deliveries), stranger.put(path, json={"url": receiver.url}), stranger.delete(path)):
            assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
        kept = (
            api.log.read_text() + json.dumps(client.get(deliveries).json()) + client.get(f"/v1/jobs/{job['id']}").text
        )
    stored = b"".join(file.read_bytes() for file in api.log.parent.rglob("kvalign.db*"))
    for word in (secret, changed.json()["secret"], SECRET, ALICE):
        assert word not in kept
        assert word.encode() not in stored


def _server_tls(folder: Path, name: str) -> ssl.SSLContext:
    """A certificate of its own issuing, for one name and an address that must not matter."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvalign tests")])
    names = x509.SubjectAlternativeName([x509.DNSName(name), x509.IPAddress(ip_address("192.0.2.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    kind = serialization.PrivateFormat.PKCS8
    (folder / "key.pem").write_bytes(key.private_bytes(pem, kind, serialization.NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
