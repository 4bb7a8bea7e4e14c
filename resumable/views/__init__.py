"""Shows a run to people and programs: tables, JSON, pages.

`overview` has the facts of a run, which the page of `report` shows; `details` has what `show` and `diff`
print. `listing` has the rows of `resumable ls`; `columns` makes a table fit the terminal.
"""

__all__ = [
    "comparison",
    "contents",
    "details",
    "listing",
    "magnitudes",
    "overview",
    "remote_listing",
    "report",
    "runs",
    "tables",
    "trees",
    "variables",
]
