"""Shortens the tracebacks of this library's errors to the line of the user that called it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from .errors import ResumableError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Class = TypeVar("_Class")


def shortened(error: BaseException) -> BaseException:
    """Return an error of this library without the lines of code that raised it, for the user's traceback.

    All lines are kept with RESUMABLE_FULL_TRACEBACK=1, and where code of the user is among them.
    """
    if isinstance(error, ResumableError) and not os.environ.get("RESUMABLE_FULL_TRACEBACK"):
        cause = error.__cause__
        if cause is not None and _is_all_ours(cause.__traceback__):
            cause.__traceback__ = None
        if _is_all_ours(error.__traceback__):
            return error.with_traceback(None)
    return error


def _is_all_ours(lines: TracebackType | None) -> bool:
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(lines)]
    return {name.partition(".")[0] for name in names} <= {__package__, "torch", *sys.stdlib_module_names}


def short(function: _Function) -> _Function:
    """Let a public function raise errors of this library at the line that calls it."""
    kind, shorten = ResumableError, shortened

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except kind as error:
            raise shorten(error)  # RESUMABLE_FULL_TRACEBACK=1 shows where  # noqa: B904

    # With the globals of its module: doctest and the warnings ask them where a function is from.
    code = call.__code__.replace(co_name=function.__name__)
    made = FunctionType(code, function.__globals__, function.__name__, None, call.__closure__)
    return cast("_Function", update_wrapper(made, function))


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
