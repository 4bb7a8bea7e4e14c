"""The report: one self-contained page about one run or several."""

from __future__ import annotations

import contextlib
import html
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ..errors import SaveFailed, UsageError
from ..files import disk
from ..files.strict_json import Json
from ..progress import Progress
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.markup import Markup, escaped
from ..run.policy import when
from ..version import __version__
from . import charts, headline, sections
from .overview import overview

NAME = "report.html"
"""The default file name of a report."""

_MARK = '<!doctype html>\n<html lang="en" data-made-by="resumable report">'
_PAGE = """{mark}
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'nonce-{nonce}'; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} · resumable report</title>
<style>{style}</style>
</head>
<body>
<header><div><h1>{head}</h1><div class="quiet">resumable report, made {made}</div></div>\
<button type="button" id="theme" hidden></button></header>
<main>
{body}
</main>
<footer>resumable {version}. This page needs no network.</footer>
<script type="application/json" id="facts">{data}</script>
<script nonce="{nonce}">{script}</script>
</body>
</html>
"""


class Report:
    """A page that was written. A notebook shows it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The file."""

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
    """Write a page about some runs, completely or not at all; return it and the facts that it shows.

    With `reads_all` every byte is verified, otherwise only sizes and manifests.
    """
    target = Path(path).expanduser()
    _check(target)
    found = facts(runs, reads_all=reads_all)
    text = page(found)
    try:
        disk.replace(Path(os.path.realpath(target)), text.encode(errors="replace"))
    except OSError as exc:
        raise SaveFailed(
            f"the page could not be written to {target}: {exc.strerror}.",
            fix="mend the cause (room on the disk, permissions), or name another file.",
        ) from exc
    return Report(target), found


def _check(target: Path) -> None:
    """Check that a page can be written there: only an older report is replaced."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder.", fix=f"name a file: {target / NAME}.")
    if not (folder := Path(os.path.abspath(target)).parent).is_dir():
        raise UsageError(f"there is no folder {folder} to write {target.name} to.", fix="make it first.")
    if os.path.lexists(target) and not _is_report(target):
        raise UsageError(
            f"{target} is there already, and is not a page that `resumable report` has written.",
            fix="name another file, or move that one away.",
        )


def _is_report(path: Path) -> bool:
    # A pipe would never end.
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_MARK)) == _MARK.encode()
    return False


def page(runs: Sequence[Mapping[str, Json]]) -> str:
    """Return the page about runs, as `overview` describes them."""
    # Only the script with the nonce runs: what a manifest holds does nothing, even if it were not escaped.
    title = Markup(", ".join(escaped(run["run"]) for run in runs))
    drawn = charts.data(runs, charts.metrics(runs)[: sections.MOST_METRICS])
    return _PAGE.format(
        mark=_MARK,
        title=title,
        head=title + headline.badge(runs[0]) if len(runs) == 1 else title,
        made=when(datetime.now(timezone.utc).isoformat()),
        version=__version__,
        style=_asset("page.css"),
        nonce=secrets.token_hex(16),
        body=sections.body(runs),
        # In a script element only "<" could end it.
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=_asset("page.js"),
    )


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
