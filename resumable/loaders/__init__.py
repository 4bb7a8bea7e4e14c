"""Where each kind of loader stands in its data, its workers and their random generators included."""

__all__ = [
    "dataloader",
    "doubts",
    "named",
    "plain_source",
    "rng",
    "source",
    "sources",
    "torch_iterators",
    "wrappers",
]
