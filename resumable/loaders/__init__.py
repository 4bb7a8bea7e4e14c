"""How each kind of loader is stopped and continued in the middle of an epoch.

`loader_source` reads torch's DataLoader, `stateful_loader` a loader with a `state_dict`, `plain_iterable`
anything else that can be looped over; `epoch_reader` counts the batches. `generators` finds, reads and
restores random generators, those of a worker in `worker_rng`; `workers` has what runs in worker processes.
"""

__all__ = [
    "choose_source",
    "kinds",
    "loader_changes",
    "loader_source",
    "loader_warnings",
    "plain_iterable",
    "prepared",
    "source",
    "wrappers",
]
