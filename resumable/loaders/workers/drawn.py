"""What waits until the order of a pass is drawn again."""

from __future__ import annotations

from collections.abc import Callable


class Drawn:
    """What waits until an order is drawn, and what is done is skipped: no sample is loaded before."""

    then: Callable[[], object] | None = None

    def __call__(self) -> None:
        then, self.then = self.then, None
        if then is not None:
            then()
