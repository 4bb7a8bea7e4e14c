"""One run directory: its checkpoints, what they say of themselves, and which of them stay.

`address` is what names a checkpoint, `directory` is the run, `checkpoint` one checkpoint, `manifest` what it
says of itself. `policy` decides which checkpoints a training keeps, `cleanup` which ones `resumable prune`
removes.
"""

__all__ = [
    "address",
    "changes",
    "checkpoint",
    "cleanup",
    "directory",
    "environment",
    "history",
    "history_scan",
    "history_writer",
    "manifest",
    "markup",
    "policy",
    "resume_choice",
]
