"""Where a training stands: epochs, steps, batches, random generators and running means."""

__all__ = [
    "batch_loop",
    "bytecode",
    "counted_loops",
    "counting",
    "last_batch",
    "loader_position",
    "loop_variables",
    "means",
    "position",
    "prefetch",
    "spikes",
]
