"""The processes of a training: its ranks, their joint saves, and the signals they are sent."""

__all__ = ["meeting_point", "ranks", "roles", "signals", "write_shares"]
