"""Where a training stands: counters, the place in each loader's epoch, random generators, running means.

`loader_position` keeps the place in an epoch of one loader, `batch_loop` moves it batch by batch, and
`prefetching` follows a loader that runs ahead of the training. `random_streams` restores the generators of
the training's own process. `position` puts all of it together for a checkpoint.
"""

__all__ = [
    "batch_loop",
    "counted_loops",
    "loader_position",
    "logged",
    "means",
    "position",
    "prefetching",
    "spikes",
    "to_device",
    "training_counters",
]
