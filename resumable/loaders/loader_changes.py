"""Decides how a loader continues with other settings than in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from ..errors import StateMismatch, warn
from ..files import large_files
from ..run.changes import HARMLESS, MAY, WILL
from .generators import search, stages
from .source import Source
from .workers import resharding
from .workers.order import other_data, plain
from .workers.states import is_stateful

_ANY_ORDER = "its batches came in any order (in_order=False)"

Saved = Mapping[str, Any]
"""A state that `LoaderSource.collect` returned."""


def differences(source: Source, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the changes that make a position in mid-epoch meaningless: a name and a description."""
    now = source.settings()
    for key, then in saved["settings"].items():
        if not saved["batch"] or then == now.get(key):
            continue
        if question := source.in_question(key, saved["source"]):
            name, why = question
            text = f"{then} in the checkpoint, {now.get(key)} in the code, in mid-epoch"
            text = f"{text}: {why}" if why else text
            yield name, text if name else f"{key} {text}"
    if (
        saved["batch"]
        and not source.reads(saved["source"])
        and saved["settings"].get("kind") == now.get("kind")
    ):
        yield (
            "",
            "in mid-epoch, its position was saved by an earlier version of resumable, by the loader's own "
            "state_dict; if that is allowed, the epoch's data starts again",
        )
    root = source.root()
    names = ("sampler", "batch_sampler")
    is_other_sampler = any(saved["settings"].get(name) != now.get(name) for name in names)
    found = search.find(root)
    generators = search.renamed(saved["generators"], found)
    for path in generators.keys() ^ found.keys():
        if is_other_sampler and path.startswith(("generator", "sampler.", "batch_sampler.")):
            continue
        if path not in generators and stages.is_stage(found[path]):
            # Earlier versions did not save what it draws from.
            continue
        # Many datasets make theirs at the first sample. Old checkpoints have none that modules have.
        is_in_doubt = path in generators or not search.is_in_module(path)
        if is_in_doubt and (path not in generators or not search.is_free(root, path)):
            yield path, "a random generator in the checkpoint or in the code, but not in both"


def resized(source: Source, saved: Mapping[str, Any], then: int, now: int) -> Iterator[str]:
    """Yield that the rest of the epoch cannot be divided among another number of processes."""
    shards = [settings.get("shards", 1) for settings in (saved["settings"], source.settings())]
    for count, processes in zip(shards, (then, now), strict=True):
        if saved["batch"] and processes > 1 and count == 1:
            yield (
                f"in mid-epoch, with {then} processes in the checkpoint and {now} in the code: each of "
                f"{processes} loads all of the data for itself (no DistributedSampler)"
            )
            return


def settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the settings of a loader, except its split and its sample seeds."""
    return {
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        **dealt(loader),
        "batch_sampler": type(loader.batch_sampler).__name__,
        "dataset_length": length_of(loader.dataset),
    }


def dealt(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the kind of sampler, and the number of ranks that it shards for."""
    return {"sampler": type(loader.sampler).__name__, "shards": resharding.count(loader)}


def split_of(dataset: Any) -> str | None:
    """Return a digest of the indices of a `Subset`; None for other datasets."""
    # A split drawn again at every start would train on samples that are for validation.
    if isinstance(dataset, Subset):
        return large_files.digest(repr(plain(list(dataset.indices))).encode())[:8]
    return None


def in_question(loader: DataLoader[Any], setting: str, saved: Saved) -> tuple[str, str] | None:
    """Return what a changed setting invalidates in mid-epoch: itself or everything (""), and why."""
    if "workers" not in saved:
        return "", ""
    is_stream = isinstance(loader.dataset, IterableDataset)
    if setting == "num_workers":
        # The share of a stream that a worker reads depends on the number of workers.
        return ("", "") if is_stream else None
    if setting in ("shards", "sampler", "batch_size") and not is_stream:
        return _dealt_in_question(loader, setting, saved)
    has_position = any(at and at["data"] for at in saved["workers"])
    return ("" if is_stream and not has_position else setting, "")


def _dealt_in_question(loader: DataLoader[Any], setting: str, saved: Saved) -> tuple[str, str] | None:
    obstacle = _obstacle(loader, saved)
    if obstacle and setting == "shards":
        return "", f"{obstacle}; if that is allowed, the epoch's data starts again"
    if _has_other_shards(loader, saved) or (not obstacle and setting == "sampler"):
        # The rest is resharded; if that is impossible, the error is reported for the shards.
        return None
    return setting, obstacle if obstacle and setting == "sampler" else ""


def _has_other_shards(loader: DataLoader[Any], saved: Saved) -> bool:
    return bool(saved["dealt"]["shards"] != resharding.count(loader))


def _obstacle(loader: DataLoader[Any], saved: Saved) -> str | None:
    """Return why the rest of an epoch's samples cannot be resharded."""
    if not saved["order"]["is_in_order"] or _has_gaps(saved):
        return _ANY_ORDER
    return resharding.obstacle(saved["order"]["base"], loader)


def _has_gaps(saved: Saved) -> bool:
    """Whether batches have come out before others that were requested earlier."""
    return bool(min(saved["order"]["on_its_way"], default=saved["batches"]) < saved["batches"])


def effects(loader: DataLoader[Any], saved: Saved, *, has_seeds: bool) -> dict[str, tuple[str, str]]:
    """Return how a changed setting changes the results, and why, where its name alone does not say it.

    `has_seeds`: whether each sample has a seed of its own.
    """
    if "workers" not in saved or isinstance(loader.dataset, IterableDataset):
        return {}
    is_in_epoch = bool(saved["order"])
    draws = any(at and at["generators"] for at in saved["workers"])
    lost = "what is drawn at random while loading is not what it would be"
    again = f"{'what is left of the epoch' if is_in_epoch else 'every epoch'} is dealt out again"
    # A batch that is loaded as one has one seed.
    is_seeded = has_seeds and not hasattr(loader.dataset, "__getitems__")
    workers, shards = (WILL if draws else MAY, f"the order stays; {lost}"), f"{again}; {lost}"
    if has_seeds:
        workers = HARMLESS, "each sample has its seed, so the batches stay the same"
    elif is_in_epoch and saved["num_workers"] and not draws:
        workers = HARMLESS, "nothing was drawn at random in the workers, so the batches stay the same"
    if is_seeded or (not has_seeds and workers[0] == HARMLESS):
        shards = again
    return {"shards": (WILL, shards), "num_workers": workers}


def adapted(loader: DataLoader[Any], saved: Saved, other: AbstractSet[str]) -> Saved:
    """Return the state for a loader whose `other` settings have changed since the checkpoint."""
    is_dealt_otherwise = saved["dealt"] != dealt(loader)
    is_in_epoch = bool(saved["order"]) and not saved["is_left"]
    if _has_other_shards(loader, saved):
        # With another number of ranks the workers have had other samples, and batches ahead are useless.
        saved = {**saved, "workers": [], "made": None, "turn": 0, "ahead": []}
    if is_dealt_otherwise:
        saved = {**saved, "dealt": dealt(loader)}
    if is_in_epoch and (is_dealt_otherwise or other):
        return _with_other_batches(loader, saved)
    # The rest of an abandoned epoch matters only to workers that are still in it.
    return {**saved, "order": None, "is_left": False} if is_dealt_otherwise else saved


def _with_other_batches(loader: DataLoader[Any], saved: Saved) -> dict[str, Any]:
    # From here on, the remaining samples form other batches.
    if _has_gaps(saved):
        raise other_data(f"{_ANY_ORDER}, and other batches cannot be made of what is left of them")
    batches, order = saved["batches"], saved["order"]
    obstacle = resharding.obstacle(order["base"], loader)
    # At the end of an epoch some samples come a second time.
    samples = saved["samples"] if obstacle else min(saved["samples"], order["base"]["samples"])
    order = {
        **order,
        "base": obstacle or order["base"],
        "has_ended": order["has_ended"] or order["is_short"],
        "from": [batches, samples],
        "pulled": batches,
        "on_its_way": [],
        "has_last": False,
        "fingerprint": None,
    }
    return {**saved, "samples": samples, "order": order}


def length_from(loader: DataLoader[Any], deal: resharding.Deal, order: Mapping[str, Any]) -> int | None:
    """Return the number of batches of an epoch that continues with other batches; None if it does not."""
    batches, samples = order["from"]
    if not samples:
        return None
    if isinstance(order["base"], str):
        left = len(loader.sampler) - samples // deal.shards  # type: ignore[arg-type]
    else:
        left = deal.each(order["base"]["samples"] - samples)
    size = loader.batch_size or 1
    return int(batches + (left // size if loader.drop_last else -(-left // size)))


def length_of(dataset: Any) -> int | None:
    """Return the length of a dataset, if it has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


class DatasetLength:
    """The length of a loader's dataset: at the start, and when the last order was drawn."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._given = self._drawn = self.now()

    def now(self) -> int | None:
        """Return the current length; None for a stream."""
        dataset = self._loader.dataset
        return None if isinstance(dataset, IterableDataset) else length_of(dataset)

    def order_drawn(self) -> None:
        """Note that an order is drawn."""
        self._drawn = self.now()

    def collect(self) -> list[int | None]:
        """Return the length when the last order was drawn, and the length now."""
        return [self._drawn, self.now()]

    def check(self, drawn: int | None, then: int | None, *, is_drawn: bool) -> None:
        """Check that the dataset has the items that were added before the checkpoint.

        `is_drawn`: whether an order that was drawn from them is to be drawn again.
        """
        now = self.now()
        if is_drawn and not now == drawn == then:
            raise StateMismatch(
                f"the dataset has {now} items. It had {drawn} when this epoch's order was drawn, and {then} "
                "at the checkpoint.",
                fix="let the script add the items again before it loops over the batches (a list of them "
                "in extra= is restored by then), and add items only between two epochs; or begin the "
                "epoch's data again with allow=['loader'].",
            )
        if now == self._given != then:
            warn(
                f"the dataset has {now} items, as the script makes it, and had {then} at the checkpoint: "
                "what was added or removed is lost, and the training continues without it. Keep the items "
                "in extra= (the very list that the dataset has), or give the dataset state_dict and "
                "load_state_dict. [R15]"
            )

    def outgrown(self, keeps: Callable[[Any], bool], *, is_under_way: bool) -> str | None:
        """Return a warning if items of the dataset would be missing after a resume.

        `keeps`: whether an object is saved with the training.
        """
        now, drawn = self.now(), self._drawn
        if now == drawn:
            return None
        if is_under_way:
            return (
                f"the dataset has {now} items, and had {drawn} when this epoch's order was drawn: a resume "
                "from here is refused, as the order cannot be drawn again. Add items only after the loop "
                "over the batches has ended. [R15]"
            )
        dataset = self._loader.dataset
        if is_stateful(dataset) or any(map(keeps, getattr(dataset, "__dict__", {}).values())):
            return None
        return (
            f"the dataset has {now} items, and had {drawn} before: a resume has those that the script "
            "makes, and not what was added. Keep the items in extra= (the very list that the dataset "
            "has), or give the dataset state_dict and load_state_dict. [R15]"
        )
