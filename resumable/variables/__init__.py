"""The script's own variables: what a loop changed in them is stored, and put back at the head of the loop."""

__all__ = ["choice", "libraries", "looks", "part", "putting", "variables"]
