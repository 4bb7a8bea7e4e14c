"""A stamp tells what a worker's generators have become: nothing too much, and everything that is needed."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing as torch_multiprocessing

from resumable.loaders.generators import rng, search, worker_rng
from resumable.loaders.generators.worker_rng import States, Watch


class Own:
    """Generators of the user's own, one of each kind."""

    def __init__(self, seed: int) -> None:
        self.python = random.Random(seed)
        self.pcg = np.random.default_rng(seed)
        self.philox = np.random.Generator(np.random.Philox(seed))
        self.mersenne = np.random.Generator(np.random.MT19937(seed))
        self.legacy = np.random.RandomState(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def draw(self) -> list[float]:
        """Draw from all; those that make normal numbers in pairs keep the second."""
        bits = (self.pcg, self.philox, self.mersenne)
        numbers = [self.python.gauss(0, 1), self.legacy.randn(), *(one.normal() for one in bits)]
        return [*numbers, torch.rand((), generator=self.torch).item(), *map(float, self.pcg.bytes(1))]


def draw_global() -> list[float]:
    return [
        random.gauss(0, 1),
        random.random(),
        np.random.randn(),
        np.random.rand(),
        *torch.randn(3).tolist(),
    ]


def seed(value: int) -> None:
    random.seed(value), np.random.seed(value), torch.manual_seed(value)


@pytest.fixture
def numpy_bits() -> Iterator[None]:
    """Put numpy's own kind of generator back."""
    before: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined]


DRAWS: dict[str, tuple[str, Callable[[Own], Any]]] = {
    "python": ("python", lambda own: random.random()),
    "numpy": ("numpy", lambda own: np.random.rand()),
    "torch": ("torch", lambda own: torch.rand(())),
    "own python": ("own.python", lambda own: own.python.random()),
    "own pcg": ("own.pcg", lambda own: own.pcg.random()),
    "own philox": ("own.philox", lambda own: own.philox.random()),
    "own mersenne": ("own.mersenne", lambda own: own.mersenne.random()),
    "own legacy": ("own.legacy", lambda own: own.legacy.rand()),
    "own torch": ("own.torch", lambda own: torch.rand((), generator=own.torch)),
}


@pytest.mark.parametrize("case", DRAWS)
def test_only_what_was_drawn_from_is_reported(case: str) -> None:
    own, (name, draw) = Own(1), DRAWS[case]
    watch = Watch(search.find(own))

    for _ in range(3):
        assert watch.changes() == {}
        draw(own)
        assert watch.changes().keys() == {name}


@pytest.mark.parametrize("case", ["python", "numpy", "torch"])
def test_a_generator_is_reported_as_a_whole_once_and_then_only_its_place(case: str) -> None:
    name, draw = DRAWS[case]
    watch = Watch({})
    draw(Own(1)), draw(Own(1))
    first = watch.changes()[name]
    draw(Own(1))
    second = watch.changes()[name]

    assert first.keys() == worker_rng.read({})[name].keys()
    assert second.keys() == {"head" if name == "torch" else "place"}


@pytest.mark.parametrize("case", ["python", "numpy", "torch"])
def test_new_words_are_reported_when_the_old_ones_are_used_up(case: str) -> None:
    name, draw = DRAWS[case]
    watch = Watch({})
    draw(Own(1)), watch.changes()
    told = [watch.changes()[name] for _ in range(700) if draw(Own(1)) is not None]

    assert 1 <= sum("words" in pieces for pieces in told) <= 3


def followed(act: Callable[[int], Any], times: int = 40) -> tuple[States, States]:
    """Return what a watch told of everything that was done, in one, and what it was to tell."""
    watch = Watch({})
    states = watch.states()
    for number in range(times):
        act(number)
        states = worker_rng.merged(states, pickle.loads(pickle.dumps(watch.changes())))
    return states, worker_rng.read({})


@pytest.mark.parametrize(
    "act",
    [
        lambda number: random.gauss(0, 1),
        lambda number: np.random.randn(),
        lambda number: torch.randn(()),
        lambda number: [np.random.randn() for _ in range(number % 3)],
        lambda number: [random.gauss(0, 1) for _ in range(number % 3)],
        lambda number: torch.randn(number % 20),
        lambda number: seed(number // 2),
        lambda number: (np.random.seed(5), np.random.randn() if number % 2 else np.random.rand(2)),
        lambda number: number % 3 or (seed(number), draw_global()),
        lambda number: random.setstate(random.Random(number).getstate()),
        lambda number: np.random.set_state(np.random.RandomState(number).get_state()),
        lambda number: torch.set_rng_state(torch.Generator().manual_seed(number).get_state()),
    ],
)
def test_what_is_sent_repeatedly_makes_the_state_that_is_there(act: Callable[[int], Any]) -> None:
    told, now = followed(act)

    assert told == now


def test_a_kept_normal_number_that_is_taken_is_reported_though_no_word_moves() -> None:
    watch = Watch({})
    random.gauss(0, 1), np.random.randn()
    kept = watch.changes()
    random.gauss(0, 1), np.random.randn()
    taken = watch.changes()

    assert (kept["python"]["gauss"] is not None, kept["numpy"]["has_gauss"]) == (True, 1)
    assert (taken["python"], taken["numpy"]["has_gauss"]) == ({"gauss": None}, 0)
    assert "words" not in taken["numpy"]


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox, np.random.SFC64, np.random.MT19937])
def test_another_kind_of_numpy_generator_is_reported(numpy_bits: None, bits: Any) -> None:
    watch = Watch({})
    np.random.rand(), watch.changes()
    np.random.set_bit_generator(bits(3))  # type: ignore[attr-defined]
    states = worker_rng.merged(worker_rng.read({}), watch.changes())
    for _ in range(2):
        expected = [np.random.rand(), np.random.randn()]
        worker_rng.restore(states, None)

        assert [np.random.rand(), np.random.randn()] == expected
        states = worker_rng.merged(states, watch.changes())


def test_a_numpy_generator_that_was_of_another_kind_for_a_while_is_reported_as_it_is(
    numpy_bits: None,
) -> None:
    watch = Watch({})
    states = watch.states()
    for bits in (np.random.PCG64(1), np.random.MT19937(2), np.random.PCG64(3), np.random.MT19937(4)):
        np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
        np.random.randn()
        states = worker_rng.merged(states, watch.changes())
        expected = [np.random.randn(), np.random.rand()]
        worker_rng.restore(states, None)

        assert [np.random.randn(), np.random.rand()] == expected


class MT19937(np.random.MT19937):
    """A generator whose words do not lie where they are looked for."""

    @property
    def ctypes(self) -> Any:
        other = self.__dict__.setdefault("other", np.random.MT19937(99))
        return other.ctypes


def test_words_that_do_not_lie_where_they_are_looked_for_are_sent_anyway(numpy_bits: None) -> None:
    np.random.set_bit_generator(MT19937(5))  # type: ignore[attr-defined]
    told, now = followed(lambda number: np.random.randn())

    assert told == now


def test_a_generator_that_is_new_is_reported_even_if_nothing_is_drawn_any_more() -> None:
    own = Own(2)
    watch = Watch({})
    watch.add(search.find(own), is_new=True)
    own_later = Own(3)
    watch.add({"later": own_later.pcg})

    assert watch.changes().keys() == {f"own.{path}" for path in search.find(own)}
    assert watch.changes() == {}


def test_a_generator_in_the_place_of_another_is_reported_in_its_stead() -> None:
    own = Own(2)
    watch = Watch(search.find(own))
    own.pcg.random(), watch.changes()
    own.pcg = np.random.default_rng(77)
    watch.add(search.find(own), is_new=True)
    first = watch.changes()
    own.pcg.random()

    assert first == {"own.pcg": {"state": np.random.default_rng(77).bit_generator.state}}
    assert watch.changes() == {"own.pcg": {"state": own.pcg.bit_generator.state}}


def test_a_watch_of_own_generators_alone_tells_nothing_of_the_global_ones() -> None:
    own = Own(2)
    watch = Watch(search.find(own), is_global=False)
    draw_global(), own.legacy.rand()

    assert watch.changes().keys() == watch.states().keys() & {"own.legacy"}


def test_states_that_are_put_back_give_the_next_numbers() -> None:
    own = Own(4)
    watch = Watch(search.find(own))
    states = watch.states()
    for number in range(4):
        draw_global(), own.draw()
        states = worker_rng.merged(states, watch.changes())
        expected = [draw_global(), own.draw()]
        seed(number), draw_global()
        other = Own(number)

        assert worker_rng.restore(states, other) == []
        assert [draw_global(), other.draw()] == expected
        worker_rng.restore(states, own)


def test_merging_leaves_what_it_is_given_as_it_was() -> None:
    then = {"a": {"x": 1, "y": 2}}
    changes = {"a": {"x": 3}, "b": {"z": 4}}

    assert worker_rng.merged(then, changes) == {"a": {"x": 3, "y": 2}, "b": {"z": 4}}
    assert then == {"a": {"x": 1, "y": 2}}
    assert worker_rng.merged({}, {}) == {}


def test_the_differences_and_what_was_there_make_what_is_there() -> None:
    own = Own(5)
    then = worker_rng.read(search.find(own))
    own.draw(), random.random(), np.random.randn()
    now = worker_rng.read(search.find(own))
    found = worker_rng.differences(then, now)

    assert rng.is_same(worker_rng.merged(then, found), now)
    assert (found["torch"], found["python"].keys()) == ({}, {"words", "place"})
    assert worker_rng.differences({}, now).keys() == now.keys()


def test_a_generator_that_is_nowhere_is_named_and_one_that_can_be_made_is_made() -> None:
    states = {
        "own.a": {"state": rng.read(np.random.default_rng(1))},
        "own.b": {"state": rng.read(random.Random(1))},
    }
    root: dict[str, Any] = {"a": None, "b": "taken"}

    assert worker_rng.restore(states, root) == ["b"]
    assert root["a"].random() == np.random.default_rng(1).random()
    assert root["b"] == "taken"


@pytest.mark.parametrize(
    ("then", "now", "is_same"),
    [
        ({"a": np.ones(2)}, {"a": np.ones(2)}, True),
        ({"a": np.ones(2)}, {"a": np.zeros(2)}, False),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, True),
        ({"a": 1}, {"b": 1}, False),
        (None, {"a": 1}, False),
        (None, np.ones(2), False),
        (b"12", b"12", True),
        (1, 2, False),
    ],
)
def test_states_are_the_same_only_if_all_in_them_is(then: Any, now: Any, is_same: bool) -> None:
    assert rng.is_same(then, now) is is_same


# Its way to the training.


def tell(queue: Any, connection: Any) -> None:
    """Draw in another process: put what has changed on the queue, and send the numbers that come next."""
    own = Own(6)
    watch = Watch(search.find(own))
    first = watch.states()
    for _ in range(3):
        draw_global(), own.draw()
        queue.put(("a batch", watch.changes()))
    connection.send(first)
    connection.send([draw_global(), own.draw()])
    connection.close()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.quick(2)
def test_what_another_process_sent_makes_its_next_numbers_here(method: str) -> None:
    context: Any = torch_multiprocessing.get_context(method)
    queue, (here, there) = context.Queue(), multiprocessing.Pipe()
    process = context.Process(target=tell, args=(queue, there))
    process.start()
    told = [queue.get()[1] for _ in range(3)]
    states, expected = here.recv(), here.recv()
    process.join()
    for changes in told:
        states = worker_rng.merged(states, changes)

    own = Own(0)
    assert worker_rng.restore(states, own) == []
    assert [draw_global(), own.draw()] == expected


def test_a_stamp_that_was_pinned_says_the_same() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    own = Own(6)
    watch = Watch(search.find(own))
    draw_global(), own.draw()
    batch, (worker, told) = pin_memory(("a batch", (3, watch.changes())))

    assert (batch, worker) == ("a batch", 3)
    assert not [pieces for pieces in told.values() if any(map(torch.is_tensor, pieces.values()))]
    expected = [draw_global(), own.draw()]
    assert worker_rng.restore(told, (other := Own(0))) == []
    assert [draw_global(), other.draw()] == expected


@pytest.mark.parametrize(
    ("draw", "most"),
    [
        (lambda own: None, 8),
        (lambda own: random.random(), 40),
        (lambda own: np.random.rand(), 40),
        (lambda own: torch.rand(()), 80),
        (lambda own: own.pcg.random(), 300),
        (lambda own: draw_global(), 400),
    ],
)
def test_a_stamp_is_as_small_as_what_was_drawn(draw: Callable[[Own], Any], most: int) -> None:
    own = Own(7)
    watch = Watch(search.find(own))
    draw_global(), own.draw(), watch.changes()
    draw(own)

    assert len(pickle.dumps(watch.changes())) <= most
