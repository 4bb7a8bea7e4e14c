"""What people see of an audit: the terminal, the page, the fields of --json."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from playwright.sync_api import sync_playwright

from resumable.audit import audit, diagnosis, verdicts
from resumable.audit import page as audit_page
from resumable.audit.audit import Verdict
from resumable.audit.diagnosis import Finding, Lost
from resumable.cli.app import main
from resumable.trace.trace_file import At

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\x1b[2J\u202e"

MIDDLE, END = At("batch", 0, 4, 4), At("epoch", 1, 0, 6)
EMA = Lost("ema.shadow", "4 tensors", "train.py:15", "state", "keep it", MIDDLE, None, None)
SEEN = Lost("seen", "number", "train.py:9", "note", "keep it", MIDDLE, 12, 0)
FINDING = Finding(
    "state",
    "optimizer exp_avg of 0.weight",
    MIDDLE,
    "optimizer exp_avg of 0.weight differs by up to 0.0002 at step 4 (epoch 0, batch 4)",
    names=["ema.shadow (4 tensors, train.py:15)"],
    fix='RunState.load(..., extra={"ema": ema})',
    evidence=["batch digests are equal", "learning rates are equal"],
)
FAILED = Finding("script", "the script", END, "it did not come to step 6 (epoch 1)", fix="look at it.")
ALIKE = {"again": True, "once more": True, "stopped and resumed": True}


def made(*findings: Finding, **facts: Any) -> Verdict:
    """A verdict about two boundaries, at the first of which the training was stopped."""
    rows = [{**at._asdict(), "alike": ALIKE} for at in (MIDDLE, END)]
    one = {
        "trial": "straight",
        "code": 143,
        "seconds": 1.5,
        "log": "epoch 0: loss 0.5",
        "has_hung": False,
        "has_left": False,
    }
    given: dict[str, Any] = {"stops": [MIDDLE], "rows": rows, "attempts": [one], "settings": {"threads": 2}}
    return Verdict(["python", "train.py"], [*findings], **given | facts)


def printed(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> list[str]:
    verdicts.print_it(verdict)
    return capsys.readouterr().out.splitlines()


def test_the_verdict_is_the_first_line_with_what_differs_what_is_equal_and_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(made(FINDING, lost=[EMA]), capsys) == [
        "NOT exact: optimizer exp_avg of 0.weight differs by up to 0.0002 at step 4 (epoch 0, batch 4); "
        "batch digests and learning rates are equal -> state is missing: ema.shadow",
        "",
        "  ema.shadow (4 tensors, train.py:15)",
        '  Fix: RunState.load(..., extra={"ema": ema})',
    ]


@pytest.mark.parametrize(
    ("findings", "facts", "word"),
    [
        ([], {}, "exact: stopped and resumed at step 4, it does the same, bit for bit (2 boundaries)"),
        ([], {"stops": [MIDDLE, END]}, "exact: stopped and resumed at step 4 and step 6 (an epoch's end), "),
        ([FINDING._replace(kind="repeat")], {}, "NOT repeatable: optimizer exp_avg of 0.weight differs"),
        ([FINDING._replace(kind="data", names=[])], {}, "NOT exact: .* are equal -> other data$"),
        ([FINDING._replace(kind="randomness")], {}, "NOT exact: .* -> other randomness: ema.shadow$"),
        (
            [FINDING._replace(kind="numbers", names=[])],
            {},
            "NOT exact: .* -> other numbers from equal inputs$",
        ),
        ([FAILED], {}, "FAILED: it did not come to step 6"),
    ],
)
def test_each_class_has_its_word(
    findings: list[Finding], facts: dict[str, Any], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = re.escape(word).replace(r"\.\*", ".*").replace(r"\$", "$")
    assert re.match(pattern, printed(made(*findings, **facts), capsys)[0])


def test_every_class_that_a_finding_can_have_has_a_word() -> None:
    classes = (
        getattr(diagnosis, name) for name in ("REPEAT", "DATA", "RANDOMNESS", "STATE", "NUMBERS", "SCRIPT")
    )
    assert {*verdicts.WORDS} == {*classes}


def test_the_error_of_a_script_stands_in_the_verdict_and_its_last_lines_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = "epoch 0\nTraceback (most recent call last):\n  File ...\nKeyError: 'lr'\n\x1b[2J"
    failed = FAILED._replace(
        text="it did not come to step 6 (epoch 1): it ended with exit code 1: KeyError: 'lr'"
    )
    attempt = {
        "trial": "straight",
        "code": 1,
        "seconds": 1.0,
        "log": log,
        "has_hung": False,
        "has_left": False,
    }

    lines = printed(made(failed, attempts=[attempt], notes=["a note"]), capsys)

    assert lines[0] == f"FAILED: {failed.text}"
    assert lines[-6:-4] == ["It printed last:", "  epoch 0"]
    assert lines[-1] == "  \\x1b[2J"
    assert lines.index("note: a note") < lines.index("It printed last:")


def test_what_is_lost_is_told_with_both_values_and_what_may_not_matter_as_one_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rate = SEEN._replace(name="rate", weight="state", before=0.1, after=0.07)
    other = SEEN._replace(name="shown", where="")
    finding = FINDING._replace(names=["rate (number, train.py:9)"])

    lines = printed(made(finding, lost=[rate, SEEN, other], notes=["another"]), capsys)

    assert "  rate (number, train.py:9): 0.1 without the stop, 0.07 after it" in lines
    assert lines[-2:] == [
        "note: seen (train.py:9) and shown are lost by a resume; nothing that was trained here depends on "
        "them, but a longer training may",
        "note: another",
    ]


def test_many_suspects_are_counted_and_further_findings_told(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"part{number}" for number in range(9)]

    lines = printed(made(FINDING._replace(names=names), FINDING._replace(text="also this", rank=1)), capsys)

    assert lines[0].endswith("part4, part5 and 3 more")
    assert "  and 3 more, which --json tells" in lines
    assert "  rank 1: also this" in lines


def test_the_page_is_written_over_an_older_one_and_over_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    audit_page.write(made(), page)
    audit_page.write(made(FINDING), page)

    assert "NOT exact" in page.read_text()
    assert os.listdir(tmp_path) == ["audit.html"]


def test_an_operation_that_is_not_deterministic_is_named_in_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["aten::put_ (train.py:3): gave other numbers", "aten::put_ (train.py:9): gave other numbers"]
    finding = FINDING._replace(
        kind="repeat", text="not the same: an operation", names=names, cause="operation"
    )

    lines = printed(made(finding), capsys)

    assert lines[0] == "NOT repeatable: not the same: an operation: aten::put_"
    assert lines[2:5] == [
        *(f"  {name}" for name in names),
        "  There batch digests and learning rates are equal.",
    ]


@pytest.mark.parametrize("content", ["", "my thesis", '<!doctype html>\n<html lang="en" data-made-by="res'])
def test_a_file_that_is_no_such_page_is_kept_and_nothing_is_started(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, started = tmp_path / "thesis.html", tmp_path / "started"
    page.write_text(content)

    assert main(["audit", "--html", str(page), "--", "touch", str(started)]) == 2

    assert page.read_text() == content
    assert not started.exists()
    assert "is not a page that `resumable audit` has written" in capsys.readouterr().err


def test_the_command_tells_each_start_as_it_comes_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"

    assert main(["audit", "--html", str(page), "--", "echo", "<b>nothing</b>"]) == 1

    told = capsys.readouterr()
    assert told.out.startswith("FAILED: the script came to no boundary: it ended with exit code 0, and made")
    assert told.out.endswith("It printed last:\n  <b>nothing</b>\n")
    assert re.fullmatch(r"straight \.\.\. \d+\.\d s\n", told.err)
    assert "&lt;b&gt;nothing" in page.read_text()


def test_json_has_just_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", "--", "true"]) == 1
    found = json.loads(capsys.readouterr().out)

    section = DOCS.read_text().partition("## `resumable audit")[2].partition("\n## ")[0]
    heads = [re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in section.split("\n**")]
    top, finding, lost, row, attempt = (
        {n for h in part for n in re.findall(r"`(\w+)`", h)} for part in heads
    )
    assert {*found} == {*made().to_json()} == top
    assert {*found["findings"][0]} == {*Finding._fields} == finding
    assert {*found["attempts"][0]} == attempt
    assert {*Lost._fields} == lost
    assert row == {"alike"}
    assert set(re.findall(r"`(\w+)`", section.partition("class: ")[2].partition("(")[0])) == {*verdicts.WORDS}


def test_the_page_has_all_that_was_found_and_nothing_of_what_a_script_says_is_taken_for_markup() -> None:
    attempt = {
        "trial": HOSTILE,
        "code": 1,
        "seconds": 2.0,
        "log": HOSTILE,
        "has_hung": False,
        "has_left": False,
    }
    finding = FINDING._replace(text=HOSTILE, names=[HOSTILE], fix=HOSTILE, what=HOSTILE)
    lost = EMA._replace(name=HOSTILE, kind=HOSTILE, where=HOSTILE, before=HOSTILE[:20], after=HOSTILE[:20])
    facts = {"notes": [HOSTILE], "settings": {HOSTILE: HOSTILE}, "attempts": [attempt], "lost": [lost]}
    text = audit_page.page(made(finding, **facts))

    assert text.count("<script") == 1
    assert "<img" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert text.count("window.hacked=1") >= 20


def test_of_many_boundaries_the_page_shows_those_at_which_something_happens() -> None:
    rows = []
    for step in range(1, 1001):
        alike = {**ALIKE, "stopped and resumed": step < 700}
        rows.append({"kind": "step", "epoch": 0, "batch": 0, "step": step, "alike": alike})
    stops = [At("step", 0, 0, 300)]

    text = audit_page.page(made(FINDING._replace(at=At("step", 0, 0, 700)), rows=rows, stops=stops))

    table = text.partition("whether each training")[2].partition("</table>")[0]
    assert re.findall(r'<tr><td class="number">([\d,]+)<', table) == ["1", "300", "700", "1,000"]
    assert "the 4 at which" in table


def test_a_boundary_that_was_not_reached_is_no_stop_and_no_difference() -> None:
    rows = [
        {**at._asdict(), "alike": {"again": True, "stopped": at == MIDDLE or None}} for at in (MIDDLE, END)
    ]

    text = audit_page.page(made(FAILED, rows=rows, stops=[MIDDLE, END]))

    assert text.count(">stopped and resumed<") == 1
    assert "first difference" not in text
    assert "<strong>1 time</strong><span>step 4</span>" in text


def test_the_page_says_what_is_wrong_once() -> None:
    text = audit_page.page(made(FINDING, FINDING._replace(text="also this"), lost=[EMA]))

    assert text.count("differs by up to 0.0002 at step 4") == 1
    assert text.count("also this") == 1
    repeat = FINDING._replace(kind="repeat")
    assert "There batch digests and learning rates are equal." in audit_page.page(made(repeat))


def test_the_page_says_how_each_start_ended() -> None:
    one = {"trial": "again", "code": 1, "seconds": 3.0, "log": "", "has_hung": False, "has_left": False}
    left = {**one, "code": 143, "has_left": True}
    stopped = {**left, "trial": "stopped and resumed"}
    starts = [one, left, stopped, stopped, {**one, "has_hung": True}]

    text = audit_page.page(made(attempts=starts))

    assert re.findall(r"<summary>(.*?)</summary>", text) == [
        "1. again: exit code 1, 3 s",
        "2. again: ended after the last boundary that was asked for, exit code 143, 3 s",
        "3. stopped and resumed: stopped at step 4 (epoch 0, batch 4), exit code 143, 3 s",
        "4. stopped and resumed: ended after the last boundary that was asked for, exit code 143, 3 s",
        "5. again: it hung, and was ended, 3 s",
    ]


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_the_page_fits_a_phone_is_dark_where_that_is_liked_and_is_reached_by_the_keyboard(
    tmp_path: Path,
) -> None:
    wide = FINDING._replace(text="wide" * 90, names=["name" * 90], fix="fix" * 90)
    attempt = {
        "trial": "straight",
        "code": 1,
        "seconds": 1.0,
        "log": "x" * 500,
        "has_hung": False,
        "has_left": False,
    }
    verdict = made(wide, lost=[EMA._replace(where="p" * 300)], attempts=[attempt], notes=["n" * 300])
    verdict.command = ["python", "train" * 60]
    audit_page.write(verdict, file := tmp_path / "page.html")
    asked: list[str] = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(
            viewport={"width": 375, "height": 700}, is_mobile=True, has_touch=True, color_scheme="dark"
        )
        for event in ("request", "console", "pageerror"):
            page.on(event, lambda what: asked.append(str(getattr(what, "url", what))))
        page.goto(file.as_uri())
        page.locator("summary").click()
        width = page.evaluate("document.documentElement.scrollWidth")
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => Number(one.tagName[1]))")
        count = page.locator("a, button, summary, pre, .scroll").count()
        unnamed = page.locator(':is(pre, .scroll):not([tabindex="0"][aria-label])').count()
        reached = set()
        for _ in range(count):
            page.keyboard.press("Tab")
            reached.add(page.evaluate("document.activeElement.outerHTML.slice(0, 80)"))
        browser.close()

    assert asked == [file.as_uri()]
    assert (width, colour) == (375, "rgb(20, 23, 27)")
    assert levels[0] == 1
    assert all(later - before <= 1 for before, later in pairwise(levels))
    assert (len(reached), unnamed) == (count, 0)


@pytest.mark.heavy
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_what_differs_is_seen_on_a_phone_and_what_is_lost_in_a_window_without_scrolling(
    tmp_path: Path,
) -> None:
    rows = [{**END._asdict(), "alike": {**ALIKE, "stopped and resumed": False}}]
    lost = [EMA._replace(name="loader.sampler.level", where="curriculum_forgotten.py:62", fix="fix it " * 9)]
    audit_page.write(made(FINDING, rows=rows, lost=lost), file := tmp_path / "page.html")
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        page.goto(file.as_uri())
        hidden = page.eval_on_selector_all(
            ".scroll", "all => all.map(one => one.scrollWidth - one.clientWidth)"
        )
        line = page.get_by_text("curriculum_forgotten.py:62").last.bounding_box()
        page.set_viewport_size({"width": 390, "height": 700})
        badge = page.locator("td .differs", has_text="differs").bounding_box()
        browser.close()

    assert hidden == [0, 0, 0]
    assert line is not None
    assert badge is not None
    assert line["height"] < 30
    assert badge["x"] + badge["width"] < 375


SHOWN = re.findall(r"```text\n((?:NOT|note).*?)```", (DOCS.parent / "audit.md").read_text(), re.DOTALL)
SHOWN_BY = {re.search(r"(\w+)\.py:\d", text)[1]: text for text in SHOWN if ".py:" in text}  # type: ignore[index]


@pytest.mark.nightly
@pytest.mark.heavy
@pytest.mark.parametrize("name", SHOWN_BY)
def test_what_the_page_about_audits_shows_is_what_such_a_script_is_told(
    name: str,
    forks: Forks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    script = next((Path(__file__).parent / "zoo").glob(f"*/{name}.py"))
    told = printed(audit.audit([sys.executable, str(script)], start=forks), capsys)

    for line in filter(None, SHOWN_BY[name].splitlines()):
        assert _without_sizes(line) in [*map(_without_sizes, told)]


def _without_sizes(line: str) -> str:
    # (how far numbers are apart depends on the processor)
    return re.sub(r"by up to \S+ \(in [\d,]+", "by up to ... (in ...", line)
