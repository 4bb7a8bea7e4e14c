"""Runs tests on a copy of the library, in forks of a process that has imported what both need.

Each line of its input is an order. What the library or a test imports of torch, and pytest's plugins, are
imported once; the library itself and the tests are imported in each fork.
"""

from __future__ import annotations

import gc
import json
import os
import sys

import hypothesis  # noqa: F401 (what takes long to import is there once)
import numpy  # noqa: F401
import pytest
import torch

# The first optimizer imports torch's compiler.
torch.optim.SGD([torch.zeros(1)])
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
# What was imported is neither copied nor looked through again in every fork.
gc.collect()
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    if (child := os.fork()) == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
        # For what imports tests.support
        sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        os.environ["PYTHONPATH"] = order["folder"]
        code = int(pytest.main(order["arguments"]))
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
