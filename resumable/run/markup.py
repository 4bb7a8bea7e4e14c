"""HTML from untrusted text: nothing in it is taken for markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import printable


class Markup(str):
    """HTML that is put into a page as it is."""


def escaped(value: object) -> Markup:
    """Return a value as HTML: text is escaped, markup stays, None is empty.

    >>> escaped("<b>"), escaped(Markup("<b>")), escaped(None), escaped("up\\u202enwod")
    ('&lt;b&gt;', '<b>', '', 'up\\\\u202enwod')
    """
    if isinstance(value, Markup):
        return value
    # Imported here, because few commands write pages.
    import html

    return Markup("" if value is None else html.escape(printable(str(value))))


def tag(name: str, *inside: object, **attributes: str) -> Markup:
    """Return an element; an attribute's `_` stands for `-`, and one at its end for nothing.

    >>> tag("td", "a < b", class_="wide")
    '<td class="wide">a &lt; b</td>'
    """
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escaped(v)}"' for key, v in attributes.items())
    return Markup(f"<{name}{given}>{''.join(map(escaped, inside))}</{name}>")


def table(
    caption: str, head: Sequence[object], rows: Iterable[Sequence[object]], to_the_left: Iterable[int] = ()
) -> Markup:
    """Return a table; numbers are right-aligned, except in the columns `to_the_left`.

    >>> table("Saves", ["number"], [[1]])[:54]
    '<table><caption>Saves</caption><thead><tr><th scope="c'
    """
    words = {*to_the_left}
    classes = ["words" if index in words else "number" for index in range(len(head))]
    titles = (tag("th", title, scope="col", class_=kind) for title, kind in zip(head, classes, strict=True))
    lines = (
        tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, classes, strict=True)))
        for row in rows
    )
    body = tag("thead", tag("tr", *titles)), tag("tbody", *lines)
    return tag("table", tag("caption", caption), *body)


def section(title: str, level: int, *inside: object) -> Markup:
    """Return a section below its heading."""
    return tag("section", tag(f"h{level}", title), *inside)


def scrolling(content: Markup, label: str) -> Markup:
    """Return wide content in a box that scrolls, reachable by keyboard."""
    return tag("div", content, class_="scroll", role="region", tabindex="0", aria_label=label)
