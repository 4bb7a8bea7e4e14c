"""Where a training stands: epochs, steps, batches, random generators and running means."""

__all__ = [
    "bytecode",
    "last_batch",
    "loader_position",
    "loop_variables",
    "means",
    "position",
    "prefetch",
    "spikes",
]
