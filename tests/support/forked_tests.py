"""Runs tests in forks of a process that has imported torch already: each line of its input is an order."""

from __future__ import annotations

import json
import os
import sys

import numpy  # noqa: F401 (what takes long to import is there once)
import pytest
import torch  # noqa: F401

sys.dont_write_bytecode = True
for line in sys.stdin:
    order = json.loads(line)
    if (child := os.fork()) == 0:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["folder"])
        sys.path.insert(0, order["folder"])
        os.environ["PYTHONPATH"] = order["folder"]
        code = int(pytest.main(order["arguments"]))
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
