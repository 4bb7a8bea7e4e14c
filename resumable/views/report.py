"""The report: one self-contained page about one run or several."""

from __future__ import annotations

import base64
import gzip
import html
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import UsageError
from ..files.strict_json import Json
from ..progress import Progress
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.markup import Markup, in_script, tag
from . import html_page, sections
from .charts import Curves, metrics
from .overview import overview

NAME = "report.html"
"""The default file name of a report."""


class Report:
    """A page that was written. A notebook shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"<Report {self.path}>"

    def _repr_html_(self) -> str:
        # The whole page: a notebook may be opened where the file is not.
        page = html.escape(self.path.read_text(encoding="utf-8"))
        size = 'width="100%" height="720" style="border:0"'
        return f'<iframe sandbox="allow-scripts" title="resumable report" {size} srcdoc="{page}"></iframe>'


def facts(runs: Sequence[Run], *, reads_all: bool = False) -> list[dict[str, Json]]:
    """Return the facts about some runs; with `reads_all` every byte is verified, under a progress bar."""
    return [overview(run, _verify if reads_all else None) for run in runs]


def _verify(found: Checkpoint) -> None:
    with Progress().reading(f"verifying {found}", found.about.size) as told:
        found.verify(told)


def write(
    runs: Sequence[Run], path: str | os.PathLike[str] = NAME, *, reads_all: bool = False
) -> tuple[Report, list[dict[str, Json]]]:
    """Write a page about some runs; return it and the facts that it shows.

    With `reads_all` every byte is verified, otherwise only sizes and manifests.
    """
    target = Path(path)
    html_page.check(target, "report")
    library = _library()
    found = facts(runs, reads_all=reads_all)
    html_page.write(target, page(found, library))
    return Report(target), found


def _library() -> bytes:
    """Return plotly.js, which draws the charts."""
    found = importlib.util.find_spec("plotly")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "package_data" / "plotly.min.js"
        if file.is_file():
            return file.read_bytes()
    raise UsageError(
        "the report needs the package plotly, which draws its charts.",
        fix='pip install "torch-resumable[report]"',
    )


def page(runs: Sequence[Mapping[str, Json]], library: bytes) -> str:
    """Return the page about runs, as `overview` describes them."""
    curves = Curves(runs)
    names = [str(run["run"]) for run in runs]
    made = sections.Page(curves, metrics(runs))
    body = made.make()
    charts = in_script({"runs": names, "charts": made.charts})
    # Browsers can decompress gzip by themselves.
    packed = base64.b64encode(gzip.compress(library, 9, mtime=0)).decode()
    return html_page.page(
        "report",
        title=", ".join(names),
        heading=Markup(sections.runs_named(names)),
        body=body,
        note=f" Charts: plotly.js {_version(library)}, MIT licence.",
        data=tag("script", charts, type="application/json", id="data")
        + tag("script", Markup(packed), type="text/plain", id="library"),
        script=html_page.text_of("report.js"),
    )


def _version(library: bytes) -> str:
    found = re.search(rb"plotly\.js (v[0-9.]+)", library[:300])
    return found[1].decode() if found else ""
