"""The heads of the loops, where a training goes on: parts and variables are there as they were saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from ..files import codec, fingerprint
from ..parts import collect
from ..parts.part import Part
from ..position.loader_position import LoaderPosition
from ..training import Training
from ..variables.part import ScriptPart
from .resuming import Resuming


class Heads:
    """Undoes, until a body is handed out, what the script's lines before it have changed."""

    def __init__(self, training: Training, resuming: Resuming) -> None:
        self._training, self._resuming = training, resuming
        self._parts: Sequence[Part] = [*training.parts.models, *training.parts.optimizers]
        self._loaded: Mapping[str, object] | None = None
        """Until a body begins, what models and optimizers were as they were loaded.

        None of one that the script has changed since.
        """
        self._updates = 0
        """How many steps the optimizers had made as it was loaded; -1 behind the first head since."""
        self._goes_back = False
        self._thread = threading.get_ident()

    def _script(self) -> ScriptPart | None:
        """Return the script's variables where its loops run: a thread that loads batches has other frames."""
        return self._training.script if threading.get_ident() == self._thread else None

    def loaded(self) -> None:
        """Note what a checkpoint has put into the parts."""
        if self._training.script:
            self._loaded = {part.name: _content(part) for part in self._parts}
            self._updates = self._training.position.all_updates
            self._training.position.handed.call_at_body(self._body_begins)

    def went_back(self) -> None:
        """Put the variables back at once where a body runs: what is left of it counts."""
        self.loaded()
        is_due = self._training.position.streams.is_holding()
        if (script := self._script()) is not None and not self._training.position.is_outside():
            script.share()
            script.expect(is_still=False)
            self._goes_back = is_due
            self._tell(script.variables.go_back(is_due=is_due))
        if not is_due:
            self._loaded = None

    def come(self) -> None:
        """Put back what was loaded, if no body was handed out since."""
        if (script := self._script()) is None:
            return
        position = self._training.position
        # A `while` around batches() has read a counter, which puts the generators back before its first head.
        is_first = position.is_outside() and position.all_updates == self._updates
        is_due = self._is_due() or (self._loaded is not None and is_first)
        self._updates = -1
        if self._goes_back:
            self._loaded = {name: then if then == now else None for name, then, now in self._contents()}
            self._goes_back = False
        elif is_due:
            self._put_parts_back()
        if is_due:
            script.share()
        self._loaded = self._loaded if is_due else None
        _, problems = script.variables.head(is_due=is_due)
        for one in script.variables.news:
            self._training.print(f"of the script: {one}")
        script.variables.news.clear()
        self._tell(problems)

    def begin_pass(self, name: str, at: LoaderPosition) -> None:
        """Note with what a pass over a loader begins; put it back if it goes on, until it is drawn again."""
        if (script := self._script()) is None:
            return
        begin = script.variables.pass_begins
        at.source.drawn.then, problems = begin(name, at.source.loader, goes_on=at.goes_on())
        self._tell(problems)

    def asked(self, name: str, loop: Iterator[Any], asked_by: FrameType) -> bool:
        """Let what numbers the batches of a loader go on; False if nobody looks at it."""
        if (script := self._script()) is not None:
            self._tell(script.variables.renumber(name, loop, asked_by))
            # In a body of `steps()` no batch ends it.
            if self._training.position.is_in_epochs() and self._training.position.is_in_batches():
                self._training.once.warn_of(script.variables.asked(asked_by))
        return script is not None

    def saving(self, *, is_called: bool) -> None:
        """Note what may follow a save; warn of a `save()` where a resume cannot go on exactly."""
        self.body_ended()
        if self._is_due() and not self._goes_back:
            # The lines before the loop, which run again, have come to a `save()` of theirs.
            self._put_parts_back()
        if not is_called or self._training.position.is_outside() or (script := self._script()) is None:
            return
        self._training.once.warn_of(script.variables.places())
        script.expect(is_still=script.variables.is_last_in_body())
        self._training.position.ends_without_batches(script.variables.may_ask_again)

    def _is_due(self) -> bool:
        """Whether no body has begun since a load: a body that an exception ends is not undone."""
        return self._loaded is not None and self._training.position.streams.is_holding()

    def _body_begins(self) -> None:
        self._loaded = None
        if self._training.script:
            self._training.script.forget_loaded()

    def body_ended(self) -> None:
        """Note that the script goes on."""
        if self._training.script:
            self._training.script.expect(is_still=False)

    def _tell(self, problems: Sequence[str]) -> None:
        script, what = self._training.script, "a variable of the script is not what it was saved as [R12]"
        told = [one for one in problems if not (script and script.accepts(one.partition(": ")[0]))]
        self._training.once.warn_of(f"{what}: {problem}" for problem in told)

    def _contents(self) -> Iterator[tuple[str, object, object]]:
        """Yield what each model and optimizer was as it was loaded, and what it is."""
        loaded = self._loaded or {}
        return ((part.name, loaded.get(part.name), _content(part)) for part in self._parts)

    def _put_parts_back(self) -> None:
        changed = [name for name, then, now in self._contents() if then is not None and then != now]
        ranks = self._training.crew.ranks
        if any(ranks.agree("what the lines before the loop have changed", lambda: changed)):
            self._resuming.put_again(changed)


def _content(part: Part) -> object:
    found = []
    for tree in collect.encoded([part]).values():
        json = collect.without_fleeting(tree.json[part.name])
        found.append((json, [fingerprint.of_tensor(tree.tensors[name]) for name in codec.tensor_names(json)]))
    return found
