"""Going back to an earlier checkpoint, when a script asks for it or its loss spikes."""

from __future__ import annotations

import time
from typing import Any

from .. import options
from ..errors import Diverged, UsageError
from ..files import pin
from ..files.threads import no_garbage_collection
from ..position import spikes
from ..position.spikes import Spikes
from ..run.resume_choice import Which
from .session import Session


class GoingBack:
    """Puts a running training back to a checkpoint."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._training, self._resuming = session.training, session.resuming
        self._is_calm = True
        """Whether the loss has not spiked since the last time."""

    @no_garbage_collection()
    def restore(self, which: Which, only: str | None, skip: bool, expect: str | None) -> None:
        """Restore everything, only one part, or all but the place in the data and the generators."""
        self._session.refuse_closed()
        started, expect = time.perf_counter(), pin.checked(expect)
        if skip and only is not None:
            raise UsageError(
                f"restore(only={only!r}) leaves the place in the data as it is, so there is nothing to skip.",
                fix="leave out skip=True, or only=.",
            )
        self._settle()
        chosen = self._resuming.go_back(which, only, skip, expect)
        if only is None:
            self._session.went_back()
        what, way = (f"put back {only} of", "from") if only else ("went back in", "to")
        line = self._resuming.line(what, chosen, started, way)
        self._training.print(line + ("; the batches since are left out" if skip else ""))

    def if_spiked(self, loss: Any, above: float, limit: int) -> bool:
        """Go back if the loss is not finite or above a bound; return whether it was."""
        self._session.refuse_closed()
        options.count("limit", limit)
        value = spikes.number("loss", loss)
        if not spikes.is_spike(value, spikes.number("above", above)):
            self._is_calm = True
            return False
        self._settle()
        run, position = self._training.run, self._training.position
        newest = self._training.crew.ranks.first("spiked()", lambda: run.highest() or 0, is_due=True)
        count = position.spikes.lately(newest, limit)
        epoch, batch, step = position.stands_at()
        where = f"the loss is {value:.4g} at epoch {epoch}, batch {batch}, step {step}"
        if count >= limit:
            raise Diverged(
                f"{where}, and {run} has gone back {count} times already (limit={limit}).",
                fix="look at the data there, lower the learning rate, or resume from an earlier checkpoint: "
                "resume=NUMBER.",
            )
        chosen = self._resuming.go_back_from_spike(where, not self._is_calm)
        self._session.went_back()
        position.spikes, self._is_calm = Spikes(count + 1, newest), False
        self._training.print(
            f"{where}: went back in {run} to checkpoint {chosen.about.number} (step {position.step}); the "
            f"batches since are left out ({count + 1} of {limit} times)"
        )
        return True

    def _settle(self) -> None:
        self._session.saving.settle()
        self._training.meet()
