"""What people and programs see of a run: tables, JSON, pages."""

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
