"""Copies of whole checkpoints elsewhere: complete, or not there.

`background` pushes while a training runs, and decides what to push next and when to try again; `by_hand` is
`resumable push` and `pull`. `push` and `pull` move one checkpoint. `run_copy` is a run in a remote folder,
`storage` the folder, and `connection` the calls to its filesystem, with their timeouts and retries.
"""

__all__ = ["by_hand", "in_training", "push", "run_copy", "storage", "url"]
