"""When a save is due, and how it is made while the training continues.

`autosave` decides when, `saver` makes the save, `writer` runs it in the background. The tensors are copied to
the host `image` behind a `fence`, which makes the next optimizer step wait; from GPUs by `gpu_copies`.
"""

__all__ = ["autosave", "closing", "fence", "saver", "unseen_optimizers", "writer"]
