"""Where a training stands: epochs, steps, batches, random generators and running means."""

__all__ = [
    "batch_loop",
    "counted_loops",
    "last_batch",
    "loader_position",
    "means",
    "position",
    "prefetch",
    "spikes",
    "training_counters",
]
