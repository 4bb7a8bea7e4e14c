"""Messages: printed for those who have set up no logging, records of "resumable" for all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resumable import RunState


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.name, record.levelname, record.getMessage()))


@pytest.fixture
def handler() -> Iterator[Kept]:
    """A handler, which a test adds to a logger; afterwards no logger has it, nor a level."""
    found = Kept()
    yield found
    for name in (None, "resumable"):
        logging.getLogger(name).removeHandler(found)
    logging.getLogger("resumable").setLevel(logging.NOTSET)


def start(run_dir: Path, **options: bool) -> str:
    """Start a training; return what it says of that."""
    RunState.load(run_dir, model=torch.nn.Linear(1, 1), **options).close()  # type: ignore[arg-type]
    return f"{run_dir} is empty: starting fresh"


def test_without_logging_a_message_is_printed_as_it_is(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = start(run_dir)

    assert capsys.readouterr() == (f"{text}\n", "")


@pytest.mark.parametrize("logger", [None, "resumable"])
def test_with_a_handler_a_message_is_a_record_and_is_not_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str], handler: Kept, logger: str | None
) -> None:
    logging.getLogger(logger).addHandler(handler)
    text = start(run_dir)

    assert handler.found == [("resumable", "INFO", text)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("has_handler", [False, True])
def test_a_level_that_the_user_has_set_stays(
    run_dir: Path, capsys: pytest.CaptureFixture[str], handler: Kept, has_handler: bool
) -> None:
    logging.getLogger("resumable").setLevel(logging.WARNING)
    if has_handler:
        logging.getLogger().addHandler(handler)
    start(run_dir)

    assert handler.found == []
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("resumable").level == logging.WARNING


@pytest.mark.parametrize("what", ["all of it", "this logger"])
def test_what_logging_disables_is_not_printed(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    if what == "this logger":
        monkeypatch.setattr(logging.getLogger("resumable"), "disabled", True)
    else:
        monkeypatch.setattr(logging.root.manager, "disable", logging.INFO)
    start(run_dir)

    assert capsys.readouterr() == ("", "")


def test_quiet_silences_messages_and_not_what_the_script_prints(
    run_dir: Path, capsys: pytest.CaptureFixture[str], handler: Kept
) -> None:
    start(run_dir, quiet=True)
    with RunState.load(run_dir, quiet=True) as state:
        state.print("step", state.step)
    logging.getLogger().addHandler(handler)
    start(run_dir, quiet=True)

    assert capsys.readouterr() == ("step 0\n", "")
    assert handler.found == []
