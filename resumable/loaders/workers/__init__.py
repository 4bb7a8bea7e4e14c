"""How samples are loaded: their order, the worker processes, and torch's iterators over them."""

__all__ = [
    "object_counters",
    "object_states",
    "order",
    "resharding",
    "sample_seeds",
    "stream",
    "torch_iterators",
    "worker",
    "worker_state",
]
