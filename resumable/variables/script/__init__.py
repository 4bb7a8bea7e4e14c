"""The script as it runs: its frames, what its code assigns and reads, and the iterators around our loops."""

__all__ = ["ahead", "asking", "bytecode", "enumerates", "frames"]
