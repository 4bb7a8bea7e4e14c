"""Every error is one of a drawn tree, says what to do, and survives being sent to another process."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pytest

from resumable import ResumableError, ResumableWarning, errors

ERRORS = sorted(ResumableError.__subclasses__(), key=lambda kind: kind.__name__)


def _drawn() -> dict[str, str]:
    """Return what the docstring draws: the names of the errors and of their builtin twins."""
    return dict(re.findall(r" [├└]── (\w+) +\((\w+)\) ", errors.__doc__ or ""))


def _made(kind: type[ResumableError]) -> ResumableError:
    return kind("the disk is full.", fix="make room")


def test_the_tree_that_is_drawn_is_the_tree_of_the_classes() -> None:
    assert _drawn() == {kind.__name__: kind.__bases__[1].__name__ for kind in ERRORS}


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_caught_as_its_builtin_twin_too(kind: type[ResumableError]) -> None:
    twin = {error.__name__: error for error in kind.__mro__}[_drawn()[kind.__name__]]

    assert twin.__module__ == "builtins"
    with pytest.raises(twin, match="the disk is full"):
        raise _made(kind)


@pytest.mark.parametrize("kind", [ResumableError, *ERRORS])
def test_a_message_is_the_problem_and_then_what_to_do(kind: type[ResumableError]) -> None:
    error = _made(kind)

    assert str(error) == "the disk is full.\nFix: make room"
    assert (error.problem, error.fix) == ("the disk is full.", "make room")


@pytest.mark.parametrize("kind", [ResumableError, *ERRORS])
@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_is_the_same_after_a_copy_or_another_process(
    kind: type[ResumableError], way: object
) -> None:
    error = _made(kind)
    error.rank = 3  # type: ignore[attr-defined]

    again = way(error)  # type: ignore[operator]

    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def test_our_warnings_can_be_silenced_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumableWarning)
        warnings.warn("a link could not be made", ResumableWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", UserWarning, stacklevel=1)
