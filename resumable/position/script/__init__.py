"""Looks at the script's code and variables, and warns of what a resume would do differently."""

__all__ = [
    "bytecode",
    "called",
    "carried",
    "first_lines",
    "habits",
    "kept_attributes",
    "loop_variables",
    "loops",
    "running_sums",
    "script_frames",
    "unsaved_weights",
]
