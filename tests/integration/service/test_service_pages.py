"""The web page over HTTP, without a browser and without its script: a real API process, devhub and store."""

import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx_sse import connect_sse
from service_harness import ALICE, BOB, ROOT, Api, config, start_api, stop_api

from kvalign.errors import TimeLimit
from service.pages.session import Sessions
from worker.jobs import Job, JobError, JobResult, Progress, Stage
from worker.leases import Lease, Leases

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
SAMPLE = json.loads((ROOT / "docs" / "sample-card" / "report.json").read_text())
PNG = b"\x89PNG"

_numbers = itertools.count()


@pytest.fixture
def alice(service_api: Api) -> Iterator[httpx.Client]:
    with signed_in(service_api, ALICE) as client:
        yield client


@contextmanager
def signed_in(api: Api, token: str) -> Iterator[httpx.Client]:
    with visitor(api) as client:
        answer = client.post("/login", data={"token": token})
        assert answer.status_code == 303, answer.text
        yield client


def visitor(api: Api) -> httpx.Client:
    """As a browser that opened our own page."""
    return api.client(None, Origin=api.url, **BROWSER)


def new_job(api: Api, tenant: str = "alice", **more: Any) -> Job:
    made = config(f"{tenant}/pages-{next(_numbers)}", **more)
    return api.store.submit(tenant, made, source_commit="0" * 40, token="none").job


def claim(api: Api, job: Job) -> Lease:
    leases = Leases(api.store, lease_s=60, running_limit=99)
    return next(lease for lease in iter(lambda: leases.claim("test"), None) if lease.job.id == job.id)


def text_of(answer: httpx.Response) -> str:
    """The words of a page, as a person reads them."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", answer.text)).split())


def fields_of(answer: httpx.Response) -> dict[str, str]:
    """Name to value of the inputs of a page."""
    found = {}
    for tag in re.findall(r"<input [^>]*>", answer.text):
        told = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        found[told["name"]] = unescape(told.get("value", ""))
    return found


def page_routes(job_id: str) -> list[tuple[str, str]]:
    return [
        ("GET", f"/jobs/{job_id}"),
        ("GET", f"/jobs/{job_id}/events"),
        ("GET", f"/jobs/{job_id}/report/report.json"),
        ("GET", f"/submit?like={job_id}"),
        ("POST", f"/jobs/{job_id}/cancel"),
        ("POST", f"/jobs/{job_id}/retry"),
    ]


def request(client: httpx.Client, method: str, path: str, **headers: str) -> httpx.Response:
    kind = {"Content-Type": "application/x-www-form-urlencoded"} if method == "POST" else {}
    return client.request(method, path, headers={**kind, **headers})


def test_who_is_not_signed_in_is_led_to_it_and_back(service_api: Api) -> None:
    job = new_job(service_api)
    with visitor(service_api) as client:
        for method, path in [("GET", "/"), ("GET", "/submit"), ("POST", "/submit"), *page_routes(job.id)]:
            answer = request(client, method, path)
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/login"), path
            assert job.id not in answer.text
        wanted = client.get(f"/jobs/{job.id}?x=a%26b").headers["location"]
        form = client.get(wanted)
        back = client.post("/login", data={**fields_of(form), "token": f" {ALICE}\n"})
        assert (back.status_code, back.headers["location"]) == (303, f"/jobs/{job.id}?x=a%26b")
        assert client.get(back.headers["location"]).status_code == 200
        assert client.get("/login?next=/submit").headers["location"] == "/submit"
        assert client.post("/login", data={"token": ALICE, "next": "//evil.example"}).headers["location"] == "/"
        assert request(client, "POST", "/logout").headers["location"] == "/login"
        assert client.get("/").status_code == 303


def test_a_token_that_the_hub_refuses_opens_nothing(service_api: Api) -> None:
    with visitor(service_api) as client:
        for token in ("hf_nobody", "", "a b", "x" * 600, "\N{SNOWMAN}"):
            answer = client.post("/login", data={"token": token})
            assert answer.status_code == 401
            assert "does not know this token" in answer.text
            assert not answer.cookies
            assert token not in answer.text or not token


def test_only_a_cookie_that_holds_is_believed(service_api: Api, tmp_path: Path) -> None:
    key = service_api.settings["KVALIGN_SECRET_KEY"]
    sessions = Sessions(key, 3600)
    good = sessions.seal(ALICE)
    bad = {
        "tampered": good[:40] + ("A" if good[40] != "A" else "B") + good[41:],
        "expired": sessions._cipher.encrypt_at_time(ALICE.encode(), 1_700_000_000).decode(),
        "as jobs keep tokens": service_api.store.cipher.encrypt(ALICE.encode()).decode(),
        "revoked": sessions.seal("hf_nobody"),
        "bare": ALICE,
    }
    with visitor(service_api) as client:
        for name, cookie in bad.items():
            assert client.get("/", headers={"Cookie": f"kvalign={cookie}"}).status_code == 303, name
        assert client.get("/", headers={"Cookie": f"kvalign={good}"}).status_code == 200


def test_every_process_of_the_service_believes_the_cookie(
    service_api: Api, alice: httpx.Client, tmp_path: Path
) -> None:
    shared = {
        name: service_api.settings[name]
        for name in ("KVALIGN_SECRET_KEY", "KVALIGN_HUB_ENDPOINT", "KVALIGN_REDIS_URL", "KVALIGN_DATA_DIR")
    }
    job = new_job(service_api)
    other = start_api(tmp_path, **shared, KVALIGN_DATABASE_URL=f"sqlite:///{service_api.log.parent / 'kvalign.db'}")
    try:
        with visitor(other) as client:
            client.cookies = alice.cookies
            assert job.config.target.repo in client.get(f"/jobs/{job.id}").text
    finally:
        stop_api(other)


def test_the_api_takes_no_cookie(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    for method, path in [
        ("GET", "/v1/jobs"),
        ("POST", "/v1/jobs"),
        ("POST", "/v1/preflight"),
        ("POST", f"/v1/jobs/{job.id}/cancel"),
        ("GET", f"/v1/jobs/{job.id}/events"),
    ]:
        answer = alice.request(method, path, json={})
        assert (answer.status_code, answer.json()["code"]) == (401, "token_missing"), path
    assert service_api.store.get(job.id, tenant="alice").state == "queued"


def test_forms_of_other_sites_are_refused(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    del alice.headers["Origin"]
    own = service_api.url
    for headers in (
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": own + ".evil.example"},
        {"Origin": own, "Sec-Fetch-Site": "cross-site"},
        {"Origin": own, "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
    ):
        for path in (f"/jobs/{job.id}/cancel", f"/jobs/{job.id}/retry", "/submit", "/login", "/logout"):
            answer = request(alice, "POST", path, **headers)
            assert answer.status_code == 403, (path, headers)
            assert "another site" in answer.text
    assert service_api.store.get(job.id, tenant="alice").state == "queued"
    answer = alice.post(f"/jobs/{job.id}/cancel", json={}, headers={"Origin": own})
    assert answer.status_code == 415
    for fine in ({"Origin": own}, {"Sec-Fetch-Site": "same-origin"}):
        assert request(alice, "POST", f"/jobs/{job.id}/cancel", **fine).status_code == 303
    assert service_api.store.get(job.id, tenant="alice").state == "canceled"


def test_foreign_jobs_have_no_page(service_api: Api) -> None:
    job = new_job(service_api, labels={"secret": "label"})
    lease = claim(service_api, job)
    lease.save_report_file("report.json", json.dumps(SAMPLE).encode())
    with signed_in(service_api, BOB) as bob:
        for method, path in page_routes(job.id):
            answer = request(bob, method, path)
            assert answer.status_code == 404, path
            assert job.config.target.repo not in answer.text
        assert job.id not in bob.get("/?label=secret").text
        assert bob.get("/jobs/NOT%00AN%20ID").status_code == 404
    assert service_api.store.get(job.id, tenant="alice").state == "running"
    lease.cancel()


def test_hostile_words_stay_words(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api, labels={"<script>x": HOSTILE})
    lease = claim(service_api, job)
    lease.stage_started(Stage.FIT)
    lease.progress(Progress(Stage.FIT, 1, 2, HOSTILE), tell=True)
    running = alice.get(f"/jobs/{job.id}")
    lease.log([HOSTILE, "</li><script>alert(2)</script>"], limit=9)
    report = json.loads(json.dumps(SAMPLE))
    report["gate"] |= {"passed": False, "failures": [HOSTILE]}
    report["figures"][0] |= {"caption": HOSTILE}
    report["baselines"][0] |= {"setting": HOSTILE}
    report["quality"]["domains"][HOSTILE] = report["quality"]["domains"].pop("law")
    report["not_measured"] = [HOSTILE]
    report["quality"]["overall"] |= {"windows": 1, "kl_low": None, "kl_high": None}
    lease.save_report_file("report.json", json.dumps(report).encode())
    lease.save_report_file("figures/head_alignment.png", PNG)
    lease.fail(JobError.of(TimeLimit(HOSTILE, HOSTILE)))
    ended = alice.get(f"/jobs/{job.id}")
    copied = alice.get(f"/submit?like={job.id}")
    back = alice.post("/submit", data={"source.repo": HOSTILE, "labels": HOSTILE, "target.repo": "a/b"})
    filtered = alice.get("/", params={"label": HOSTILE})
    assert back.status_code == 422
    for answer in (running, ended, copied, back, filtered, alice.get("/")):
        assert "<img src=x" not in answer.text
        assert "<script>" not in answer.text
        assert "49" not in re.findall(r"onerror=alert\(1\)[^<]{0,40}", answer.text)
        assert_is_inert(answer)
    assert text_of(ended).count(HOSTILE) >= 7
    assert "one window" in text_of(ended)
    assert fields_of(back)["source.repo"] == HOSTILE


def assert_is_inert(answer: httpx.Response) -> None:
    """Nothing that the policy would have to stop, and a policy that would stop it."""
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    markup = "".join(re.findall(r"<[^>]*>", re.sub(r'"[^"]*"', '""', answer.text)))
    assert not re.search(r"<style|<script(?! src=\"\" defer>)|\sstyle=|\son\w+=|javascript:", markup)


def test_no_page_or_log_holds_the_token(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    pages = [alice.get(path) for path in ("/", "/submit", f"/jobs/{job.id}", "/nowhere", f"/?label={ALICE[:8]}")]
    for answer in pages:
        assert ALICE not in answer.text
        assert ALICE not in str(answer.headers)
    assert all(ALICE not in str(cookie) for cookie in alice.cookies.jar)
    assert ALICE not in service_api.log.read_text()


def test_refusals_are_pages_in_a_browser(service_api: Api, alice: httpx.Client) -> None:
    for path, status in (("/nowhere", 404), ("/?state=done", 422), ("/?after=%00", 422), ("/jobs/job_1", 404)):
        answer = alice.get(path)
        assert answer.status_code == status, path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "To your jobs" in answer.text
        assert_is_inert(answer)
        plain = alice.get(path, headers={"Accept": "*/*"})
        assert plain.headers["content-type"] == "application/problem+json"
    job = new_job(service_api)
    answer = request(alice, "POST", f"/jobs/{job.id}/retry")
    assert (answer.status_code, "Only a failed or canceled job" in answer.text) == (409, True)
    assert alice.delete("/submit").headers["content-type"].startswith("text/html")


def test_the_queue_is_filtered_and_paged(service_api: Api) -> None:
    jobs = [new_job(service_api, "bob", labels={"set": "a&b", "n": str(n)}) for n in range(27)]
    service_api.store.request_cancel(jobs[0].id, tenant="bob")
    with signed_in(service_api, BOB) as bob:
        first = bob.get("/", params={"label": "set=a&b"})
        assert first.text.count('<a href="/jobs/job_') == 25
        older = unescape(next(iter(re.findall(r'<a href="([^"]+)" rel="next">', first.text))))
        second = bob.get(older)
        assert second.text.count('<a href="/jobs/job_') == 2
        assert 'rel="next"' not in second.text
        canceled = bob.get("/?state=canceled&label=")
        assert jobs[0].id in canceled.text
        assert jobs[1].id not in canceled.text
        assert re.search(r"(next|place \d+) in the queue", text_of(first))
        assert "No job fits" in bob.get("/?label=nothing").text
    for job in jobs:
        service_api.store.request_cancel(job.id, tenant="bob")


def test_preflight_tells_everything_and_stores_nothing(service_api: Api, alice: httpx.Client) -> None:
    before = alice.get("/v1/jobs", headers={"Authorization": f"Bearer {ALICE}"}).json()["data"][:1]
    good = alice.post(
        "/submit", data={"source.repo": "carol/tiny", "target.repo": "alice/pages-new", "then": "preflight"}
    )
    assert good.status_code == 200
    assert "this can be converted" in good.text
    assert {"Download", "Memory", "alice/pages-new may be written to."} <= {
        word for word in ("Download", "Memory", "alice/pages-new may be written to.") if word in text_of(good)
    }
    bad = alice.post("/submit", data={"source.repo": "carol/recurrent", "target.repo": "bob/x"})
    assert "this cannot be converted" in bad.text
    assert "organisation of yours" in bad.text
    assert fields_of(bad)["source.repo"] == "carol/recurrent"
    assert alice.get("/v1/jobs", headers={"Authorization": f"Bearer {ALICE}"}).json()["data"][:1] == before


def test_a_form_makes_one_job_however_often_it_is_sent(service_api: Api, alice: httpx.Client) -> None:
    form = fields_of(alice.get("/submit"))
    name = f"alice/pages-form-{next(_numbers)}"
    form |= {
        "source.repo": "carol/tiny",
        "target.repo": name,
        "codec.ratio": "12",
        "labels": "team=x",
        "then": "submit",
    }
    first, second = (alice.post("/submit", data=form) for _ in range(2))
    assert first.status_code == second.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    job = service_api.store.get(first.headers["location"].removeprefix("/jobs/"), tenant="alice")
    assert (job.config.target.repo, job.config.codec.ratio, job.config.labels) == (name, 12, {"team": "x"})
    changed = alice.post("/submit", data={**form, "codec.ratio": "13"})
    assert changed.status_code == 422
    assert "with another body" in changed.text
    again = fields_of(changed)
    assert again["idempotency_key"] != form["idempotency_key"]
    assert again["codec.ratio"] == "13"
    refused = alice.post("/submit", data={**form, "idempotency_key": "", "source.repo": "carol/nothing"})
    assert refused.status_code == 422
    assert re.search(r'id="source.repo-error">[^<]*carol/nothing', refused.text)


def test_cancel_and_retry(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    page = alice.get(f"/jobs/{job.id}")
    assert 'id="cancel"' in page.text
    assert 'id="retry"' not in page.text
    assert request(alice, "POST", f"/jobs/{job.id}/cancel").headers["location"] == f"/jobs/{job.id}"
    assert 'id="retry"' in alice.get(f"/jobs/{job.id}").text
    assert request(alice, "POST", f"/jobs/{job.id}/retry").status_code == 303
    assert service_api.store.get(job.id, tenant="alice").state == "queued"


def test_a_running_job_is_told_in_full_without_a_script(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    lease.stage_started(Stage.PULL)
    lease.stage_finished(Stage.PULL, 75.0)
    lease.stage_started(Stage.FIT)
    lease.progress(Progress(Stage.FIT, 3, 30, "groups"), tell=True)
    lease.log(["a line of the child"], limit=9)
    page = alice.get(f"/jobs/{job.id}")
    words = text_of(page)
    for said in ("running fit 10 %", "1 min 15 s", "3 of 30 groups", "a line of the child", "pull finished in 75.0 s"):
        assert said in words, said
    assert re.search(r'<time datetime="20\d\d-[^"]+\+00:00"', page.text)
    lease.cancel()


def test_events_come_by_cookie_and_go_on_where_they_stopped(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    lease.stage_started(Stage.PULL)
    lease.cancel()
    for query, headers in (("?after=2", {}), ("?after=0", {"Last-Event-ID": "2"})):
        with connect_sse(alice, "GET", f"/jobs/{job.id}/events{query}", headers=headers) as source:
            assert [int(event.id) for event in source.iter_sse()] == [3, 4]
    assert alice.get(f"/jobs/{job.id}/events?after=4").status_code == 204


def test_a_report_card_with_its_figures(service_api: Api, alice: httpx.Client) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    for name, content in {
        "report.json": json.dumps(SAMPLE).encode(),
        "README.md": b"<script>alert(1)</script>",
        "figures/rate_distortion.png": PNG,
        "figures/rate_distortion.json": b"{}",
        "figures/evil.svg": b"<svg onload=alert(1)>",
    }.items():
        lease.save_report_file(name, content)
    lease.succeed(JobResult("alice/x", "c" * 40, "javascript:alert(1)", 105.9, 0.0193, 0.925))
    page = alice.get(f"/jobs/{job.id}")
    words = text_of(page)
    for said in ("gate passed", "56.6", "0.0193 0.0165 to 0.0227", "92.5 %", "27.2 MB", "KVTC", "Not measured"):
        assert said in words, said
    assert "javascript:" not in page.text
    assert [figure["caption"] for figure in SAMPLE["figures"] if figure["caption"] in words] == [
        figure["caption"] for figure in SAMPLE["figures"] if figure["name"] == "rate_distortion"
    ]
    kinds = {}
    for path in set(re.findall(rf'(?:href|src)="(/jobs/{job.id}/report/[^"]+)"', page.text)):
        answer = alice.get(path)
        assert answer.headers["content-security-policy"] == "sandbox"
        kinds[path.rpartition("/")[2]] = answer.headers["content-type"].partition(";")[0]
    assert kinds == {
        "report.json": "application/json",
        "README.md": "text/markdown",
        "rate_distortion.png": "image/png",
        "rate_distortion.json": "application/json",
        "evil.svg": "application/octet-stream",
    }


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"summary": {}}', b"\xff", json.dumps({**SAMPLE, "schema_version": 99}).encode()]
)
def test_a_report_of_another_form_is_offered_as_files(service_api: Api, alice: httpx.Client, content: bytes) -> None:
    job = new_job(service_api)
    lease = claim(service_api, job)
    lease.save_report_file("report.json", content)
    lease.save_report_file("figures/bits.png", PNG)
    lease.cancel()
    page = alice.get(f"/jobs/{job.id}")
    assert "of a form that this service does not know" in page.text
    assert f"/jobs/{job.id}/report/figures/bits.png" in page.text


def test_assets_are_kept_by_browsers_as_long_as_they_are_the_same(service_api: Api) -> None:
    with visitor(service_api) as client:
        for path in re.findall(r'"(/static/[^"]+)"', client.get("/login").text):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "immutable" in answer.headers["cache-control"]
            assert client.get(path + "0").headers["cache-control"] == "no-store"
        assert client.get("/static/../session.py").status_code == 404
        assert client.get("/static/session.py").status_code == 404
