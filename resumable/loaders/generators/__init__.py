"""The random generators of a process: found, read and restored.

`search` finds them, `rng` reads and restores those of this process, `worker_rng` those of a worker,
`draws_between` those of a plain iterable that is loaded again, and `sharded_rng` what torch keeps beside them
for sharded tensors.
"""

__all__ = ["code_names", "draws_between", "rng", "search", "sharded_rng", "worker_rng"]
