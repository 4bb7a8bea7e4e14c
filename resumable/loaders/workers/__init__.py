"""The order of an epoch's samples, and the worker processes that load them.

`worker` runs in each worker process: it restores the worker's generators and dataset as it begins, and
stamps each batch with what has changed. `order` draws the order of an epoch again, `resharding` divides the
rest of it among another number of ranks, `shelter` keeps signals from workers, `torch_iterators` has all
that depends on torch's private names, and `torchdata` and `hugging_face` all that depends on those of other
loaders.
"""

__all__ = [
    "datasets",
    "drawn",
    "hugging_face",
    "memory",
    "order",
    "resharding",
    "shelter",
    "states",
    "torch_iterators",
    "torchdata",
    "worker",
]
