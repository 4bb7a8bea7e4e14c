"""The random generators of a process: found, read and restored.

`search` finds them, `rng` reads and restores those of this process, `worker_rng` those of a worker,
`draws_between` those of a plain iterable that is loaded again, `sharded_rng` what torch keeps beside them for
sharded tensors, and `stages` what a WebDataset draws its orders from.
"""

__all__ = ["code_names", "draws_between", "rng", "search", "sharded_rng", "stages", "worker_rng"]
