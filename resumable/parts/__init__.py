"""The live objects of a training: collected into trees, and restored all or none."""

__all__ = [
    "aliases",
    "allowed",
    "box_reading",
    "boxes",
    "collect",
    "fit",
    "gradients",
    "models",
    "optimizers",
    "other_parts",
    "part",
    "parts",
    "reading",
    "renaming",
    "restore",
    "sharding",
    "slots",
    "watch",
]
