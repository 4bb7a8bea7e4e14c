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
    # Its sandbox refuses root, who tests in a container
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


Open = Callable[..., Page]

DRAWN = (
    "() => [...document.querySelectorAll('.js-plotly-plot, .plotly-graph-div')].every(one => one._fullLayout)"
)
PLOT = "document.querySelectorAll('.plotly-graph-div')"


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
            page.wait_for_function(DRAWN, timeout=60_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def facts(trained: Path) -> dict[str, Any]:  # noqa: F811
    return overview(Run(trained))


def at(page: Page, x: float, y: float | str, axis: str = "") -> tuple[float, float]:
    """Return where a point of the first figure is on the screen; `axis` is the number of its row."""
    found = page.evaluate(
        """([x, y, axis]) => {
            const place = document.querySelector('.plotly-graph-div');
            const { [`xaxis${axis}`]: across, [`yaxis${axis}`]: up } = place._fullLayout;
            window.scrollTo(0, place.getBoundingClientRect().y + scrollY + up._offset - 200);
            const box = place.getBoundingClientRect();
            return [box.x + across._offset + across.d2p(x), box.y + up._offset + up.d2p(y)];
        }""",
        [x, y, axis],
    )
    return found[0], found[1]


def hover(page: Page, x: float, y: float) -> Locator:
    """Point at a place, and return the label that comes up there."""
    page.mouse.move(x - 40, y - 8)
    page.mouse.move(x, y, steps=3)
    return page.locator(".hovertext")


def span(page: Page, axis: str = "xaxis") -> float:
    found: list[float] = page.evaluate(f"{PLOT}[0]._fullLayout.{axis}.range")
    return found[1] - found[0]


def test_a_point_tells_which_checkpoint_it_is_and_a_mark_what_happened(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)

    point = hover(page, *at(page, 5, 0.2))
    for text in ("checkpoint 5", "step 5, epoch 0, batch 0", "why: called", "acc 0.2"):
        expect(point).to_contain_text(text)

    expect(hover(page, *at(page, 11, "resumes", "3"))).to_contain_text("attempt 4 resumed from checkpoint 13")


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
    page.wait_for_function(f"() => {PLOT}[0]._fullLayout.xaxis2.range[0] > 3")
    assert span(page) == pytest.approx(4, abs=0.3)
    assert span(page, "xaxis3") == pytest.approx(span(page))
    page.mouse.dblclick(right, y)

    page.wait_for_function(f"() => {PLOT}[0]._fullLayout.xaxis2.range[0] < 3")
    assert span(page) == pytest.approx(whole)


def test_all_curves_have_a_log_scale(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts)

    page.locator(".updatemenu-button").nth(1).click()

    kinds = page.evaluate(
        f"(({{yaxis, yaxis2, yaxis3}}) => [yaxis.type, yaxis2.type, yaxis3.type])({PLOT}[0]._fullLayout)"
    )
    assert kinds == ["log", "log", "category"]


def test_a_run_can_be_hidden_and_shown(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, facts | {"run": "runs/other"})
    shown = f"{PLOT}[0]._fullData.filter(one => one.visible === true).length"
    before = page.evaluate(shown)

    page.locator(".plotly-graph-div").first.locator(".legendtoggle").last.click()
    page.wait_for_function(f"() => {shown} < {before}")
    assert page.evaluate(shown) == before / 2
    page.wait_for_timeout(500)
    page.locator(".plotly-graph-div").first.locator(".legendtoggle").last.click()

    page.wait_for_function(f"() => {shown} === {before}")


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open, facts: dict[str, Any]) -> None:
    long = facts | {"run": "runs/" + "wide" * 60, "problem": "x" * 300}
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    page = open_page(facts, long, **phone)

    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.evaluate("document.querySelector('.plot').getBoundingClientRect().width") <= 375


def test_a_table_that_scrolls_is_reached_by_the_tab_key_and_is_seen_to_be(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)
    page.keyboard.press("Tab")

    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "The runs at a glance"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_screen_reader_finds_headings_landmarks_captions_and_names(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)

    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert all(later - before <= 1 for before, later in pairwise(levels))
    assert [page.locator(name).count() for name in ("header", "main", "footer")] == [1, 1, 1]
    assert page.locator("table").count() == page.locator("table > caption").count() == 4
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator('.plot:not([role="img"][aria-label])').count() == 0
    assert page.locator(".plot").count() == 3


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


def test_a_script_that_got_into_the_page_anyway_is_not_run(browser: Browser, facts: dict[str, Any]) -> None:
    text = report.page([facts], "").replace("<main", "<script>window.hacked = 1</script><main")
    page = browser.new_page()
    page.set_content(text)

    assert page.evaluate("[...document.scripts].filter(one => one.text.includes('hacked')).length") == 1
    assert page.evaluate("window.hacked") is None
    page.close()


def test_ten_thousand_saves_are_a_page_of_ordinary_size(open_page: Open, tmp_path: Path) -> None:
    page = open_page(many(10_000))

    points = page.evaluate(f"{PLOT}[0].data[0].x.length")
    assert 300 < points <= 600
    assert (tmp_path / "page.html").stat().st_size < 6_500_000
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
    assert page.locator(".plot").count() == (0 if saves == 0 else 3)


def test_a_run_without_metrics_says_how_to_get_curves(open_page: Open, run_dir: Path) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2)) as state:
        state.save()
    page = open_page(overview(Run(run_dir)))

    assert "No save was given a metric" in page.locator("main").inner_text()


def test_without_scripts_the_tables_are_there(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, java_script_enabled=False)

    assert page.locator("tbody tr").count() >= 16
