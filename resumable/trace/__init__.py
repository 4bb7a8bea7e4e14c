"""A line for each boundary of a training, and where two trainings part."""

__all__ = ["digest", "trace_diff", "trace_file", "tracer"]
