"""Where each kind of loader stands in its data, its workers and their random generators included."""

__all__ = ["choose_source", "loader_source", "loader_warnings", "plain_iterable", "source", "wrappers"]
