"""Runs a script in forks of one process, each as Python runs it in a process of its own.

fork_server.py FD SCRIPT ... or fork_server.py FD -m MODULE ...: each line read from the file descriptor is
the order for one fork.
"""

import gc
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

_IMPORTED = ("numpy", "torch", "resumable.state", "resumable.audit.recorder")
_READ_AT_IMPORT = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_"),
    *("TORCH", "PYTORCH", "ATEN_", "DNNL_", "ONEDNN_"),
)
"""How the names begin of what NumPy, torch and the libraries below them read when they are loaded."""


def main(fd: int, arguments: list[str]) -> None:
    """Serve orders until there are no more; in a fork, run the script."""
    sys.orig_argv[-len(sys.argv) :] = arguments
    if is_module := arguments[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), ["-m", *arguments[2:]]
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.realpath(arguments[0])), arguments
    script = "" if is_module else os.path.abspath(arguments[0])
    _put_aside(script)
    _import()
    for order in _forked(fd):
        _become(order)
        _run(script, arguments)


def _put_aside(script: str) -> None:
    """Make room for the script's `__main__`, before a library takes this one for it."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    own = {name: value for name, value in globals().items() if name.startswith("__")}
    vars(main).update(own, __doc__=None, **({"__annotations__": {}} if "__annotations__" in own else {}))
    if script:
        main.__file__, main.__loader__ = script, SourceFileLoader("__main__", script)
    else:
        del main.__file__, main.__cached__
    # By this name the audit takes the frames of this file for the library's and not for the script's.
    globals()["__name__"] = "resumable.audit.fork_server"


def _import() -> None:
    for name in _IMPORTED:
        import_module(name)
    import torch

    class First(torch.optim.Optimizer):
        pass

    # The first optimizer imports torch's compiler.
    First([torch.zeros(1)], {})
    # A collection in a fork, as at its end, would copy the memory of all that was imported.
    gc.freeze()


def _forked(fd: int) -> Iterator[dict[str, Any]]:
    """Yield, in each fork, its order, and nothing in the process that all are forks of."""
    orders = os.fdopen(fd)
    # OpenBLAS ends its threads at a fork and begins them again. A fork would be without any others.
    _wait(os.fork() or os._exit(0))
    if len(os.listdir("/proc/self/task")) > 1:
        return
    os.write(fd, b"ready\n")
    for line in orders:
        if (child := os.fork()) == 0:
            orders.close()
            yield json.loads(line)
            return
        os.write(fd, b"%d\n" % child)
        os.write(fd, b"%d\n" % _wait(child))
    os._exit(0)


def _wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(order: dict[str, Any]) -> None:
    """Make this fork what a process of its own would be."""
    import numpy as np
    import torch

    os.setsid()
    _write_to(order["log"])
    os.environ.clear()
    os.environ.update(order["environment"])
    # All forks would draw the same where a script seeds nothing; Python seeds its own generator in each.
    np.random.seed()
    torch.default_generator.seed()
    _restart_if_set(order)


def _write_to(log: str) -> None:
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(opened, 1)
    os.dup2(opened, 2)
    os.close(opened)


def _restart_if_set(order: dict[str, Any]) -> None:
    """Start a new Python if the script sets a variable that its imports would have read."""
    given, folder, child = order["environment"], os.getcwd(), os.getpid()
    trainings = sys.modules["resumable.audit.recorder"]._followed

    def guarded(change: Callable[..., None]) -> Callable[..., None]:
        def changed(name: bytes, *value: bytes) -> None:
            wanted = os.fsdecode(value[0]) if value else None
            is_read = os.fsdecode(name).startswith(_READ_AT_IMPORT) and not trainings
            if is_read and given.get(os.fsdecode(name)) != wanted and os.getpid() == child:
                os.chdir(folder)
                _write_to(order["log"])
                os.execvpe(order["command"][0], order["command"], given)
            change(name, *value)

        return changed

    os.putenv, os.unsetenv = guarded(os.putenv), guarded(os.unsetenv)


def _run(script: str, arguments: Sequence[str]) -> None:
    try:
        if script:
            with open(script, "rb") as file:
                code = compile(file.read(), script, "exec", dont_inherit=True)
            exec(code, vars(sys.modules["__main__"]))
        else:
            run_module: Callable[[str], None] = vars(runpy)["_run_module_as_main"]
            run_module(arguments[1])
    except Exception as exc:
        trace = exc.__traceback__ and exc.__traceback__.tb_next
        sys.excepthook(type(exc), exc.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
