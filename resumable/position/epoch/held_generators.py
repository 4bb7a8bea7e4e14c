"""The random generators of a training, and the states in which its loops continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ...loaders.generators import rng
from .loader_generators import LoaderGenerators

Hook = Callable[[], None]
Hold = Callable[[], Hook]
"""Remembers some state, and returns what restores it."""
States = Mapping[str, Any]


class HeldGenerators:
    """The random generators of a training, as they are and as they are held for where its loops continue."""

    def __init__(self, generators: Mapping[str, rng.Generator]) -> None:
        self._generators = generators
        self._loaders: dict[str, LoaderGenerators] = {}
        self.has_optimizer = False
        """Whether optimizers report their steps: until the first of these, nothing is trained."""
        self.body_start: States | None = None
        """The generators at the start of the body that is running."""
        self.is_put_back_due = False
        """Whether `put_back` may have anything to do."""
        self._hold_settings: Hold | None = None
        """Remembers the small parts, and returns what restores them."""
        self._hold_gradients: Hold | None = None
        """Remembers the gradients of a resumed window, and returns what restores them."""
        self._held: States | None = None
        self._put_gradients_back: Hook | None = None
        self._put_settings_back: Hook | None = None
        self._is_in_first_lines = False
        """Whether the body of a loop by hand has begun again, whose batches have not."""
        self._is_closed = False

    def expect_steps(self) -> None:
        """Note that optimizers report their steps."""
        self.has_optimizer = True

    def watch(self, hold_settings: Hold, hold_gradients: Hold) -> None:
        """Remember the settings and the gradients where a body runs a second time."""
        self._hold_settings, self._hold_gradients = hold_settings, hold_gradients

    def add_loader(self, name: str, generators: LoaderGenerators) -> None:
        """Add the generators of a loader."""
        self._loaders[name] = generators

    def read(self) -> dict[str, Any]:
        """Return the states of all generators."""
        return {
            **self.read_draws(),
            "loaders": {name: loader.read() for name, loader in self._loaders.items()},
        }

    def read_draws(self) -> dict[str, Any]:
        """Return the states of the generators that the script's own code draws from."""
        own = {name: rng.read(generator) for name, generator in self._generators.items()}
        return {"global": rng.collect(), "own": own, "loaders": {}}

    def write(self, states: States) -> None:
        """Put all generators into these states."""
        rng.restore(states["global"])
        for name in self._generators.keys() & states["own"].keys():
            rng.write(self._generators[name], states["own"][name])
        for name in self._loaders.keys() & states["loaders"].keys():
            self._loaders[name].write(states["loaders"][name])

    def hold(self) -> None:
        """Remember the generators for the next loop: draws until then do not count."""
        self._held, self._put_gradients_back = None if self._is_closed else self.read(), None
        self.is_put_back_due = True

    def put_back(self) -> None:
        """Restore the generators as they were held, and what a body's first lines have changed."""
        if (put_settings_back := self._put_settings_back) is not None:
            self._put_settings_back = None
            put_settings_back()
        if self._held is not None:
            if self._put_gradients_back:
                self._put_gradients_back()
                self._put_gradients_back = None
            self.write(self._held)
            self._held = None
        self._is_in_first_lines = self.is_put_back_due = False

    @contextmanager
    def as_held(self) -> Iterator[None]:
        """Set the generators as they are held, and afterwards restore them."""
        if self._held is None:
            yield
            return
        now = self.read()
        self.write(self._held)
        try:
            yield
            # With other settings than at the checkpoint, a loader may have moved them.
            self._held = self.read()
        finally:
            self.write(now)

    def forget_held(self) -> None:
        """Restore nothing: an epoch begins, and its first body has continued from the restored states."""
        self._held = self._put_settings_back = self._put_gradients_back = None

    def begin_body(self, *, is_second_time: bool) -> None:
        """Begin a body of `epochs()`.

        The first lines of one that is resumed in the middle run for the second time: they draw what they
        drew then, and the loop in the body puts back what they have changed.
        """
        if is_second_time and self.body_start:
            self.write(self.body_start)
            self._put_settings_back = self._hold_settings and self._hold_settings()
            self.is_put_back_due = True
        else:
            self.put_back()
            self.body_start = self.read()

    def forget_body(self) -> None:
        """Forget where the body began that was running."""
        self.body_start = None

    def close(self) -> None:
        """Put the generators back where a loop by hand had nothing left to do, and never again.

        An iterator that the script has kept may end much later, and the generators are another run's then.
        """
        if self._is_in_first_lines:
            self.put_back()
        self.forget_held()
        self._is_closed = True
