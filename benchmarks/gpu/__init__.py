"""One command for a machine with a GPU: the tests that need one, and what a save costs there."""
