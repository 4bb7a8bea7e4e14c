"""Weights to and from other tools."""

__all__ = ["exporting", "weights"]
