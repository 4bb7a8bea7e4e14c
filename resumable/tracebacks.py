"""Shortens the tracebacks of this library's errors to the line of the user that called it."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper, wraps
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from .errors import ResumableError, RunInUse, UsageError, did_you_mean

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class")
_Loop = TypeVar("_Loop", bound=Callable[..., Iterator[Any]])
_EXAMPLES = {
    "total": "90",
    "saves": "3",
    "run_dir": '"runs/exp", ...',
    "path": '"runs/exp"',
    "which": '"best"',
}


def shorten(error: BaseException) -> bool:
    """Drop the lines of code that raised an error of this library; return whether to raise it with none.

    All lines are kept with RESUMABLE_FULL_TRACEBACK=1, and where code of the user is among them.
    """
    if not isinstance(error, ResumableError) or os.environ.get("RESUMABLE_FULL_TRACEBACK"):
        return False
    cause = error.__cause__
    if cause is not None and _is_all_ours(cause.__traceback__):
        cause.__traceback__ = None
        if isinstance(error, (UsageError, RunInUse)):
            # It stays reachable as the context.
            error.__cause__ = None
    if not _is_all_ours(error.__traceback__):
        return False
    error.__traceback__ = None
    return True


def _is_all_ours(lines: TracebackType | None) -> bool:
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(lines)]
    return {name.partition(".")[0] for name in names} <= {__package__, "torch", *sys.stdlib_module_names}


def short(function: _Function) -> _Function:
    """Let a public function raise errors of this library at the line that calls it."""
    kind, is_shortened, misfit, is_of_the_call = ResumableError, shorten, _misfit, _is_of_the_call

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except kind as error:
            if is_shortened(error):
                raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where
            raise
        except TypeError as error:
            # A variable here would keep itself, and with it the arguments.
            if is_of_the_call(error):
                raise misfit(error, function, args, kwargs) from None
            raise

    # With the globals of its module: doctest and the warnings ask them where a function is from.
    code = call.__code__.replace(co_name=function.__name__)
    made = FunctionType(code, function.__globals__, function.__name__, None, call.__closure__)
    return cast("_Function", update_wrapper(made, function))


def short_loop(loop: _Loop) -> _Loop:
    """Let a generator raise errors of this library at the line that asks it for its next value."""

    @wraps(loop)
    def call(*args: Any) -> Iterator[Any]:
        try:
            yield from loop(*args)
        except ResumableError as error:
            if shorten(error):
                raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where
            raise

    return cast("_Loop", call)


def _is_of_the_call(error: TypeError) -> bool:
    """Whether the call itself failed: there is no line of the function, so the arguments do not fit."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def _misfit(
    error: TypeError, function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> Exception:
    """Return the error for arguments that do not fit a signature, with what to write instead."""
    parameters = inspect.signature(function).parameters
    known = [one for one in parameters.values() if one.name not in ("self", "cls")]
    given = len(args) - len(parameters) + len(known)
    kind, _, name = function.__qualname__.rpartition(".")
    call = kind if name == "__init__" else name
    is_state = kind == "RunState" and name != "load"
    written = f"state.{name}" if is_state else call if call == kind else f"{kind}.{name}".lstrip(".")
    return (
        _unknown(call, known, named)
        or _too_many(call, written, known, given)
        or _too_few(call, written, known[given:], named)
        or error
    )


def _unknown(call: str, known: list[inspect.Parameter], named: Mapping[str, Any]) -> UsageError | None:
    names = [one.name for one in known if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if any(one.kind is one.VAR_KEYWORD for one in known):
        return None
    for one in named:
        if one not in names:
            meant = did_you_mean(one, names, lambda near: f"{near}=")
            fix = f"its arguments are {', '.join(names)}." if names else "leave it out."
            fix = "correct the name." if meant else fix
            return UsageError(f"{call}() has no argument {one}=.{meant}", fix=fix)
    return None


def _too_many(call: str, written: str, known: list[inspect.Parameter], given: int) -> UsageError | None:
    by_place = [one for one in known if one.kind is one.POSITIONAL_OR_KEYWORD]
    if given <= len(by_place):
        return None
    by_name = [f"{one.name}={one.name}" for one in known if one.kind is one.KEYWORD_ONLY]
    fix = f"give the others by name: {', '.join(by_name[:2])}, ..." if by_name else "leave the others out."
    if any(one.kind is one.VAR_KEYWORD for one in known):
        fix = f"write {written}(loss=loss), or {written}(**values)."
    values = "1 value" if given == 1 else f"{given} values"
    problem = f"{call}() was given {values} without a name, and takes {len(by_place) or 'none'}."
    return UsageError(problem, fix=fix)


def _too_few(
    call: str, written: str, rest: list[inspect.Parameter], named: Mapping[str, Any]
) -> UsageError | None:
    lacking = [
        one.name
        for one in rest
        if one.default is one.empty and one.name not in named and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if not lacking:
        return None
    example = ", ".join(_EXAMPLES.get(one, one) for one in lacking)
    return UsageError(f"{call}() lacks {' and '.join(lacking)}.", fix=f"write {written}({example}).")


def short_methods(kind: type[_Class]) -> type[_Class]:
    """Let the public methods and properties of a class raise errors at the line that calls them."""
    for name, method in [*vars(kind).items()]:
        if name.startswith("_") and name not in ("__init__", "__enter__", "__exit__"):
            continue
        if isinstance(method, FunctionType):
            setattr(kind, name, short(method))
        elif isinstance(method, classmethod):
            setattr(kind, name, classmethod(short(method.__func__)))
        elif isinstance(method, property):
            reads, writes = method.fget, method.fset
            made = property(reads and short(reads), writes and short(writes), method.fdel, method.__doc__)
            setattr(kind, name, made)
    return kind
