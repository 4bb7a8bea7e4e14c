"""The processes of a training: its ranks, their joint saves, and the signals they are sent."""

__all__ = ["alone", "crew", "joint", "ranks", "rendezvous", "signals", "write_shares"]
