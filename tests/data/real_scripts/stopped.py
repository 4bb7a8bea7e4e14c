"""Run a script slowly, and stop it at its n-th backward pass or optimizer step: stopped.py HOW N SCRIPT.

HOW is "kill" (SIGKILL to this process), "term" (SIGTERM to the whole process group) or "never"; "never" says
on stderr how many passes and steps there were.
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
import time
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

how, number, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
# An iterator, since the library would warn of a number that decides in a method that a script calls.
ticks = itertools.count(1)


def tick(*_: object) -> None:
    count = next(ticks)
    if how != "never":
        # Otherwise the training is killed before its first checkpoint is on the disk.
        time.sleep(0.003 if count != number else 0.3)
    if count == number and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif count == number and how == "term":
        os.killpg(0, signal.SIGTERM)


def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    whole(tensor, *args, **options)
    tick()


whole = torch.Tensor.backward
torch.Tensor.backward = backward  # type: ignore[method-assign,assignment]
register_optimizer_step_post_hook(tick)
sys.argv = sys.argv[3:]
runpy.run_path(script, run_name="__main__")
if how == "never":
    print(f"ticks {next(ticks) - 1}", file=sys.stderr)
