"""Copies of whole checkpoints elsewhere: complete, or not there."""

__all__ = ["by_hand", "in_training", "push", "run_copy", "storage", "url"]
