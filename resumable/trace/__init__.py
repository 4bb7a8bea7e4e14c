"""Traces: a line for each boundary of a training, and the diff of two of them."""

__all__ = ["digest", "trace_diff", "trace_file", "tracer"]
