"""The files of the last save: the next one writes only what has changed, in the way that was fastest."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from ..files import codec
from ..files.large_files import Content, Written
from ..files.strict_json import Json
from ..parts.part import Trees
from ..run.manifest import Manifest
from ..training import Training
from .snapshot import Snapshot
from .ways import Ways


class SavedFiles:
    """Writes the files of each save, and knows what the last ones were."""

    def __init__(self, training: Training) -> None:
        self._crew = training.crew
        self._parts = training.parts
        self.ways = Ways(training.run.path)
        self._last: Mapping[str, Written] = {}
        self.settled: AbstractSet[str] = frozenset()
        """The files that were the same in the last two saves."""

    def start_from(self, written: Mapping[str, Written]) -> None:
        """Compare the next save with these files: those of the checkpoint that was loaded."""
        self._last = written

    def contents(self, taken: Snapshot, trees: Trees) -> dict[str, Content]:
        """Return the content of each file that this process writes."""
        files = taken.contents(self._last)
        for path, text in codec.to_texts(trees, self._crew.ranks.rank, self._parts.led()).items():
            if self._crew.leads or codec.has_one_writer(path):
                files[path] = Content(text)
        return files

    def commit(
        self, about: Manifest, files: Mapping[str, Content], why: str
    ) -> tuple[Manifest | None, Mapping[str, Json] | None]:
        """Write and commit; return the manifest, if this process leads, and how the disk was written."""
        size = sum(content.data.nbytes for path, content in files.items() if path not in self.settled)
        way, began = self.ways.choose(size, why), time.perf_counter()
        before = self._last
        committed, self._last = self._crew.commit(about, files, way)
        wrote = self.ways.note(way, self._last.values(), time.perf_counter() - began)
        both = before.keys() & self._last.keys()
        self.settled = {path for path in both if before[path].blocks == self._last[path].blocks}
        return committed, wrote
