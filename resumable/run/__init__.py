"""One run directory: its checkpoints, what they say of themselves, and which of them stay."""

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
