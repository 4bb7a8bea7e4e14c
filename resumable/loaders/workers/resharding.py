"""Shards an epoch's samples among the ranks, and the rest of them among more or fewer ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from . import torchdata

Base = Mapping[str, Any]
"""The source of an epoch's order before it is sharded: the sampler, its seed, the number of samples."""


class Deal(NamedTuple):
    """How samples are sharded, and which of the ranks this is."""

    shards: int = 1
    rank: int = 0
    drops: bool = False
    """Whether the last samples, too few for all ranks, are dropped; otherwise some are repeated."""

    def each(self, samples: int) -> int:
        """Return the number of samples of each rank."""
        return samples // self.shards if self.drops else -(-samples // self.shards)

    def ours(self, order: Sequence[int], start: int) -> list[int]:
        """Return this rank's share of an order from `start` on; for 0 that is DistributedSampler's."""
        rest = list(order[start:])
        end = self.each(len(rest)) * self.shards
        # Pad with the epoch's first samples: the rest may be shorter than the padding.
        while len(rest) < end:
            rest += order[: end - len(rest)]
        return rest[self.rank : end : self.shards]


def deal(loader: DataLoader[Any]) -> Deal:
    """Return how a loader shards its samples; batch samplers that shard do not show how."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):
        return Deal(sampler.num_replicas, sampler.rank, sampler.drop_last)
    return Deal()


def count(loader: DataLoader[Any]) -> int:
    """Return the number of ranks for which a loader's samplers, of any kind, shard, as they say."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, loader.batch_sampler, inner):
        if isinstance(number := getattr(sampler, "num_replicas", None), int):
            return number
    # Accelerate's shard batches, or a stream.
    shards: tuple[Any, ...] = (loader.batch_sampler, loader.dataset)
    for shard in shards:
        if type(shard).__name__ in ("BatchSamplerShard", "IterableDatasetShard"):
            return int(shard.num_processes)
    return 1


def base(loader: DataLoader[Any]) -> Base | str:
    """Return what a loader draws its next epoch's order from; a text says why that is unknown."""
    sampler: Any = loader.sampler
    # Torchdata's, whose order is the same, counts its samples too.
    kind = DistributedSampler if torchdata.is_distributed(type(sampler)) else type(sampler)
    if loader.batch_sampler is not None and loader.batch_size is None:
        return f"its batches come from a {type(loader.batch_sampler).__name__} of the script's own"
    if kind is RandomSampler and sampler.replacement:
        return "its sampler draws with replacement"
    if kind not in (DistributedSampler, RandomSampler, SequentialSampler):
        return f"its sampler is a {kind.__name__}"
    try:
        samples = len(sampler.dataset if kind is DistributedSampler else sampler.data_source)
    except (TypeError, NotImplementedError):
        return "its samples have no number"
    if kind is RandomSampler and sampler.num_samples != samples:
        return f"its sampler draws {sampler.num_samples} samples of {samples}"
    drawn = {"sampler": kind.__name__, "samples": samples, "shuffle": kind is not SequentialSampler}
    if kind is DistributedSampler:
        own = {"shuffle": bool(sampler.shuffle), "seed": int(sampler.seed), "epoch": int(sampler.epoch)}
        return {**drawn, **own}
    return drawn


def obstacle(then: Base | str, loader: DataLoader[Any]) -> str | None:
    """Return why a loader cannot continue an epoch whose order was drawn from `then`."""
    now = base(loader)
    if isinstance(then, str):
        return f"in the checkpoint {then}"
    if isinstance(now, str):
        return f"in the code {now}"
    if then["samples"] != now["samples"]:
        return f"it had {then['samples']} samples, and has {now['samples']}"
    if then["shuffle"] != now["shuffle"]:
        return f"its order was {_shuffled(then)}, and is {_shuffled(now)}"
    return None


def _shuffled(drawn: Base) -> str:
    return "shuffled" if drawn["shuffle"] else "not shuffled"


def other_draw(then: Base, loader: DataLoader[Any]) -> str | None:
    """Return how a sampler would draw another order than `then`, if it says what it draws from."""
    now = base(loader)
    if isinstance(now, str) or not now["shuffle"] or "seed" not in now or "seed" not in then:
        return None
    if (then["seed"], then["epoch"]) == (now["seed"], now["epoch"]):
        return None
    return (
        f"its order was drawn with seed {then['seed']} for epoch {then['epoch']}, and its sampler has seed "
        f"{now['seed']} and epoch {now['epoch']} now (sampler.set_epoch(epoch) is called before the loop)"
    )
