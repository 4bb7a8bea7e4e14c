"""Where each kind of loader stands in its data, its workers and their random generators included."""

__all__ = [
    "choose_source",
    "loader_changes",
    "loader_source",
    "loader_warnings",
    "plain_iterable",
    "source",
    "wrappers",
]
