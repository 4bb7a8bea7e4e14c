"""Weights and checkpoints to and from other tools."""

__all__ = ["adopting", "exporting", "importing", "weights"]
