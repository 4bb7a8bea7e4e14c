"""How far an epoch has come: its batches, and the random streams that it draws from."""

__all__ = [
    "batch_digests",
    "epoch_place",
    "held_generators",
    "loader_generators",
    "random_streams",
    "settings_diff",
]
