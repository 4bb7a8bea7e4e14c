"""Starts a script again and again, each time in a fork of a process that has imported what it imports.

rehearsal.py SCRIPT; each line of its input is an order, and each line of its output how that start ended.
"""

from __future__ import annotations

import ast
import json
import os
import runpy
import signal
import sys
import threading
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from resumable import ResumableWarning


def import_what_it_imports(script: str) -> None:
    """Import the modules that the script names, and the names that it takes from them."""
    for node in ast.walk(ast.parse(Path(script).read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # Some packages import what is behind a name when it is asked for
            for alias in node.names:
                getattr(import_module(node.module), alias.name)
    # The first optimizer imports torch's compiler.
    torch.optim.SGD([torch.zeros(1)])


def kill_after(steps: int, milliseconds: float, number: int) -> None:
    """Send this process a signal so long after so many steps of optimizers."""
    done = 0

    def count(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == steps:
            threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), number)).start()

    register_optimizer_step_post_hook(count)


def run(script: str, order: dict[str, Any]) -> None:
    """Run the script as if it were started by itself, with our warnings as errors."""
    warnings.simplefilter("error", ResumableWarning)
    # How fast this machine's disk is just now is not the script's business.
    warnings.filterwarnings("ignore", "save.. has waited", ResumableWarning)
    if order["kill"]:
        kill_after(*order["kill"])
    os.environ.update(order["environment"])
    sys.argv = [script, *order["arguments"]]
    runpy.run_path(script, run_name="__main__")


def main(script: str) -> None:
    sys.path.insert(0, str(Path(script).parent))
    import_what_it_imports(script)
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            os.chdir(order.get("folder", "."))
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            # What is raised ends this process as it ends any other: with a traceback, and exit handlers.
            run(script, order)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main(sys.argv[1])
