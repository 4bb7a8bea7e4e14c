"""Our warnings as errors, but for the one that tells how busy this machine's disk is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from resumable import ResumableWarning

A_BUSY_DISK = "save() has waited"


def raise_them() -> None:
    """Raise them from now on."""
    warnings.simplefilter("error", ResumableWarning)
    warnings.filterwarnings("ignore", A_BUSY_DISK.replace("()", ".."), ResumableWarning)


@contextmanager
def raised() -> Iterator[None]:
    """Raise them until the block's end."""
    with warnings.catch_warnings():
        raise_them()
        yield
