"""Finds changes that a script makes after `save()` in the same body: a resume would lose them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..boundary import Boundary
from ..errors import SaveFailed
from ..files.strict_json import Json
from ..parts.part import Trees
from ..parts.watch import LastSave
from ..training import Training
from ..views import variables
from .image import Image
from .snapshot import Snapshot

_LOST = "what is lost"


class LateChanges:
    """What has changed since the last save, in the body that it was made in."""

    def __init__(self, training: Training, image: Image) -> None:
        self._parts = training.parts
        self._position = training.position
        self._once = training.once
        self._image = image
        self.save: _Save | None = None
        """The last save, until its body ends."""

    def begin(self, number: int, boundary: Boundary, trees: Trees, taken: Snapshot) -> None:
        """Compare with this save when its body ends, or when it is saved again in it."""
        position = self._position
        if position.is_outside():
            return
        is_finished = boundary is Boundary.EPOCH
        sums = None if is_finished else position.means.version
        self.save = _Save(number, position.work(), position.body(), sums, LastSave(trees, taken))

    def forget(self) -> None:
        """Compare with no save: its memory is needed, or the training was restored to another place."""
        self.save = None

    def find(self) -> list[str]:
        """Return the parts that have changed since the save in this body, and warn of them."""
        save, self.save = self.save, None
        if save is None or save.body != self._position.body():
            return []
        # A fused optimizer changes tensors without counting it, so steps are looked at too.
        stepped = self._parts.trained() if self._position.work() > save.work else []
        found: Mapping[str, tuple[Json, Json]] = {}
        self._image.catch_up()
        # The writer reports what went wrong with the image.
        with contextlib.suppress(SaveFailed):
            found = save.state.changed(self._parts)
        summed = [] if save.sums in (None, self._position.means.version) else ["means"]
        changed = [*dict.fromkeys([*stepped, *found, *summed])]
        if changed and not self._once.has_told(_LOST):
            named = (variables.differing(*found[one]) if one == variables.PART else [one] for one in changed)
            self._once.warn(
                f"{', '.join(itertools.chain(*named))} changed after save() in the same body: a resume from "
                f"checkpoint {save.number} would not have the change. Call save() last in the body. [R03]",
                about=_LOST,
            )
        for part in self._parts.all:
            self._once.warn_of(part.outgrown())
        return changed


class _Save(NamedTuple):
    number: int
    work: tuple[int, int, int]
    body: Any
    sums: int | None
    """The version of the means; None if the epoch is finished, which has no more use for them."""
    state: LastSave
