"""Saving and loading next to other libraries and next to the raw limit, all in one run."""
