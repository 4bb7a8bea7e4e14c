"""One run directory: its checkpoints, what they say of themselves, and which of them stay.

`directory` is the run, `checkpoint` one checkpoint, `manifest` what it says of itself. `policy` decides which
checkpoints a training keeps, `cleanup` which ones `resumable prune` removes.
"""

__all__ = [
    "changes",
    "checkpoint",
    "cleanup",
    "directory",
    "environment",
    "history",
    "manifest",
    "markup",
    "policy",
    "resume_choice",
]
