"""The random generators of a process: found, read and restored."""

__all__ = ["code_names", "draws_between", "rng", "search", "worker_rng"]
