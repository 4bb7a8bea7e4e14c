"""Where a training stands: counters, the place in each loader's epoch, random generators, running means."""

__all__ = [
    "batch_loop",
    "counted_loops",
    "last_batch",
    "loader_position",
    "means",
    "position",
    "prefetching",
    "spikes",
    "to_device",
    "training_counters",
]
