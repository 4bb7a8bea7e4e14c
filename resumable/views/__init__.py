"""Shows a run to people and programs: tables, JSON, pages.

`overview` has the facts of a run, which the page of `report` shows; `details` has what `show` and `diff`
print. The table of `resumable ls` is put together in `cli.look`.
"""

__all__ = [
    "comparison",
    "contents",
    "details",
    "magnitudes",
    "overview",
    "report",
    "tables",
    "trees",
]
