"""The page of a report in a real browser: what it shows, does with mouse and keys, and cannot be made to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright
from test_report import many, train, trained  # noqa: F401 (pytest finds the fixture here)

from resumable import RunState
from resumable.run.directory import Run
from resumable.views import report
from resumable.views.overview import overview

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
]

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>" + (
    "'\"`${1}%{x}\u202e&lt;b&gt;"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # (its sandbox refuses root, who tests in a container)
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


Open = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """What opens a page about runs from a disk; in the end nothing was wrong, and no network was asked."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def opened(*facts: dict[str, Any], **settings: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(report.page(facts, report._library()), encoding="utf-8")
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | settings))
        page: Page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url != file.as_uri() else None)
        page.goto(file.as_uri())
        if settings.get("java_script_enabled", True):
            page.wait_for_selector("html[data-drawn]", timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def facts(trained: Path) -> dict[str, Any]:  # noqa: F811
    return overview(Run(trained))


def at(page: Page, x: float, y: float | None = None, chart: int = 0) -> tuple[float, float]:
    """Return where a point of a chart is on the screen; without y, of the row of marks below it."""
    found = page.evaluate(
        """([index, x, y]) => {
            const place = document.querySelectorAll('.plot')[index];
            place.scrollIntoView({block: 'center'});
            const { xaxis, yaxis, yaxis2 } = place._fullLayout;
            const box = place.getBoundingClientRect();
            const [axis, value] = y === null ? [yaxis2, 2] : [yaxis, y];
            return [box.x + xaxis._offset + xaxis.d2p(x), box.y + axis._offset + axis.d2p(value)];
        }""",
        [chart, x, y],
    )
    return found[0], found[1]


def hover(page: Page, x: float, y: float) -> Locator:
    """Point at a place, and return the label that comes up there."""
    page.mouse.move(x - 40, y - 8)
    page.mouse.move(x, y, steps=3)
    return page.locator(".hovertext")


def span(page: Page, chart: int = 0) -> float:
    found: list[float] = page.evaluate(
        "index => document.querySelectorAll('.plot')[index]._fullLayout.xaxis.range", chart
    )
    return found[1] - found[0]


def test_a_point_tells_which_checkpoint_it_is_and_a_mark_what_happened(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)

    point = hover(page, *at(page, 5, 0.2))
    for text in ("checkpoint 5", "step 5, epoch 0, batch 0", "why: called", "acc 0.2"):
        expect(point).to_contain_text(text)

    expect(hover(page, *at(page, 11))).to_contain_text("attempt 4 went on from checkpoint 13")


def test_a_stretch_that_is_drawn_with_the_mouse_is_zoomed_in_all_charts_and_reset(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)
    whole = span(page)

    (left, y), (right, _) = at(page, 4, 0.3), at(page, 8, 0.3)
    page.mouse.move(left, y)
    page.mouse.down()
    page.mouse.move(right, y, steps=5)
    page.mouse.up()
    page.wait_for_function("document.querySelectorAll('.plot')[1]._fullLayout.xaxis.range[0] > 3")
    assert span(page) == pytest.approx(4, abs=0.3)
    assert span(page, chart=1) == pytest.approx(span(page))
    page.mouse.dblclick(right, y)

    page.wait_for_function("document.querySelectorAll('.plot')[1]._fullLayout.xaxis.range[0] < 3")
    assert span(page) == pytest.approx(whole)


def test_buttons_zoom_too(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts)
    whole = span(page)

    page.get_by_role("button", name="Zoom in").click()
    half = span(page)
    page.get_by_role("button", name="Reset zoom").click()

    assert half == pytest.approx(whole / 2)
    assert span(page) == pytest.approx(whole)


def curves(page: Page) -> int:
    return page.locator(".plot").first.locator(".scatterlayer .trace .lines path.js-line").count()


def test_a_run_and_a_kind_of_mark_can_be_hidden_and_shown(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, facts | {"run": "runs/other"})
    button = page.get_by_role("button", name="runs/other")
    before = curves(page)

    button.click()
    hidden, pressed = curves(page), button.get_attribute("aria-pressed")
    button.click()
    page.get_by_role("button", name="abandoned branches").click()

    assert (before, hidden, pressed) == (6, 3, "false")
    assert (curves(page), button.get_attribute("aria-pressed")) == (2, "true")


def backgrounds(page: Page) -> tuple[str, str]:
    """The page's colour, and that of the text in a chart."""
    text = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    return page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(text)


def test_the_page_is_dark_where_the_reader_likes_that_and_the_switch_stays(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts, color_scheme="dark")
    dark = backgrounds(page)

    page.get_by_role("button", name="Light").click()
    light = backgrounds(page)
    page.reload()
    page.wait_for_selector("html[data-drawn]")

    assert dark == ("rgb(20, 23, 27)", "rgb(230, 233, 237)")
    assert light == backgrounds(page) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)")


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open, facts: dict[str, Any]) -> None:
    long = facts | {"run": "runs/" + "wide" * 60, "problem": "x" * 300}
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    page = open_page(facts, long, **phone)

    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.querySelector('.plot')._fullLayout.dragmode") is False
    assert page.evaluate("document.querySelector('.plot').getBoundingClientRect().width") <= 375


def test_all_that_can_be_operated_is_reached_by_the_tab_key_and_is_seen_to_be(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts, facts | {"run": "runs/other"})
    reached, outlines = [], set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(LABEL))
        if reached[-1] == "BODY":
            break
        outlines.add(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))

    operable = page.evaluate("[...document.querySelectorAll('a, button, [tabindex=\"0\"]')].length")
    assert reached[:4] == ["Skip to the content", "Dark", str(facts["run"]), "runs/other"]
    assert reached.index("Zoom in") < reached.index("Log scale")
    assert len(reached) - 1 == operable
    assert outlines == {"solid"}
    page.get_by_role("button", name="saves").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("button", name="saves").get_attribute("aria-pressed") == "false"


LABEL = """(() => {
    const found = document.activeElement;
    return found === document.body ? "BODY" : found.getAttribute("aria-label") || found.textContent.trim();
})()"""


def test_a_screen_reader_finds_headings_landmarks_captions_and_names(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)

    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(later - before <= 1 for before, later in pairwise(levels))
    assert [page.locator(name).count() for name in ("header", "main", "footer")] == [1, 1, 1]
    assert page.locator("table").count() == page.locator("table > caption").count() == 3
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator('.plot:not([role="img"][aria-label])').count() == 0
    assert page.locator(".plot").count() == 4


def test_what_a_stranger_wrote_is_shown_and_does_nothing(open_page: Open, facts: dict[str, Any]) -> None:
    saves = [save | {"metrics": {HOSTILE: 0.5, "acc": 0.1}, "why": HOSTILE} for save in facts["saves"]]
    events = [event | {"how": HOSTILE} for event in facts["events"]]
    words = {"host": HOSTILE, "argv": [HOSTILE], "ended": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    goal = {"metric": HOSTILE, "maximize": True, "value": 0.5}
    wild = {"run": HOSTILE, "saves": saves, "events": events, "goal": goal, "problem": HOSTILE}
    wild["attempts"] = [attempt | words for attempt in facts["attempts"]]
    wild["remote"] = {"url": HOSTILE, "push": HOSTILE}

    page = open_page(facts | wild)
    told = hover(page, *at(page, 5, 0.5))

    assert "<img src=x onerror" in page.locator("h1").inner_text()
    expect(told).to_contain_text("<img src=x onerror")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_script_that_got_into_the_page_all_the_same_is_not_run(
    browser: Browser, facts: dict[str, Any]
) -> None:
    text = report.page([facts], b"").replace("<main", "<script>window.hacked = 1</script><main")
    page = browser.new_page()
    page.set_content(text)

    assert page.evaluate("[...document.scripts].filter(one => one.text.includes('hacked')).length") == 1
    assert page.evaluate("window.hacked") is None
    page.close()


def test_ten_thousand_saves_are_a_page_of_ordinary_size(open_page: Open, tmp_path: Path) -> None:
    page = open_page(many(10_000))

    points = page.evaluate("document.querySelector('.plot').data.find(t => t.mode === 'markers').x.length")
    assert 300 < points <= 600
    assert (tmp_path / "page.html").stat().st_size < 3_500_000
    assert page.locator("tbody tr").count() < 700


@pytest.mark.parametrize("saves", [0, 1])
def test_a_run_with_next_to_nothing_has_a_page_that_says_so(
    saves: int, open_page: Open, run_dir: Path
) -> None:
    if saves:
        train(run_dir, saves)
    page = open_page(overview(Run(run_dir)))

    text = page.locator("main").inner_text()
    assert ("Nothing was saved yet." in text) == (saves == 0)
    assert page.locator(".plot").count() == (0 if saves == 0 else 4)
    # (a chart without marks has no row for them)
    assert page.evaluate("[...document.querySelectorAll('.plot')].every(one => !one._fullLayout.yaxis2)")


def test_a_run_without_metrics_says_how_to_get_curves(open_page: Open, run_dir: Path) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2)) as state:
        state.save()
    page = open_page(overview(Run(run_dir)))

    assert "No save was given a metric" in page.locator("main").inner_text()


def test_without_scripts_the_tables_are_there(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, java_script_enabled=False)

    assert page.locator("tbody tr").count() >= 16
    assert not page.locator(".tools").is_visible()
