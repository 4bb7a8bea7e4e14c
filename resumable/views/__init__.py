"""Shows a run to people and programs: tables, JSON, pages."""

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
