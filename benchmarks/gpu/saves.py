"""Measure saves and loads of one size: python -m benchmarks.gpu.saves MEGABYTES DEVICE FOLDER SECONDS OUT"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from .. import alone, measures
from ..contenders import CONTENDERS, Contender, missing
from ..limits import Limits
from ..rounds import Figures, Values, in_turns, reason_of
from ..training import bytes_of, gpt, tensors_of

NAMES = ("resumable", "torch.save", "safetensors", "dcp.async_save", "dcp.async_save, thread")
WAYS = (
    *("write: buffered", "write: paced", "write: O_DIRECT, 4 threads", "read: 4 threads"),
    *("copy: from the GPU", "copy: to the GPU"),
)
ROUNDS = 3


def main() -> None:
    """Measure for as long as there is time; store after each part what is known by then."""
    megabytes, device, folder, seconds, out = sys.argv[1:]
    warnings.simplefilter("ignore")
    logging.disable()
    measured = Measured(float(megabytes), device, Path(folder) / "saves", float(seconds))
    for part in (measured.memory, measured.make, measured.save_and_load, measured.lost, measured.items):
        part()
        Path(out).write_text(json.dumps(measured.result))


class Measured:
    """What was measured so far, of one size; each part adds its figures."""

    def __init__(self, megabytes: float, device: str, folder: Path, seconds: float) -> None:
        self._megabytes, self._device, self._folder = megabytes, device, folder
        self._end = time.perf_counter() + seconds
        self._contenders: dict[str, Contender] = {}
        self._errors: dict[str, dict[str, str]] = {}
        self._figures: dict[str, Values] = {}
        self.result: dict[str, Any] = {"contenders": self._figures, "errors": self._errors}

    def memory(self) -> None:
        """Measure the memory that saves take, in a process of its own."""
        name, place, limit = "resumable", self._folder / "alone", self._share(0.25)
        try:
            found = alone.measure(name, self._megabytes, self._device, place, limit)
            self._add({name: {column: [value] for column, value in found.items()}})
        except Exception as exc:
            self._errors.setdefault(name, {})["memory"] = reason_of(exc)

    def make(self) -> None:
        """Make the training and the contenders that can be had."""
        self._training = gpt(self._megabytes, self._device)
        self.result["state"] = {
            "bytes": bytes_of(self._training.parts),
            "tensors": len(tensors_of(self._training.parts)),
            "step_seconds": self._training.step_seconds,
        }
        for name in NAMES:
            if reason := missing(name):
                self._errors[name] = {"all": reason}
                continue
            try:
                folder = self._folder / name.replace(", ", "-")
                self._contenders[name] = CONTENDERS[name](self._training.parts, folder, self._device)
            except Exception as exc:
                self._errors[name] = {"all": reason_of(exc)}

    def save_and_load(self) -> None:
        """Measure calls, saves until durable, and loads, beside the raw limits."""
        limits = Limits(int(self.result["state"]["bytes"]), self._folder / "limits", self._device)
        ways = {name: _seconds(limits.ways[name]) for name in WAYS if name in limits.ways}
        taken = self._turns("save and load", measures.save_and_load, share=0.4, also=ways)
        limits.close()
        self.result["limits"] = {name: taken.pop(name)["seconds"] for name in ways if name in taken}
        self._add(taken)

    def lost(self) -> None:
        """Measure the training time that a save takes: pairs of loops, with one wait at each end."""
        jobs = {name: partial(measures.lost, steps=self._steps(name)) for name in self._known()}
        self._add(self._turns("training time", jobs, share=0.6, numbered=True))

    def items(self) -> None:
        """Measure the longest step of a loop that reads its loss."""
        jobs = {name: partial(measures.longest_item, steps=self._steps(name)) for name in self._known()}
        self._add(self._turns("reading the loss", jobs, share=0.9))

    def _turns(
        self,
        what: str,
        measured: Callable[..., Figures] | Mapping[str, Callable[..., Figures]],
        *,
        share: float,
        numbered: bool = False,
        also: Mapping[str, Callable[[int], Figures]] | None = None,
    ) -> dict[str, Values]:
        def job(name: str, contender: Contender, number: int) -> Figures:
            own = measured[name] if isinstance(measured, Mapping) else measured
            return own(self._training, contender, **({"number": number} if numbered else {}))

        # One that leaves nothing to load has failed before.
        chosen = measured if isinstance(measured, Mapping) else self._contenders
        jobs = {name: partial(job, name, one) for name, one in self._contenders.items() if name in chosen}
        each = self._share(share) / max(1, len(jobs))
        return in_turns(what, {**jobs, **(also or {})}, ROUNDS, each, self._errors, self._end)

    def _known(self) -> list[str]:
        return [name for name in self._contenders if "durable" in self._figures.get(name, {})]

    def _steps(self, name: str) -> int:
        """Return how many steps a background save takes, and some more: the GPU is not busy with it."""
        values = self._figures[name]
        background = statistics.median(values["durable"]) - statistics.median(values["call"])
        return max(4, math.ceil(1.6 * background / self._training.step_seconds))

    def _share(self, share: float) -> float:
        return max(2.0, share * (self._end - time.perf_counter()))

    def _add(self, values: Mapping[str, Values]) -> None:
        for name, columns in values.items():
            self._figures.setdefault(name, {}).update(columns)


def _seconds(way: Callable[[], float]) -> Callable[[int], Figures]:
    return lambda number: {"seconds": way()}


if __name__ == "__main__":
    main()
