"""What the source of the user's script says of a variable."""

__all__ = ["meters", "uses"]
