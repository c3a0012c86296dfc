"""The page as people use it: mouse, keyboard alone, a phone, no script, a dark room. Knows no route of the API."""

import itertools
import re

import pytest
from browser_page import PALE_TEXT, Open
from browser_services import SOURCE, Place
from playwright.sync_api import Page, expect
from service_harness import ALICE

_numbers = itertools.count()
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


def name() -> str:
    return f"browser-{next(_numbers)}"


def fill_in(page: Page, target: str, source: str = SOURCE) -> None:
    page.get_by_label("Model repo").fill(source)
    page.get_by_label("New repo").fill(target)


def test_from_signing_in_to_the_report_card(open_page: Open, place: Place) -> None:
    """One reading without a reload: every change comes by the stream."""
    page = open_page("/submit", signed_in=False)
    page.get_by_label("Hub token").fill("hf_wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text("does not know this token")).to_be_visible()
    expect(page.get_by_label("Hub token")).to_have_value("")
    page.get_by_label("Hub token").fill(ALICE)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(place.url + "/submit")

    fill_in(page, "bob/not-mine", "carol/recurrent")
    page.get_by_role("button", name="Preflight").click()
    told = page.locator("#preflight")
    expect(told).to_contain_text("this cannot be converted")
    expect(told).to_be_focused()
    expect(told.locator("li.not")).to_have_count(2)
    target = f"alice/{name()}"
    fill_in(page, target)
    page.get_by_label("Calibration tokens").fill("5")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("#errors")).to_be_focused()
    expect(page.get_by_label("Calibration tokens")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("New repo")).to_have_value(target)
    page.get_by_label("Calibration tokens").fill("")
    page.get_by_role("button", name="Preflight").click()
    expect(page.locator("#preflight")).to_contain_text("this can be converted")

    place.child("pass", 0.1)
    page.get_by_role("button", name="Submit").dblclick()
    expect(page).to_have_url(re.compile("/jobs/job_"))
    page.evaluate("window.neverReloaded = true")
    expect(page.locator("tr.running th")).to_be_visible()
    expect(page.locator("tr.running progress")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("running, ")
    expect(page.locator("#now")).to_contain_text("Published as")
    expect(page).to_have_title(f"succeeded · {target}")
    expect(page.get_by_role("status")).to_have_text("succeeded")
    expect(page.locator("#log li").last).to_contain_text("succeeded")
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)
    figures = page.locator("figure img")
    expect(figures).to_have_count(6)
    for number in range(6):
        figures.nth(number).scroll_into_view_if_needed()
        expect(figures.nth(number)).to_have_js_property("complete", True)
        assert figures.nth(number).evaluate("image => image.naturalWidth") > 300
    assert page.evaluate("window.neverReloaded")
    numbers = page.locator("#log li").evaluate_all("lines => lines.map(line => Number(line.dataset.number))")
    assert numbers == sorted(set(numbers))

    page.get_by_role("link", name="Jobs", exact=True).first.click()
    expect(page.locator("tr", has_text=target)).to_have_count(1)
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(re.compile("/login"))
    page.go_back()
    expect(page.get_by_text(target)).to_have_count(0)


def test_a_failed_gate_keeps_its_report_and_can_be_retried(open_page: Open, place: Place) -> None:
    place.child("gate")
    job = place.submit(name())
    page = open_page(f"/jobs/{job}")
    error = page.get_by_role("region", name="Error")
    expect(error).to_contain_text("quality_gate")
    expect(error).to_contain_text("What to do: Ask for a smaller ratio")
    expect(page.locator("#card")).to_contain_text("mean KL <b>0.0193</b> is above 0.01")
    place.child("pass")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#now")).to_contain_text("Published as")
    expect(page.locator("#card")).to_contain_text("gate passed")


def test_the_queue_lives_and_a_running_job_is_canceled(open_page: Open, place: Place) -> None:
    place.child("hang", 0.02)
    target = name()
    job = place.submit(target, labels={"team": target})
    page = open_page("/")
    page.get_by_label("Label").fill(f"team={target}")
    page.get_by_role("button", name="Filter").click()
    row = page.locator("tr", has_text=target)
    expect(row).to_contain_text("fit ")
    waiting = place.submit(name(), labels={"team": target})
    expect(page.locator("tbody tr")).to_have_count(2)  # came by itself
    assert waiting in str(page.locator("tbody tr a").first.get_attribute("href"))
    row.get_by_role("link", name=f"alice/{target}").click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#now .state")).to_have_text("canceled")
    expect(page.locator("tr.canceled th")).to_have_text("fit")
    assert page.url.endswith(job)


def test_everything_can_be_done_with_the_keyboard(open_page: Open, place: Place) -> None:
    page = open_page("/submit", signed_in=False)
    page.keyboard.type(ALICE)
    page.keyboard.press("Enter")
    expect(page).to_have_url(place.url + "/submit")
    page.keyboard.press("Tab")
    skip = page.get_by_text("Skip to content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Model repo")).to_be_focused()
    page.keyboard.type(SOURCE)
    assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    tab_to(page, "target.repo")
    target = f"alice/{name()}"
    page.keyboard.type(target)
    page.keyboard.press("Enter")  # asks, before anything is made
    expect(page.locator("#preflight")).to_contain_text("this can be converted")
    place.child("hang")
    page.locator("#preflight").focus()
    while page.evaluate("document.activeElement.value") != "submit":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("tr.running th")).to_have_text("fit")
    page.locator("main").focus()
    tab_to(page, "cancel")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def tab_to(page: Page, identifier: str) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == identifier:
            return
    pytest.fail(f"{identifier} cannot be reached with Tab")


def test_without_its_script_the_page_is_whole(open_page: Open, place: Place) -> None:
    page = open_page("/submit", java_script_enabled=False)
    target = f"alice/{name()}"
    fill_in(page, target)
    page.get_by_role("button", name="Preflight").click()
    expect(page.locator("#preflight")).to_contain_text("this can be converted")
    page.get_by_text("Advanced").click()
    page.get_by_label("Labels").fill("script=none")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator("h1")).to_have_text(target)
    for _ in range(200):
        page.reload()
        if page.get_by_text("Published as").count():
            break
        page.wait_for_timeout(300)
    expect(page.locator("#now")).to_contain_text("Published as")
    expect(page.locator("figure")).to_have_count(6)
    page.get_by_role("link", name="script=none").click()
    expect(page.locator("tbody tr")).to_have_count(1)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_nothing_is_cut_off_and_all_can_be_read(open_page: Open, place: Place, scheme: str) -> None:
    place.child("gate")
    job = place.submit(f"{name()}-with-a-very-long-name-that-no-phone-can-hold-on-one-line", labels={"k": "v" * 80})
    page = open_page(f"/jobs/{job}", color_scheme=scheme, **PHONE)
    expect(page.locator("#card")).to_contain_text("Gate failed")
    for path in (f"/jobs/{job}", "/", "/submit", "/nowhere"):
        page.goto(path)
        for details in page.locator("details").all():
            details.evaluate("one => { one.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
        too_pale = page.evaluate(PALE_TEXT)
        assert not too_pale, (path, too_pale)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(23, 22, 20)") == (scheme == "dark")


def test_a_session_that_ends_leads_to_signing_in(open_page: Open, place: Place) -> None:
    page = open_page("/")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.context.clear_cookies()
    expect(page).to_have_url(re.compile("/login"))
