"""Object graphs, walked without running code of theirs: whose code, which kind, which path, what content."""

__all__ = ["contents", "kinds", "own", "slots", "walks"]
