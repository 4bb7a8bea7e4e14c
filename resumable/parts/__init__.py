"""The live objects of a training: collected into trees, and restored all or none."""

__all__ = [
    "aliases",
    "box_reading",
    "boxes",
    "collect",
    "fit",
    "gradients",
    "models",
    "part",
    "parts",
    "reading",
    "restore",
    "sharding",
    "slots",
    "watch",
]
