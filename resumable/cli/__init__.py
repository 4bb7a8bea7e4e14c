"""The command line: parse, call one function, print, exit code.

Each module with commands has a group of them: `look` has ls, show, diff and report, `trust` verify and audit,
`move` push, pull and export, `tidy` prune, `tour` demo, help and completion. `listing` is ls. `command` has
what they share, such as exit codes.
"""

__all__ = ["app"]
