"""The live objects of a training: read into trees, and put back all or none."""

__all__ = ["aliases", "capture", "gradients", "models", "part", "reading"]
