"""The page of a report in a real browser: what it shows, does with mouse and keys, and cannot be made to."""

from __future__ import annotations

import json
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
from resumable.run.policy import duration
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

DRAWN = "() => [...document.querySelectorAll('.plot')].every((one) => one.querySelector('.x, .none'))"


@pytest.fixture
def open_page(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """What opens a page about runs from a disk; in the end nothing was wrong, and no network was asked."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def opened(*facts: dict[str, Any], **settings: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(report.page(facts), encoding="utf-8")
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


def figure(page: Page, series: str) -> Locator:
    return page.locator(f'figure[data-series="{series}"]')


def hover(page: Page, share: float, series: str = "metric 0") -> Locator:
    """Point at a place between the left and the right end of a chart; return the box that comes up."""
    plot = figure(page, series).locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    left = 38 + (box["width"] - 50) * share
    page.mouse.move(box["x"] + left - 30, box["y"] + 90)
    page.mouse.move(box["x"] + left, box["y"] + 100, steps=3)
    return page.locator("#tip")


def ticks(page: Page, axis: str, series: str = "metric 0") -> list[float]:
    texts = figure(page, series).locator(f"text.{axis}").all_text_contents()
    return [float(text.replace(",", "")) for text in texts]


def test_at_one_step_all_metrics_of_all_runs_are_shown(open_page: Open, facts: dict[str, Any]) -> None:
    other = facts | {"run": "runs/other"}
    other["saves"] = [save | {"metrics": {"acc": 0.75, "loss": 2.5}} for save in facts["saves"]]
    page = open_page(facts, other)

    told = hover(page, 4 / 13)

    rows = [row.locator("th, td").all_inner_texts() for row in told.locator("tr").all()]
    assert rows[0][0] == "step 5"
    assert rows[0][2] == "runs/other"
    assert ["acc", "0.2", "0.75"] in rows
    assert ["loss", "0.2", "2.5"] in rows
    assert page.locator(".cross").count() == 4


def test_a_place_beside_a_point_tells_of_the_nearest_and_of_what_happened_there(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)

    expect(hover(page, 10.3 / 13)).to_contain_text("attempt 4 resumed from checkpoint 13")
    expect(page.locator("#tip")).to_contain_text("step 11")
    page.mouse.move(2, 2)
    expect(page.locator("#tip")).to_be_hidden()


def test_a_stretch_that_is_drawn_with_the_mouse_is_zoomed_in_all_charts_and_reset(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)
    whole = ticks(page, "x")

    hover(page, 4 / 13)
    page.mouse.down()
    hover(page, 8 / 13)
    page.mouse.up()

    zoomed = ticks(page, "x")
    assert min(zoomed) >= 4
    assert max(zoomed) <= 9
    assert ticks(page, "x", "metric 1") == zoomed
    page.get_by_role("button", name="Show every step").click()
    assert ticks(page, "x") == ticks(page, "x", "metric 1") == whole


def test_a_log_scale_has_decades(open_page: Open) -> None:
    page = open_page(many(200))
    before = figure(page, "metric 1").locator(".curve").get_attribute("d")

    page.get_by_role("button", name="Log scale").click()

    assert ticks(page, "y", "metric 1") == [0.01, 0.1, 1]
    assert figure(page, "metric 1").locator(".curve").get_attribute("d") != before


def test_a_run_and_a_kind_of_mark_can_be_hidden_and_shown(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, facts | {"run": "runs/other"})
    curves, marks = page.locator('.curve[data-run="1"]'), page.locator('[data-kind="resume"]')
    before = curves.count(), marks.count()

    page.get_by_role("button", name="runs/other").click()
    assert (curves.count(), marks.count()) == (0, before[1] // 2)
    page.get_by_role("button", name="resumes").click()
    assert marks.count() == 0
    for name in ("runs/other", "resumes"):
        page.get_by_role("button", name=name).click()

    assert (curves.count(), marks.count()) == before


def test_the_keys_move_zoom_and_reset(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts)
    whole = ticks(page, "x")
    figure(page, "metric 0").locator(".plot").focus()

    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("step 2")
    page.keyboard.press("+")
    assert ticks(page, "x") != whole
    page.keyboard.press("Escape")

    assert ticks(page, "x") == whole


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_button_says_which_colours_it_brings(scheme: str, open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, color_scheme=scheme)
    button, paper = page.locator("#theme"), "getComputedStyle(document.body).backgroundColor"
    other = "Dark" if scheme == "light" else "Light"
    before = page.evaluate(paper)

    assert button.inner_text() == f"{other} colours"
    button.click()

    assert button.inner_text() == f"{scheme.capitalize()} colours"
    assert page.evaluate(paper) != before


def test_head_table_and_curves_have_the_figures_of_the_history(open_page: Open, trained: Path) -> None:  # noqa: F811
    lines = [json.loads(line) for line in (trained / "history.jsonl").read_text().splitlines()]
    saves = {line["number"]: line for line in lines if line["event"] == "save"}
    page = open_page(overview(Run(trained)))

    head = dict(
        zip(page.locator(".cards dt").all_inner_texts(), page.locator(".cards dd").all(), strict=True)
    )
    assert page.locator("h1 .badge").inner_text() == "finished"
    assert head["done"].inner_text().startswith("step 14 of 14")
    held = sum(line["held"] for line in saves.values())
    assert head["lost to saving"].inner_text().startswith(duration(held))
    columns = page.locator("section:has(> h2:text-is('Checkpoints')) thead th").all_inner_texts()
    shown = page.locator("section:has(> h2:text-is('Checkpoints')) tbody tr").all()
    for row in shown:
        cells = dict(zip(columns, row.locator("td").all_inner_texts(), strict=True))
        line = saves[int(cells["number"])]
        assert int(cells["step"]) == line["step"]
        # One save was made without metrics, before SIGTERM.
        assert cells["acc"] == (f"{line['metrics']['acc']:.6g}" if line["metrics"] else "")
        assert float(cells["held up"].removesuffix(" s")) == pytest.approx(line["held"], abs=0.00051)
    assert len(shown) == len(saves) == 16
    kept = [line for line in saves.values() if line["metrics"] and not line["superseded"]]
    assert curve(page, "metric 0") == [line["metrics"]["acc"] for line in kept]


def curve(page: Page, series: str) -> list[Any]:
    """Return the values at the points of a curve, from the pixels and the ticks of its axis."""
    [low, high], places = ticks(page, "y", series)[:2], []
    for text in figure(page, series).locator("text.y").all()[:2]:
        places.append(float(text.get_attribute("y") or "nan"))
    path = figure(page, series).locator(".curve").first.get_attribute("d") or ""
    ups = [float(point.split(",")[1]) for point in path.removeprefix("M").split("L")]
    share = (high - low) / (places[1] - places[0])
    return [pytest.approx(low + (up - places[0]) * share, abs=abs(share) * 0.2) for up in ups]


def test_of_runs_that_differ_the_differences_stand_before_the_charts(open_page: Open, tmp_path: Path) -> None:
    for name, lr, width in (("one", 0.1, 4), ("other", 0.2, 8)):
        model = torch.nn.Linear(4, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        with RunState.load(tmp_path / name, model=model, optimizer=optimizer, minimize="loss") as state:
            for step in state.steps(2):
                state.save(loss=lr / (step + 1))

    page = open_page(*(overview(Run(tmp_path / name)) for name in ("one", "other")))

    table = page.locator("section:has(> h2:text-is('Side by side'))")
    rows = [
        [cell.split("\n")[0] for cell in row.locator("td").all_inner_texts()]
        for row in table.locator("tr").all()
    ]
    told = {row[0]: row[1:] for row in rows if row}
    assert told["optimizer.lr"] == ["0.1", "0.2"]
    assert told["model.parameters"] == ["20", "40"]
    assert told["loss"] == told["best"] == ["0.05", "0.1"]
    assert "optimizer.momentum" not in told
    headings = page.locator("h2").all_inner_texts()
    assert headings.index("Side by side") < headings.index("Metrics")


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: Open, facts: dict[str, Any]) -> None:
    long = facts | {"run": "runs/" + "wide" * 60, "problem": "x" * 300}
    phone = {"viewport": {"width": 375, "height": 700}, "has_touch": True, "is_mobile": True}
    page = open_page(facts, long, **phone)
    wide = "document.documentElement.scrollWidth"

    assert page.evaluate(wide) == 375
    figure(page, "metric 0").locator(".plot").tap()
    expect(page.locator("#tip")).to_contain_text("acc")
    assert page.evaluate(wide) == 375


def test_marks_at_both_ends_stay_in_the_drawing(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, viewport={"width": 420, "height": 900})

    drawing = figure(page, "metric 0")
    area = drawing.locator("svg svg").bounding_box()
    marks = [one.bounding_box() for one in drawing.locator("svg svg .mark").all()]

    assert area
    assert len(marks) > 3
    assert all(one and area["x"] <= one["x"] for one in marks)
    assert all(one and one["x"] + one["width"] <= area["x"] + area["width"] for one in marks)


def test_a_table_that_scrolls_has_a_shadow_at_its_edge(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, viewport={"width": 420, "height": 900})

    backgrounds = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert page.evaluate(backgrounds) == "local, scroll"


def test_a_table_that_scrolls_is_reached_by_the_tab_key_and_is_seen_to_be(
    open_page: Open, facts: dict[str, Any]
) -> None:
    page = open_page(facts)
    label = "document.activeElement.getAttribute('aria-label')"
    for _ in range(20):
        page.keyboard.press("Tab")
        if str(page.evaluate(label)).startswith("Checkpoints of"):
            break

    assert page.evaluate(label).startswith("Checkpoints of")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


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
    told = hover(page, 4 / 13)

    assert "<img src=x onerror" in page.locator("h1").inner_text()
    expect(told).to_contain_text("<img src=x onerror")
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_script_that_got_into_the_page_anyway_is_not_run(browser: Browser, facts: dict[str, Any]) -> None:
    text = report.page([facts]).replace("<main", "<script>window.hacked = 1</script><main")
    page = browser.new_page()
    page.set_content(text)

    assert page.evaluate("[...document.scripts].filter(one => one.text.includes('hacked')).length") == 1
    assert page.evaluate("window.hacked") is None
    page.close()


def test_ten_thousand_saves_are_a_page_of_ordinary_size(open_page: Open, tmp_path: Path) -> None:
    page = open_page(many(10_000))

    path = figure(page, "metric 0").locator(".curve").get_attribute("d") or ""
    assert 1200 < path.count("L") <= 2500
    assert (tmp_path / "page.html").stat().st_size < 700_000
    assert page.locator("tbody tr").count() < 310
    # A mark at each point would hide the curve: there is one at its end, and one at the best.
    assert figure(page, "metric 0").locator(".mark:not([data-kind])").count() == 2


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


def test_a_run_without_metrics_says_how_to_get_curves(open_page: Open, run_dir: Path) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2)) as state:
        state.save()
    page = open_page(overview(Run(run_dir)))

    assert "No save was given a metric" in page.locator("main").inner_text()


def test_without_scripts_the_tables_are_there(open_page: Open, facts: dict[str, Any]) -> None:
    page = open_page(facts, java_script_enabled=False)

    assert page.locator("tbody tr").count() >= 16
