"""One process's use of a run: its start or resume, its loops, its saves and its end."""

__all__ = ["going_back", "loops", "observer", "session"]
