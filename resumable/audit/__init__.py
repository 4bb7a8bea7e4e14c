"""Runs a script several times, and names what a resume would lose."""

__all__ = ["audit", "recorder", "survey", "trials", "verdicts"]
