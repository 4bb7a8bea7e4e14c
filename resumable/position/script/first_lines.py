"""Warns of changes made by the lines before a loop, which run again after a resume."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import warn

Look = Callable[[], Callable[[], list[str]]]
"""Looks at some parts, and returns a function that names those that have changed since."""


class BeforeLoop:
    """The lines between `RunState.load` and the first loop, which each start runs on what was loaded.

    At the first start they may be guarded: a script that reads `state.resumed` or a counter there knows
    that it may be resumed.
    """

    def __init__(self) -> None:
        self._look_at_models: Look | None = None
        self._look_at_settings: Look | None = None
        self._changed_since: list[Callable[[], list[str]]] = []
        self._is_resumed = False

    def watch(self, models: Look | None, settings: Look | None) -> None:
        """Look at the models, and at the settings of the other parts."""
        self._look_at_models, self._look_at_settings = models, settings

    def begin(self, *, is_resumed: bool) -> None:
        """Note that a checkpoint was loaded, or that there is none."""
        self._is_resumed = is_resumed
        # At the first start a setting that every start makes the same is exact.
        looks = [self._look_at_models, self._look_at_settings if is_resumed else None]
        self._changed_since = [look() for look in looks if look]

    def was_read(self, *, may_begin_loop: bool) -> None:
        """Note that the script reads its progress; a loop of its own may begin here."""
        if may_begin_loop and self._is_resumed:
            self.end()
        if may_begin_loop or not self._is_resumed:
            self.forget()

    def end(self) -> None:
        """Note that a loop begins."""
        changed = [name for changed_since in self._changed_since for name in changed_since()]
        self.forget()
        if changed:
            warn(
                f"{', '.join(changed)} changed between RunState.load and the loop: a resume loads what was "
                "saved, and those lines change it again. Move them before RunState.load, or let only the "
                "first start run them: if not state.resumed: ..."
            )

    def forget(self) -> None:
        """Warn of nothing any more: the training has begun."""
        self._changed_since = []


class FirstLines:
    """The lines of an epoch's body before its loop, and between two: a resume in mid-epoch runs them again.

    Models are not restored after that, so in the first two bodies a change there causes a warning.
    """

    def __init__(self) -> None:
        self._look: Look | None = None
        self._changed_since: Callable[[], list[str]] | None = None
        self._bodies = 0
        self.is_looking = False
        """Whether the first batch shows what the lines before it have changed."""

    def watch(self, models: Look | None) -> None:
        """Look at the models."""
        self._look = models

    def begin(self) -> None:
        """Note that a body begins."""
        self._bodies += 1
        self.go_on()

    def go_on(self) -> None:
        """Note that a loop over batches has ended."""
        self._changed_since = self._look() if self._look and self._bodies <= 2 else None
        self.is_looking = self._changed_since is not None

    def end(self) -> None:
        """Note that a loop over batches has its first batch."""
        changed_since, self._changed_since = self._changed_since, None
        self.is_looking = False
        if changed_since and (changed := changed_since()):
            self._bodies = 3
            warn(
                f"{', '.join(changed)} changed in the body of epochs() before state.batches(): a resume in "
                "the middle of these batches runs those lines again, on what they have changed. Move them "
                "behind the last loop of the body."
            )
