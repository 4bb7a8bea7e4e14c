"""At most one save is in flight, and its error is reported once and never lost."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from forks import Forks

from resumable.saving.writer import PendingSave, Writer


class DiskError(OSError):
    """What goes wrong in these tests."""


def _fail() -> None:
    raise DiskError("the disk is gone")


def _submit(writer: Writer, job: object, number: int = 1) -> PendingSave:
    return writer.submit(number, Path(f"{number:06}"), job)  # type: ignore[arg-type]


def test_a_save_knows_its_number_its_place_and_whether_it_has_ended() -> None:
    go = threading.Event()
    saved = _submit(Writer(), go.wait, 41)

    assert (saved.number, saved.path) == (41, Path("000041"))
    assert repr(saved) == "<save 41: on its way>"
    go.set()
    saved.wait()
    assert repr(saved) == "<save 41: ended>"


def test_a_second_save_begins_only_when_the_first_has_ended() -> None:
    writer, second_began, overlapped = Writer(), threading.Event(), []

    _submit(writer, lambda: overlapped.append(second_began.wait(0.1)))
    _submit(writer, second_began.set, 2).wait()

    assert overlapped == [False]


@pytest.mark.parametrize("next_call", [Writer.wait, lambda writer: _submit(writer, lambda: None, 2)])
def test_an_error_is_raised_by_the_next_call_and_by_no_other(next_call: object) -> None:
    writer = Writer()
    _submit(writer, _fail)

    with pytest.raises(DiskError, match="the disk is gone"):
        next_call(writer)  # type: ignore[operator]

    writer.wait()
    done: list[bool] = []
    _submit(writer, lambda: done.append(True), 2).wait()
    assert done == [True]


def test_an_error_that_its_handle_has_raised_is_not_raised_again() -> None:
    writer = Writer()
    saved = _submit(writer, _fail)
    with pytest.raises(DiskError):
        saved.wait()

    writer.wait()
    _submit(writer, lambda: None, 2).wait()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, SystemExit])
def test_no_kind_of_error_ends_in_a_thread_without_being_reported(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("out of it")

    writer = Writer()
    _submit(writer, fail)

    with pytest.raises(error, match="out of it"):
        writer.wait()


class Image:
    """The host copy of a state, which says when its memory is free."""

    def __init__(self, freed: threading.Event) -> None:
        self._freed = freed

    def __del__(self) -> None:
        self._freed.set()


def _write(image: Image, fails: bool) -> None:
    if fails:
        _fail()


def _commit(image: Image, fails: bool) -> None:
    try:
        _write(image, fails)
    except DiskError as exc:
        raise RuntimeError("the save failed") from exc


def test_the_memory_of_a_failed_save_is_free_although_its_error_is_kept() -> None:
    freed = threading.Event()
    image = Image(freed)

    saved = _submit(Writer(), partial(_commit, image, True))
    del image
    with pytest.raises(RuntimeError) as kept:
        saved.wait()

    assert freed.is_set()
    assert isinstance(kept.value.__cause__, DiskError)


IMPORTS = "from pathlib import Path\nfrom resumable.saving.writer import Writer\n"


@pytest.mark.heavy
def test_the_interpreter_waits_at_its_end_for_the_save_in_flight() -> None:
    script = IMPORTS + (
        "import threading\n"
        "job = lambda: (threading.main_thread().join(), print('durable'))\n"
        "Writer().submit(1, Path('x'), job)\n"
        "print('script ended', flush=True)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ended.stdout.split("\n") == ["script ended", "durable", ""]


def test_an_error_never_asked_for_is_reported_at_the_interpreters_end(forks: Forks, tmp_path: Path) -> None:
    ended = forks.run(["-c", f"{IMPORTS}Writer().submit(1, Path('x'), lambda: 1 / 0)"], tmp_path).checked()

    assert "ZeroDivisionError" in ended.err


@pytest.mark.heavy
def test_an_error_that_was_raised_is_not_reported_again_at_the_end(forks: Forks, tmp_path: Path) -> None:
    asked = "try:\n Writer().submit(1, Path('x'), lambda: 1 / 0).wait()\nexcept ZeroDivisionError:\n pass"

    assert forks.run(["-c", IMPORTS + asked], tmp_path).checked().err == ""
