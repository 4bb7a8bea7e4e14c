"""A hook of mkdocs: which pages the search of the site shows first.

The records and the changelog name every option too; a reader who searches wants the page that explains it.
"""

from __future__ import annotations

from typing import Any

BOOSTS = {
    "docs/guide/": 2.0,
    "docs/decisions/": 0.01,
    "CHANGELOG.md": 0.01,
    "CONTRIBUTING.md": 0.1,
    "docs/guarantees.md": 0.5,
    "docs/looking-for.md": 1.5,
    "docs/api.md": 2.0,
}
"""By the beginning of a page's path; all other pages have 1."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Give the page its boost."""
    path = page.file.src_uri
    boost = next((boost for begin, boost in BOOSTS.items() if path.startswith(begin)), 1.0)
    page.meta.setdefault("search", {"boost": boost})
    return markdown
