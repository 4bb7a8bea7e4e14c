"""The processes of a training: its ranks, their joint saves, and the signals they are sent.

`ranks` is how several processes agree, through the store of torch.distributed. `crew` is what the rest of the
library uses: `alone` is the crew of one process, `joint` that of several, whose saves are in `joint_saves`.
"""

__all__ = ["alone", "crew", "joint", "ranks", "rendezvous", "signals", "stages", "write_shares"]
