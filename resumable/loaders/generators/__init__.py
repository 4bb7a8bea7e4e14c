"""The random generators of a process: found, read and restored.

`search` finds them, `rng` reads and restores those of this process, `worker_rng` those of a worker, and
`draws_between` those of a plain iterable that is loaded again.
"""

__all__ = ["code_names", "draws_between", "rng", "search", "worker_rng"]
