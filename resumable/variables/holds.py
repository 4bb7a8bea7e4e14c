"""What the lines between two heads change, undone: they ran before, in the body that goes on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..objects import kinds
from . import making, signs
from .looks import Namespace
from .owned import Owned
from .passes import Moment


class Hold:
    """The variables as they are at the head of an outer loop, until the inner one begins."""

    def __init__(self, namespaces: Sequence[Namespace], owned: Owned) -> None:
        self._variables = {one.key: one.variables for one in namespaces}
        self._moment = Moment.now(namespaces, owned)

    def put_back(
        self, namespaces: Iterable[Namespace], owned: Owned, lacking: Collection[tuple[str, str]]
    ) -> None:
        """Put back what has changed since; a file or a loader that these lines have made stays.

        `lacking`: the variables that the checkpoint could not have.
        """
        self._moment.put_back((), owned)
        for namespace in namespaces:
            then, now = self._variables.get(namespace.key, {}), namespace.variables
            changed = {
                name: then[name]
                for name in then.keys() & namespace.may_be_bound
                if then[name] is not now.get(name) and _may_go(now.get(name))
                if (namespace.key, name) not in lacking
            }
            namespace.bind(changed)


def _may_go(value: Any) -> bool:
    kind = kinds.kind_of(value)
    if kind == "library":
        return making.can_be_made(value, kind)
    return signs.live(value) is None and signs.inside(value) is None
