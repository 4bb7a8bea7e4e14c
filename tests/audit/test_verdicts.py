"""What people see of an audit: the terminal, the fields of --json."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from places import CLI_PAGE, DATA

from resumable.audit import audit, verdicts
from resumable.audit.audit import Verdict
from resumable.audit.diagnosis import Finding, Lost
from resumable.cli.app import main
from resumable.trace.trace_file import At

MIDDLE, END = At("batch", 0, 4, 4), At("epoch", 1, 0, 6)
EMA = Lost("ema.shadow", "4 tensors", "keep it", MIDDLE, None, None)


SEEN = Lost("seen", "number", "keep it", MIDDLE, 12, 0)
FINDING = Finding(
    "state",
    "optimizer exp_avg of 0.weight",
    MIDDLE,
    "optimizer exp_avg of 0.weight differs by up to 0.0002 at step 4 (epoch 0, batch 4)",
    names=["ema.shadow (4 tensors)"],
    fix='RunState.load(..., extra={"ema": ema})',
    evidence=["batch digests are equal", "learning rates are equal"],
)
FAILED = Finding("script", "the script", END, "it did not come to step 6 (epoch 1)", fix="look at it.")


def made(*findings: Finding, **facts: Any) -> Verdict:
    """A verdict about two boundaries, at the first of which the training was stopped."""
    one = {
        "trial": "straight",
        "code": 143,
        "seconds": 1.5,
        "log": "epoch 0: loss 0.5",
        "has_hung": False,
        "has_left": False,
    }
    given: dict[str, Any] = {
        "stops": [MIDDLE],
        "boundaries": 2,
        "attempts": [one],
        "settings": {"threads": 2},
    }
    return Verdict(["python", "train.py"], [*findings], **given | facts)


def printed(verdict: Verdict, capsys: pytest.CaptureFixture[str]) -> list[str]:
    verdicts.print_it(verdict)
    return capsys.readouterr().out.splitlines()


def test_the_first_line_is_the_verdict_and_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert printed(made(FINDING, lost=[EMA]), capsys) == [
        "NOT exact: optimizer exp_avg of 0.weight differs by up to 0.0002 at step 4 (epoch 0, batch 4); "
        "batch digests and learning rates are equal -> state is missing: ema.shadow",
        "",
        "  ema.shadow (4 tensors)",
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


def test_a_failed_script_is_shown_with_its_error_and_last_lines(
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


def test_what_is_lost_is_reported_with_both_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rate = SEEN._replace(name="rate", before=0.1, after=0.07)
    other = SEEN._replace(name="shown")
    finding = FINDING._replace(names=["rate (number)"])

    around = SEEN._replace(name="log", kind="it holds an open file")
    finding = finding._replace(names=[*finding.names, "log.lines (number)"])

    lines = printed(made(finding, lost=[rate, SEEN, other, around], notes=["another"]), capsys)

    assert "  rate (number): 0.1 without the stop, 0.07 after it" in lines
    assert lines[-2:] == [
        "note: seen (number) and shown (number) are lost by a resume; nothing that was trained here depends "
        "on them, but a longer training may",
        "note: another",
    ]


def test_many_suspects_are_counted_and_further_findings_reported(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"part{number}" for number in range(9)]

    lines = printed(made(FINDING._replace(names=names), FINDING._replace(text="also this", rank=1)), capsys)

    assert lines[0].endswith("part4, part5 and 3 more")
    assert "  and 3 more, which --json tells" in lines
    assert "  rank 1: also this" in lines


def test_an_operation_that_is_not_deterministic_is_named(
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


def test_json_has_just_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--json", "--", "true"]) == 1
    found = json.loads(capsys.readouterr().out)

    section = CLI_PAGE.read_text().partition("## `resumable audit")[2].partition("\n## ")[0]
    heads = [re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in section.split("\n**")]
    top, finding, lost, attempt = ({n for h in part for n in re.findall(r"`(\w+)`", h)} for part in heads)
    assert {*found} == {*made().to_json()} == top
    assert {*found["findings"][0]} == {*Finding._fields} == finding
    assert {*found["attempts"][0]} == attempt
    assert {*Lost._fields} == lost
    assert set(re.findall(r"`(\w+)`", section.partition("class: ")[2].partition("(")[0])) == {*verdicts.WORDS}


PIECES = (CLI_PAGE.parent / "audit.md").read_text().split("```text\n")
SHOWN_BY = {
    re.findall(r"/broken/(\w+)\.py", before)[-1]: after.partition("```")[0]
    for before, after in pairwise(PIECES)
    if after.startswith("NOT")
}
"""What the page shows, by the script that it names before."""


@pytest.mark.nightly
@pytest.mark.heavy
@pytest.mark.parametrize("name", SHOWN_BY)
def test_what_the_page_about_audits_shows_is_what_such_a_script_gets(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    script = next((DATA / "zoo").glob(f"*/{name}.py"))
    told = printed(audit.audit([sys.executable, str(script)]), capsys)

    for line in filter(None, SHOWN_BY[name].splitlines()):
        assert _without_sizes(line) in [*map(_without_sizes, told)]


def _without_sizes(line: str) -> str:
    # How far numbers are apart depends on the processor
    return re.sub(r"by up to \S+ \(in [\d,]+", "by up to ... (in ...", line)
