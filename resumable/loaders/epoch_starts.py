"""The ways to open an epoch of a DataLoader: at its beginning, after a resume, and in its middle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..errors import warn
from ..files import large_files
from .generators import rng, search, worker_rng
from .workers import resharding
from .workers.datasets import Stream
from .workers.order import Draws, Generators, Order
from .workers.states import Standing, Start

Saved = Mapping[str, Any]
"""What `LoaderSource.collect` has returned."""


class Opening:
    """An epoch that begins in this process, with new workers or those of the epoch before."""

    is_new_epoch = True
    """Whether the epoch is opened at its beginning."""

    def __init__(self) -> None:
        self.workers: Mapping[int, Standing] = {}
        self.starts: Mapping[int, Start] = {}
        self.turn = 0

    def seed_workers(self, generators: Generators) -> None:
        """Prepare the generators from which workers are seeded."""

    def draw_order(self, order: Order) -> None:
        """Prepare the generators, and the sampler, for the order that is drawn next."""


class NextEpoch(Opening):
    """An epoch that begins with workers in their states at the end of the one before."""

    def __init__(self, saved: Saved, generators: Generators) -> None:
        super().__init__()
        self.workers = standings(saved)
        self.starts = {number: Start(at, is_next_epoch=True) for number, at in self.workers.items()}
        self._made: Draws | None = saved["made"]
        self._generators = generators
        self._live: Draws | None = generators.read()

    def seed_workers(self, generators: Generators) -> None:
        """Restore the generators as they were before the workers were made."""
        if self._made is not None:
            generators.write(self._made)

    def draw_order(self, order: Order) -> None:
        """Restore this process's generators: the order is drawn from them."""
        if self._live is not None:
            self._generators.write(self._live)
            self._live = None


class MidEpoch(Opening):
    """An epoch that continues: its order is drawn again, and what is done is skipped without loading."""

    is_new_epoch = False

    def __init__(
        self, saved: Saved, generators: Generators, loader: DataLoader[Any], shows: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.live = generators.read()
        """The generators of this process."""
        self._draws_at_save = worker_rng.read({})
        self._loader = loader
        self._order = {**saved["order"], "is_left": saved["is_left"], "samples": saved["samples"]}
        self._made: Draws | None = None
        if saved["num_workers"] == loader.num_workers:
            self.workers, self.turn, self._made = standings(saved), saved["turn"], saved["made"]
            self.starts = _starts(self.workers, shows)

    @property
    def began(self) -> worker_rng.States:
        """Return the generators as a stream began that is loaded in this process."""
        return self.starts[0].standing.began if self.starts else {}

    def seed_workers(self, generators: Generators) -> None:
        """Restore the generators as they were before the workers were made; give other workers new seeds."""
        if self._made is not None:
            generators.write(self._made)
            return
        # As many workers, on as many ranks, would have continued from their own states. These begin with
        # new seeds, the same at every resume: with the old ones they would draw the epoch's first numbers.
        loader, rank = self._loader, resharding.deal(self._loader).rank
        text = f"{torch.initial_seed()} {self._order['samples']} {rank} {loader.num_workers}"
        seed = int(large_files.digest(text.encode())[:15], 16)
        (loader.generator or torch.default_generator).manual_seed(seed)
        for path, generator in search.find([loader.dataset, loader.collate_fn]).items():
            rng.seed_one(generator, f"{text} {path}")

    def draw_order(self, order: Order) -> None:
        """Let the order be drawn again from the same generators."""
        order.go_on(self._order, self.live if self._loader.num_workers else None)

    def warn_of_shared_draws(self, stream: Stream) -> None:
        """Warn of a stream run again in this process that drew where the training draws too."""
        if not self.starts or self.starts[0].standing.data:
            return
        began, now, live = self.began, worker_rng.read({}), self._draws_at_save
        if not began:
            # Stopped in the first batch: nothing was run again.
            return
        shared = [
            name
            for name in now
            if not rng.is_same(began[name], now[name]) and not rng.is_same(live[name], now[name])
        ]
        if shared:
            name = type(stream.dataset).__name__
            warn(
                f"{name} and the training draw from the same generators ({', '.join(shared)}). What the "
                "stream keeps of its draws (a shuffle buffer) may not be what it was: let it draw from a "
                "generator of its own, give it a state_dict, or load it in a worker."
            )


def standings(saved: Saved) -> dict[int, Standing]:
    """Return the states of a checkpoint's workers, by number."""
    return {number: Standing.restored(at) for number, at in enumerate(saved["workers"]) if at is not None}


def _starts(workers: Mapping[int, Standing], shows: Callable[[], bool]) -> dict[int, Start]:
    most = max((at.batches for at in workers.values()), default=0)
    shown = next((number for number, at in workers.items() if at.batches == most), None)
    return {
        number: Start(at, is_next_epoch=at.batches == 0, shows_progress=number == shown and shows())
        for number, at in workers.items()
    }
