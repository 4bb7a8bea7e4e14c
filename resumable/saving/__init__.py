"""When a save is due, and how it is made while the training goes on."""

__all__ = ["autosave", "fence", "saver", "unseen_optimizers", "writer"]
