"""How a script loops over a loader's batches, and warnings about what a resume would do differently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from types import CodeType, FrameType
from typing import Any

from ..errors import warn
from ..loaders.generators import rng
from ..variables.script import asking, frames

_CUT = (
    "cut by {}(), which counts from 0 again after a resume in mid-epoch: that epoch gets more batches. Leave "
    "the loop by state.batch instead: if state.batch >= n: break"
)
_HOLDERS = {
    islice: _CUT.format("islice"),
    zip: _CUT.format("zip"),
    cycle: "repeated by itertools.cycle(), after a resume only from there on. Call next() on a generator "
    "that is made before the loop over the epochs instead: while True: yield from state.batches(...)",
}


class Habits:
    """What a script was seen to do in its loops over one loader."""

    def __init__(self) -> None:
        self.is_asked_by_hand = False
        """Whether the script calls next() itself instead of looping with for."""
        self._places: list[tuple[CodeType, int, bool]] = []
        """Where the first batch was asked for, and whether by next(); before it, where that generator was."""
        self._is_looked_at = self._is_left_after_save = self._has_ended_untrained = False

    def resumed(self, *, is_asked_by_hand: bool) -> None:
        """Continue with what the checkpoint recorded."""
        self.is_asked_by_hand = is_asked_by_hand

    def epoch_begins(self) -> None:
        """Forget what was seen in the epoch before."""
        self._is_left_after_save = self._has_ended_untrained = False

    def asked(self, asked_by: FrameType, *, is_direct: bool) -> None:
        """Note where the first batch is asked for; `is_direct`: not by a prefetcher of `through=`."""
        self.is_asked_by_hand = is_direct and asking.is_call(asked_by)
        frame: FrameType | None = asked_by
        self._places = []
        while frame is not None and all(frames.is_generator(code) for code, *_ in self._places):
            self._places.insert(0, (frame.f_code, frame.f_lasti, is_direct and asking.is_call(frame)))
            frame = frame.f_back

    def is_inside(self, outer: Habits) -> bool:
        """Whether the loop over the batches runs in the body of another: nobody asks it by next()."""
        for place, other in zip(self._places, outer._places, strict=False):
            # Where both are asked at one place, by zip() say, the generators in between tell.
            if place != other:
                code, _, is_call = place
                return not is_call and (code is other[0] or not frames.is_generator(code))
        return False

    def left_after_save(self) -> None:
        """Note that the loop was left in the body that had called `save()`."""
        self._is_left_after_save = True

    def ended(self, *, is_untrained: bool) -> None:
        """Note that the batches came to their end; `is_untrained`: before any of them was trained."""
        self._has_ended_untrained = is_untrained

    def look_at_holders(self, loop: Iterator[object]) -> None:
        """Warn, once, of iterators that count the batches of a loop: after a resume they start again."""
        if self._is_looked_at:
            return
        self._is_looked_at = True
        found = asking.holders(loop)
        for kind, what in _HOLDERS.items():
            if kind in found:
                warn(f"the loop over batches is {what} [R07]")

    def warn_of_left_after_save(self) -> None:
        """Warn of a break after `save()` in the same body: the checkpoint does not know of the break."""
        if self._is_left_after_save:
            self._is_left_after_save = False
            warn(
                "the loop over batches was left right after save() in the same body: a resume from that "
                "checkpoint continues with the next batch. Call save() after the loop instead, or leave the "
                "loop at the top of a body. [R02]"
            )

    def warn_of_late_step(self) -> None:
        """Warn of a step after all batches were asked for, and none of them was trained before."""
        if self._has_ended_untrained:
            self._has_ended_untrained = False
            warn(
                "all batches of the epoch were asked for before the first of them was trained (by list(), "
                "say): a checkpoint would count them all as done. Loop over state.batches() itself. [R06]"
            )


def warn_of_draws_before_next(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn of random numbers that are drawn before next() is called by hand."""
    if not rng.is_same(then, now):
        warn(
            "random numbers are drawn before next() is called on the iterator of state.batches(): a save "
            "in the body is exact, but where the loop saves by itself (every=, a signal) it does so in "
            "next(), and a resume draws them again. Draw them after next(), or loop with for. [R08]"
        )


def warn_of_generator(asked_by: FrameType) -> None:
    """Warn of a generator that has asked for two batches before anything was trained on the first."""
    code, module = asked_by.f_code, str(asked_by.f_globals.get("__name__"))
    is_harmless = module.partition(".")[0] in ("tqdm", "rich") or code.co_name == "<genexpr>"
    if frames.is_generator(code) and not is_harmless:
        warn(
            f"{code.co_name}() has asked for two batches, and nothing was trained on the first. If it looks "
            "one batch ahead, a resume leaves a batch out: hand it to "
            f"state.batches(through={code.co_name}). If it only skips the first one, nothing is lost. [R06]"
        )
