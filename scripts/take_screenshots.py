"""Take docs/screenshots anew, of the real page in Chromium; only the converting child is a stand-in.

.venv/bin/python scripts/take_screenshots.py
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("browser", "integration", "integration/service")]

from browser_services import Place, running_place  # noqa: E402 - found by the line above
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright  # noqa: E402
from service_harness import ALICE  # noqa: E402

OUT = ROOT / "docs" / "screenshots"
WIDE = {"width": 1100, "height": 820}
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "device_scale_factor": 1.5}


def main() -> None:
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, running_place(Path(folder)) as place, sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        context = browser.new_context(base_url=place.url, viewport=WIDE)
        page = signed_in(context)
        failed, running = make_jobs(place, page)
        take(page, "/", "queue")
        take(page, f"/jobs/{failed}", "failed")
        preflight(page)
        dark = browser.new_context(
            base_url=place.url, viewport=WIDE, color_scheme="dark", storage_state=context.storage_state()
        )
        take(dark.new_page(), f"/jobs/{running}", "job-dark")
        phone(browser, context, place, running)
        place.cancel_all()


def signed_in(context: BrowserContext) -> Page:
    page = context.new_page()
    page.set_default_timeout(90_000)
    page.goto("/")
    page.get_by_label("Hub token").fill(ALICE)
    page.get_by_role("button", name="Sign in").click()
    return page


def make_jobs(place: Place, page: Page) -> tuple[str, str]:
    """One of each state; ids of the failed and of the running one."""
    done = place.submit("SmolLM2-135M-Instruct-kvalign", labels={"team": "cache"})
    page.goto(f"/jobs/{done}")
    page.get_by_text("Published as").wait_for()
    take(page, f"/jobs/{done}", "report-card", at="#card")
    place.child("gate")
    failed = place.submit("SmolLM2-135M-strict", labels={"team": "cache"}, validation={"gate": {"max_kl": 0.01}})
    page.goto(f"/jobs/{failed}")
    page.get_by_role("button", name="Retry").wait_for()
    place.child("hang", 0.5)
    running = place.submit("Qwen3-0.6B-kvalign", labels={"run": "nightly"})
    time.sleep(1)
    canceled = place.submit("Llama-3.2-1B-kvalign")
    place.submit("gemma-3-1b-kvalign", codec={"ratio": 20}, labels={"run": "nightly"})
    place.api.store.request_cancel(canceled, tenant="alice")
    page.goto(f"/jobs/{running}")
    page.locator("tr.running progress[value='50.0']").wait_for()
    page.get_by_text("4 of 8 groups").wait_for()
    return failed, running


def preflight(page: Page) -> None:
    page.goto("/submit")
    page.get_by_label("Model repo").fill("carol/tiny")
    page.get_by_label("New repo").fill("alice/another-kvalign")
    page.get_by_role("button", name="Preflight").click()
    page.get_by_text("this can be converted").wait_for()
    page.screenshot(path=OUT / "preflight.png")


def phone(browser: Browser, context: BrowserContext, place: Place, running: str) -> None:
    small = browser.new_context(base_url=place.url, storage_state=context.storage_state(), **PHONE)
    take(small.new_page(), f"/jobs/{running}", "job-phone")


def take(page: Page, path: str, name: str, *, at: str = "") -> None:
    """What a person sees first, or from an element on."""
    page.goto(path)
    if at:
        page.locator(at).evaluate("element => element.scrollIntoView()")
    page.screenshot(path=OUT / f"{name}.png")


if __name__ == "__main__":
    main()
