"""A real Chromium before the real service. Where there is no Chromium the tests are skipped, and fail in CI."""

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_page import Open
from browser_services import Place, running_place
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from service_harness import ALICE

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 60_000  # other work may have the machine


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Playwright keeps an event loop running in this thread: no other module may still meet it."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no Chromium is installed")
        pytest.skip("no Chromium is installed")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # which Chromium refuses to root
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared_place(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Started once; not at all where there is no browser."""
    with running_place(tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.fixture
def place(shared_place: Place) -> Iterator[Place]:
    """With nothing left to do of what a test submitted."""
    shared_place.child("pass")
    yield shared_place
    shared_place.cancel_all()


@pytest.fixture
def open_page(chromium: Browser, place: Place) -> Iterator[Open]:
    """Opens pages in contexts of their own, signed in unless told otherwise; their consoles must stay silent."""
    contexts: list[BrowserContext] = []
    complaints: list[str] = []

    def opened(path: str = "/", *, signed_in: bool = True, **settings: Any) -> Page:
        context = chromium.new_context(**{"base_url": place.url, "viewport": {"width": 1180, "height": 900}} | settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: _note(complaints, message.type, message.text))
        page.goto(path)
        if signed_in:
            page.get_by_label("Hub token").fill(ALICE)
            page.get_by_role("button", name="Sign in").click()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints


def _note(complaints: list[str], kind: str, text: str) -> None:
    """Chromium also complains of each answer with an error status, which tests ask for."""
    if kind in {"error", "warning"} and not text.startswith("Failed to load resource"):
        complaints.append(text)
