"""Explains errors after a resume at an epoch's end, where the script needs values from the skipped loop."""

from __future__ import annotations

import dis
import re
from types import CodeType, FrameType, TracebackType

from ..errors import ResumableError
from ..run.history_writer import History
from .position import Position


def explain(error: BaseException, history: History, position: Position) -> str | None:
    """Return why the script failed, if it missed what the loop leaves; the next start skips the checkpoint.

    It goes by the error and the code of the frames that it came through.
    """
    number = history.stands_on
    if number is None or history.attempt is None or not position.is_behind_last_batch():
        return None
    missing = _missing(error)
    if missing is None:
        return None
    history.skip(number, f"{type(error).__name__}: {error}")
    what, instead = missing
    return (
        f"this start resumed from checkpoint {number}, after the last batch of epoch {position.epoch}. The "
        f"loop over the batches had none left, so {what}.\n"
        f"Fix: {instead}. The next start resumes from an earlier checkpoint, if there is one."
    )


def _missing(error: BaseException) -> tuple[str, str] | None:
    """Return what the script lacks without the loop, and what to write instead."""
    if _is_of_nothing(error):
        return (
            "sums, counts and values from the loop are still as they were before it",
            "average with state.mean(loss=loss) in the loop, and read state.means['loss'] after it",
        )
    name = _name(error) if isinstance(error, NameError) else None
    if name is None or not any(_assigns(frame.f_code, name) for frame in _frames(error.__traceback__)):
        return None
    return (
        f"{name!r} was never assigned",
        f"average it with state.mean({name}={name}) in the loop and read state.means[{name!r}] after it, or "
        f"assign {name} before the loop",
    )


def _is_of_nothing(error: BaseException) -> bool:
    """Whether it is what comes of values that a loop without a batch leaves: 0, None, nothing to sum up."""
    if isinstance(error, (ArithmeticError, LookupError, StopIteration)):
        return not isinstance(error, ResumableError)
    kinds = (ValueError, RuntimeError, TypeError, AttributeError)
    return isinstance(error, kinds) and bool(re.search(r"\bempty\b|at least one|NoneType", str(error)))


def _name(error: NameError) -> str | None:
    if name := getattr(error, "name", None):
        return str(name)
    found = re.search(r"variable '(\w+)'", str(error))
    return found and found[1]


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    frames = []
    while traceback:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return frames


def _assigns(code: CodeType, name: str) -> bool:
    stores = (one.argval for one in dis.get_instructions(code) if one.opname.startswith("STORE_"))
    return any(name in (found if isinstance(found, tuple) else (found,)) for found in stores)
