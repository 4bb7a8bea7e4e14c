"""Any DataLoader, stopped anywhere and as often as you like, continues with the very next batch."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matrix_loaders import (
    BATCH,
    SAMPLES,
    Buffered,
    Images,
    Late,
    PythonBatches,
    Stateful,
    StatefulIterators,
    Stream,
    all_three,
    generator,
    on,
    silence,
)
from matrix_training import Plain, next_numbers
from torch.utils.data import (
    DataLoader,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from resumable import CannotStore, ResumableError, ResumableWarning, RunState, StateMismatch, UsageError
from resumable.loaders.workers import states

pytestmark = [
    # What torch says of this machine.
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # What Python says of every worker that is forked while a save is on its way.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    # What we say of streams in this process; here their draws decide no order, but where that is the point.
    pytest.mark.filterwarnings("ignore:.* and the training draw from the same generators"),
]

EPOCHS = 3

Key = tuple[Any, ...]
Seen = list[tuple[Key, Any]]
Loaders = dict[str, DataLoader[Any]]


def seeded(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


class Stopped(Exception):
    """The training ends right after a save."""


class Log:
    """What a training has seen; it ends where it is to be stopped: at a key, or after so many events."""

    def __init__(self, state: Any, stop: Key | int | None = None) -> None:
        self.seen: Seen = []
        self._state, self._stop = state, stop

    def __call__(self, key: Key, batch: Any) -> None:
        self.seen.append((key, [plain(batch), all_three()]))
        self.may_stop(key)

    def may_stop(self, key: Key) -> None:
        if self._stop in (key, len(self.seen)):
            self._state.save()
            raise Stopped


class Training(NamedTuple):
    """A script, and what makes its loaders: again, and under another seed, for every leg."""

    make: Callable[[], Loaders]
    script: Callable[[Any, Loaders, Log], None]

    def uninterrupted(self) -> Seen:
        """Return what it sees over the plain loaders."""
        seeded(0)
        loaders = self.make()
        state = Plain(loaders)
        self.script(state, loaders, log := Log(state))
        return log.seen

    def leg(self, run_dir: Path, seed: int = 0, stop: Key | int | None = None, **options: Any) -> Seen:
        """Go on from the newest checkpoint up to a stop, and return what it sees."""
        seeded(seed)
        loaders = self.make()
        with contextlib.suppress(Stopped), RunState.load(run_dir, loader=given(loaders), **options) as state:
            log = Log(state, stop)
            self.script(state, loaders, log)
        return log.seen

    def chain(self, run_dir: Path, stops: Iterable[Key]) -> Seen:
        """Return what it sees in all its legs."""
        legs = enumerate([*stops, None])
        return [event for seed, stop in legs for event in self.leg(run_dir, seed, stop)]


def given(loaders: Loaders) -> Any:
    """Return the loaders as RunState is given them: a single one without a name."""
    return loaders.get("loader", loaders)


def train(state: Any, loaders: Loaders, log: Log) -> None:
    """Draw after every batch, as dropout does, and where an epoch begins and ends."""
    loader = loaders["loader"]
    for epoch in state.epochs(EPOCHS):
        all_three()
        log.may_stop((epoch, 0))
        for batch in state.batches():
            log((epoch, state.batch + 1), batch)
        log((epoch, "end"), [])
    log((EPOCHS, "after"), next_numbers(loader))


def plain(value: Any) -> Any:
    """Return a batch as lists of numbers: those are equal only if every bit is."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.heavy
@pytest.mark.proves("transparent")
@pytest.mark.proves("exact")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_every_start_method_continue(run_dir: Path, method: str) -> None:
    loader = partial(on, Images(), num_workers=2, multiprocessing_context=method)
    training = Training(lambda: {"loader": loader()}, train)

    seen = training.chain(run_dir, [(0, 1), (0, 3), (1, 0), (1, 5), (1, "end"), (2, 2)])

    assert seen == training.uninterrupted()


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("how", [{"drop_last": True, "persistent_workers": True}, {"batch_size": None}])
def test_a_stream_without_short_batches_or_any_continues(run_dir: Path, how: dict[str, Any]) -> None:
    training = Training(lambda: {"loader": on(Buffered(), num_workers=2, **how)}, train)

    seen = training.chain(run_dir, [(0, 1), (0, 3), (1, 0), (1, 5), (1, "end"), (2, 2)])

    assert seen == training.uninterrupted()


def order(seen: Seen, epoch: int) -> list[int]:
    """Return the indices of an epoch's samples."""
    return [round(10 * row[0]) for key, (batch, _) in seen if key[0] == epoch for row in batch]


EITHER = [False, pytest.param(True, marks=pytest.mark.heavy)]
"""Whether the workers persist, where that is not the point."""


# What may change, and what may not.


def quiet_loader(dataset: Any = None, **how: Any) -> Loaders:
    return {"loader": on(dataset or Images(silence), **{"shuffle": True, "num_workers": 2, **how})}


def noisy_loader(**how: Any) -> Loaders:
    return quiet_loader(Images(), generator=generator(), **how)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (2, 0), (0, 2)])
@pytest.mark.quick(4)
def test_another_number_of_workers_changes_nothing_that_is_not_random(
    run_dir: Path, before: int, after: int
) -> None:
    old, new = (Training(partial(quiet_loader, num_workers=n), train) for n in (before, after))
    # What is drawn in the process of the training itself, nobody has looked at
    from_old, from_new = (
        contextlib.nullcontext() if n else pytest.warns(ResumableWarning, match="may .*num_workers +0 +-> ")
        for n in (before, after)
    )

    seen = old.leg(run_dir, 0, (0, 3))
    for training, told, stop in ((new, from_old, (0, 5)), (old, from_new, (1, 2))):
        with told:
            seen += training.leg(run_dir, 1, stop)
    seen += old.leg(run_dir, 1)

    assert seen == old.uninterrupted()


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (2, 0), (0, 2)])
@pytest.mark.quick(4)
def test_another_number_of_workers_keeps_the_order_and_repeats_itself(
    run_dir: Path, before: int, after: int
) -> None:
    old, new = (Training(partial(noisy_loader, num_workers=n), train) for n in (before, after))
    first = old.leg(run_dir, 0, (0, 3))
    rest = []
    for seed in (1, 2):
        shutil.copytree(run_dir, again := run_dir.with_name(f"{seed}"))
        with pytest.warns(ResumableWarning, match=f"{'will' if before else 'may'} .*num_workers"):
            seen = new.leg(again, seed, (1, 2))
        rest.append(seen + new.leg(again, seed + 2))

    assert rest[0] == rest[1]
    expected = old.uninterrupted()
    assert [order(first + rest[0], 0), order(rest[0], 1)] == [order(expected, 0), order(expected, 1)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("dataset", [Stream, Stateful, StatefulIterators])
def test_another_number_of_workers_is_a_mismatch_for_a_stream_in_mid_epoch(
    run_dir: Path, dataset: Any
) -> None:
    two, three = (Training(lambda n=n: {"loader": on(dataset(), num_workers=n)}, train) for n in (2, 3))
    seen = two.leg(run_dir, 0, (0, 1)) + two.leg(run_dir, 1, (0, 3))

    with pytest.raises(StateMismatch, match="loader: num_workers 2 in the checkpoint, 3 in the"):
        three.leg(run_dir)

    assert seen + two.leg(run_dir, 2) == two.uninterrupted()


def test_a_generator_that_a_worker_does_not_find_is_named(run_dir: Path) -> None:
    Training(lambda: {"loader": on(Images(Late()), num_workers=1)}, train).leg(run_dir, 0, (0, 2))
    without = Training(lambda: {"loader": on(Images(), num_workers=1)}, train)

    with pytest.raises(ResumableWarning, match=r"the generators dataset\.noise\.rng were there when"):
        without.leg(run_dir)


def test_a_state_of_a_worker_that_cannot_be_stored_fails_only_at_a_save() -> None:
    at = states.Standing().after([(0, 1, False, {}, None, {"dataset": states.freeze({"fn": print})}, [])])

    with pytest.raises(CannotStore, match="fn is a function"):
        at.collect()


def test_a_stream_that_is_shorter_than_it_was_is_a_mismatch(run_dir: Path) -> None:
    long, short = (
        Training(lambda n=n: {"loader": on(Stream(length=n), num_workers=2)}, train) for n in (SAMPLES, 9)
    )
    long.leg(run_dir, 0, (0, 4))

    with pytest.raises(StateMismatch, match="too early"):
        short.leg(run_dir)


@pytest.mark.quick(10)
@pytest.mark.proves("never a silent change")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("batch_size", {"batch_size": 5}),
        ("drop_last", {"drop_last": True}),
        ("sampler", {"shuffle": False}),
        ("batch_sampler", {"shuffle": False, "batch_size": 1, "batch_sampler": PythonBatches()}),
        ("dataset_length", {"dataset": Images(silence, 31)}),
    ],
)
def test_a_loader_that_changed_in_mid_epoch_is_a_named_mismatch(
    run_dir: Path, workers: int, field: str, change: dict[str, Any]
) -> None:
    old, new = (Training(partial(quiet_loader, num_workers=workers, **how), train) for how in ({}, change))
    seen = old.leg(run_dir, 0, (0, 1)) + old.leg(run_dir, 1, (0, 3))

    with pytest.raises(StateMismatch, match=rf"loader\.{field}: "):
        new.leg(run_dir)

    assert seen + old.leg(run_dir, 2) == old.uninterrupted()


@pytest.mark.quick(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_size_allowed_to_change_continues_at_the_same_sample(run_dir: Path, workers: int) -> None:
    def of(size: int) -> Training:
        how = {"batch_size": size, "num_workers": workers}
        return Training(lambda: quiet_loader(generator=generator(), **how), train)

    four, six, five = of(4), of(6), of(5)
    seen = four.leg(run_dir, 0, 2)
    with pytest.warns(ResumableWarning, match="loader.batch_size +4 +-> 6"):
        seen += six.leg(run_dir, 1, 1, allow=["loader.batch_size"])
    seen += six.leg(run_dir, 2, 1)
    with pytest.warns(ResumableWarning, match="loader.batch_size +6 +-> 5"):
        seen += five.leg(run_dir, 3, allow=["loader.batch_size"])

    assert [len(batch) for key, (batch, _) in seen if key[0] == 0] == [4, 4, 6, 6, 5, 1, 0]
    expected = four.uninterrupted()
    assert [order(seen, e) for e in range(EPOCHS)] == [order(expected, e) for e in range(EPOCHS)]


def test_batches_may_become_single_samples_in_mid_epoch(run_dir: Path) -> None:
    four, single = (Training(lambda n=n: {"loader": on(Images(), n)}, train) for n in (BATCH, None))
    seen = four.leg(run_dir, 0, 2)
    with pytest.warns(ResumableWarning, match="loader.batch_size +4 +-> None"):
        left = single.leg(run_dir, 1, allow=["loader.*"])

    assert order(seen, 0) == [*range(2 * BATCH)]
    singles = [round(10 * batch[0]) for key, (batch, _) in left if batch and key[0] == 0]
    assert singles == [*range(2 * BATCH, SAMPLES)]


@pytest.mark.quick(3)
@pytest.mark.parametrize("change", [{"batch_size": 5}, {"shuffle": False}, {"dataset": Images(silence, 31)}])
def test_a_loader_that_is_allowed_to_change_begins_the_epochs_data_again(
    run_dir: Path, change: dict[str, Any]
) -> None:
    old, new = (Training(partial(quiet_loader, **how), train) for how in ({}, change))
    old.leg(run_dir, 0, (1, 2))

    with pytest.warns(ResumableWarning, match="the code's is used"):
        seen = new.leg(run_dir, 1, 2, allow=["loader"])
    seen += new.leg(run_dir, 2)

    length = len(new.make()["loader"].dataset)
    assert [sorted(order(seen, epoch)) for epoch in (0, 1, 2)] == [[], [*range(length)], [*range(length)]]


def test_a_shuffle_buffer_on_the_trainings_generator_is_warned_of(run_dir: Path) -> None:
    training = Training(lambda: {"loader": on(Buffered())}, train)
    training.leg(run_dir, 0, (0, 3))

    for stop in ((0, 4), (1, 2)):
        with pytest.warns(ResumableWarning, match="Buffered and the training draw from the same .*R26"):
            training.leg(run_dir, 1, stop)


class FixedAtStart(Sampler[list[int]]):
    """Batches that are drawn when the script starts, and lost when it ends."""

    def __init__(self) -> None:
        self.batches = [*PythonBatches()]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class AnySubset(SubsetRandomSampler):
    """A split that is drawn again at every start."""

    def __init__(self) -> None:
        super().__init__(random.sample(range(99), SAMPLES))


@pytest.mark.quick(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [{"batch_sampler": FixedAtStart}, {"sampler": AnySubset}])
def test_an_order_that_does_not_come_again_is_a_mismatch(run_dir: Path, how: Any, workers: int) -> None:
    training = Training(lambda: {"loader": in_order_of(how, workers)}, train)
    seen = training.leg(run_dir, 0, (0, 3))

    for seed in (1, 2):
        with pytest.raises(StateMismatch, match="the batches that it gave before"):
            training.leg(run_dir, seed)

    assert seen == training.uninterrupted()[:3]


def in_order_of(how: dict[str, Any], workers: int) -> DataLoader[Any]:
    (name, sampler), *_ = how.items()
    size = 1 if name == "batch_sampler" else BATCH
    return on(Images(length=99), size, num_workers=workers, **{name: sampler()})


def test_a_loader_that_was_never_given_is_a_usage_error(run_dir: Path) -> None:
    state = RunState.load(run_dir, loader=on(Images()))

    with pytest.raises(UsageError, match="was not given to RunState"):
        state.batches(on(Images()))


@pytest.mark.filterwarnings("ignore:Got pickle error when attempting to start a worker")
def test_a_loader_that_cannot_be_sent_to_its_workers_is_a_clear_error(run_dir: Path) -> None:
    loader = on(Images(), collate_fn=lambda samples: 0, num_workers=1, multiprocessing_context="spawn")
    state = RunState.load(run_dir, loader=loader)

    with pytest.raises(ResumableError, match="cannot be sent"):
        next(iter(state.batches()))


def note_the_end(file: str, number: int) -> None:
    atexit.register(Path(file).touch)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a child of multiprocessing runs what atexit has")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.heavy)])
def test_a_worker_leaves_without_ending_its_interpreter(tmp_path: Path, context: str) -> None:
    # What a thread of its own still delivers aborts an interpreter that ends, and the training with it
    ended = tmp_path / "ended"
    loader = on(
        Images(),
        num_workers=1,
        multiprocessing_context=context,
        worker_init_fn=partial(note_the_end, str(ended)),
    )

    with RunState.load(tmp_path / "run", loader=loader) as state:
        batches = [batch for _ in state.epochs(1) for batch in state.batches()]

    assert len(batches) == len(loader)
    assert not ended.exists()


class Counted(Images):
    """A dataset that counts, over all processes, how often each sample is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = multiprocessing.Array("i", SAMPLES)

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.counts.get_lock():
            self.counts[index] += 1
        return super().__getitem__(index)


@pytest.mark.quick(3)
@pytest.mark.parametrize(("workers", "persists"), [(0, False), (2, False), (2, True)])
def test_no_sample_that_was_trained_on_is_loaded_again(run_dir: Path, workers: int, persists: bool) -> None:
    counted = []

    def make() -> Loaders:
        counted.append(Counted())
        return {"loader": on(counted[-1], num_workers=workers, persistent_workers=persists)}

    Training(make, train).chain(run_dir, [(0, 3), (0, 6), (0, "end")])

    assert [*counted[1].counts][: 3 * BATCH] == [0] * 3 * BATCH
    assert [*counted[2].counts] == [0] * 6 * BATCH + [1] * (SAMPLES - 6 * BATCH)


def seen_until(run_dir: Path, stop: int | None) -> list[Any]:
    """Return the batches of two workers up to a stop, in two epochs of 150; and what is drawn next."""
    seeded(3)
    found: list[Any] = []
    state = RunState.load(run_dir, loader=on(Images(length=150), 1, num_workers=2), every=None, quiet=True)
    with contextlib.suppress(Stopped), state:
        for epoch in state.epochs(2):
            for number, batch in enumerate(state.batches(), state.batch):
                found.append(plain(batch))
                if 150 * epoch + number + 1 == stop:
                    state.save().wait()
                    raise Stopped
        found.append(all_three())
    return found


@pytest.mark.heavy
def test_a_resume_is_exact_however_many_stamps_have_come(run_dir: Path) -> None:
    legs = [seen_until(run_dir / "stopped", stop) for stop in (63, 64, 65, 130, 149, 150, 215, None)]

    assert [*itertools.chain(*legs)] == seen_until(run_dir / "whole", None)


class Held(Images):
    """A dataset whose first batch is ready only when the other worker has loaded more than a batch."""

    def __init__(self, loaded: Any) -> None:
        super().__init__()
        self.loaded = loaded

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info().id:
            self.loaded.value += 1
        while index == 0 and self.loaded.value <= BATCH:
            pass
        return super().__getitem__(index)


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:in_order=False")
@pytest.mark.parametrize("persists", EITHER)
def test_without_in_order_every_sample_comes_exactly_once(run_dir: Path, persists: bool) -> None:
    how = {"num_workers": 2, "in_order": False, "persistent_workers": persists}
    loaded = multiprocessing.Value("i")
    training = Training(lambda: {"loader": on(Held(loaded), **how)}, only_batches)

    seen = training.chain(run_dir, [(0, 1), (0, 3), (0, 6), (1, 2), (1, 6), (1, "end")])

    assert [sorted(order(seen, epoch)) for epoch in range(EPOCHS)] == [[*range(SAMPLES)]] * EPOCHS


def only_batches(state: Any, loaders: Loaders, log: Log) -> None:
    for epoch in state.epochs(EPOCHS):
        for batch in state.batches():
            log((epoch, state.batch), batch)
        log((epoch, "end"), [])


# Workers that fail.


class Failing(Images):
    """A dataset with two samples that cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index in (9, 22):
            raise ValueError("cannot be read")
        return sample


class FailingTogether(Failing):
    """The same, whose samples are loaded by the batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def swallowing(state: Any, loaders: Loaders, log: Log) -> None:
    for epoch in state.epochs(EPOCHS):
        batches = iter(state.batches())
        while True:
            try:
                batch = next(batches)
            except ValueError:
                log((epoch, "failed"), [])
            except StopIteration:
                break
            else:
                log((epoch, round(10 * batch.flatten()[0].item())), [state.batch, batch])
        log((epoch, "end"), [])


@pytest.mark.parametrize(
    ("kind", "size", "workers"),
    [
        (Failing, BATCH, "0"),
        *(pytest.param(Failing, BATCH, workers, marks=pytest.mark.heavy) for workers in ("2", "2p")),
        *(
            pytest.param(*one, "2", marks=pytest.mark.heavy)
            for one in [(FailingTogether, BATCH), (Failing, None)]
        ),
    ],
)
def test_a_loop_that_swallows_a_workers_errors_continues_as_a_plain_one(
    run_dir: Path, kind: type[Images], size: int | None, workers: str
) -> None:
    how = {"num_workers": int(workers[0]), "persistent_workers": workers.endswith("p")}
    training = Training(lambda: {"loader": on(kind(), size, **how)}, swallowing)

    # Right after a sample that failed, before its worker has made another batch.
    seen = training.chain(
        run_dir, [(0, 4), (0, 12 if size else 10), (0, 24), (1, 0), (1, 16), (1, 24), (2, 12)]
    )

    assert seen == training.uninterrupted()


class Deadly(Images):
    """A dataset two of whose samples kill the worker that loads them, once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(length=30)
        self.folder = folder

    def __getitem__(self, index: int) -> torch.Tensor:
        marker = self.folder / str(index)
        if index in (9, 29) and get_worker_info() and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def saving(state: Any, loaders: Loaders, log: Log) -> None:
    for epoch in state.epochs(2):
        for batch in state.batches():
            log((epoch, state.batch), batch)
            state.save()
        log((epoch, "end"), [])


def unmeasured(run: Callable[[Path], Any], run_dir: Path) -> None:
    """Run without coverage: an error that a signal raises in the tracer leaves its lock locked forever."""
    coverage = sys.modules.get("coverage")
    if coverage and (measuring := coverage.Coverage.current()):
        measuring.stop()
    run(run_dir)


@pytest.mark.heavy
@pytest.mark.parametrize("persists", EITHER)
def test_a_run_that_dies_of_a_killed_worker_continues_exactly(
    run_dir: Path, tmp_path: Path, persists: bool
) -> None:
    how = {"num_workers": 2, "persistent_workers": persists}
    training = Training(lambda: {"loader": on(Deadly(tmp_path), **how)}, saving)

    for marker in ("9", "29"):
        # In a process of its own: torch raises in the main thread, wherever that may be.
        run = multiprocessing.get_context("fork").Process(target=unmeasured, args=(training.leg, run_dir))
        run.start(), run.join()
        assert (run.exitcode, (tmp_path / marker).exists()) == (1, True)
    left = training.leg(run_dir)

    expected = training.uninterrupted()
    assert left == expected[-len(left) :]
    assert len(left) < len(expected) - 1


def _caught(run_dir: Path, fails: set[int], stops: int | None = None) -> list[float]:
    """Train on a stream, some of whose batches fail before their step; stop after one of those."""
    seen: list[float] = []
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Stream(), batch_size=4)
    with RunState.load(run_dir, model=model, optimizer=optimizer, loader=loader, progress=False) as state:
        for _ in range(len(fails) + 1):
            try:
                for _epoch in state.epochs(2):
                    for x in state.batches():
                        seen.append(float(x.sum()))
                        if len(seen) in fails:
                            raise Stopped
                        optimizer.step()
                return seen
            except Stopped:
                pass
            if len(seen) == stops:
                state.save().wait()
                return seen
    return seen


@pytest.mark.filterwarnings("ignore:loader. Stream has drawn random numbers for the first batch")
@pytest.mark.parametrize("fails", [1, 9])
def test_a_stream_continues_after_an_error_in_an_epochs_first_batch(tmp_path: Path, fails: int) -> None:
    seeded(0)
    straight = _caught(tmp_path / "straight", {fails, fails + 1})

    seeded(0)
    seen = _caught(tmp_path / "stopped", {fails}, stops=fails)
    for turn in range(2):
        seeded(turn + 1)
        seen += _caught(tmp_path / "stopped", set() if turn else {1}, stops=None if turn else 1)

    assert seen == straight
