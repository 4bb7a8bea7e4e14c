"""One process's use of a run: its start or resume, its loops, its saves and its end.

`resuming` chooses a checkpoint, restores from it and prints the line that says so. `loops` is `epochs()`,
`batches()` and `steps()`; `places` warns of where `save()` stands.
"""

__all__ = ["going_back", "loops", "observer", "places", "session"]
