"""Puts a `RunState` into the loops of other frameworks; each module is imported only when asked for."""

__all__ = ["trainer_progress", "transformers"]
