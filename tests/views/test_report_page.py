"""The page of a report in a real browser: what it shows, does with mouse and keys, and cannot be made to."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
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
    pytest.mark.nightly,
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


def test_dragging_the_mouse_zooms_all_charts(open_page: Open, facts: dict[str, Any]) -> None:
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
