"""When a save is due, and how it is made while the training continues."""

__all__ = ["autosave", "fence", "saver", "unseen_optimizers", "writer"]
