"""Makes a training repeatable: seeds, and the flags of torch."""

from __future__ import annotations

import os
import weakref

import torch

from .errors import UsageError, warn
from .files.strict_json import Json
from .loaders.generators import rng
from .processes import ranks
from .run import environment

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_SEEDS = 2**32
# torchrun, srun and mpirun say which process this is before it has joined the others.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")

_resumed: weakref.WeakKeyDictionary[object, str] = weakref.WeakKeyDictionary()


def seed_everything(seed: int, deterministic: bool = False, *, per_rank: bool = False) -> int:
    """Seed the global generators of Python, NumPy and torch, on all devices; return the seed they got.

    Call it first, before models, splits and `RunState.load`. Workers that load are seeded by torch, from its
    generator.

    Args:
        seed: An int from 0 to 2**32 - 1.
        deterministic: Have torch do what repeats itself, and raise where it cannot; False leaves its flags as
            they are.
        per_rank: Give each process its own numbers. By default all get the same, since what they make
            (weights, splits) has to agree: use True once that is made.

    >>> seed_everything(7)
    7
    >>> first = torch.rand(2)
    >>> seed_everything(7), torch.equal(torch.rand(2), first)
    (7, True)
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS:
        raise UsageError(
            f"seed={seed!r} is not an int from 0 to {_SEEDS - 1}.",
            fix="give one that is; NumPy takes no larger one.",
        )
    for run in _resumed.values():
        warn(
            f"seed_everything({seed}) comes after {run} was resumed: the random numbers start again, up to "
            "the next loop of RunState. Call it before RunState.load. [R08]"
        )
    if deterministic:
        make_deterministic()
    number = rng.seed_of(f"{seed}/{_rank()}") % _SEEDS if per_rank else seed
    rng.seed_all(number)
    return number


def make_deterministic() -> None:
    """Have torch do what repeats itself, and raise where it cannot."""
    if _CUBLAS not in os.environ:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            warn(
                f"CUDA was in use before {_CUBLAS} was set. If a product of matrices was already done, "
                "torch up to about 2.9 raises at the next one, and later versions do it with what cuBLAS "
                "has begun with. Fix: call seed_everything before anything is on a GPU, or set "
                f"{_CUBLAS}=:4096:8 in the environment."
            )
        os.environ[_CUBLAS] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def settings() -> dict[str, Json]:
    """Return what decides whether a training repeats itself, as it stands now; no device is asked.

    >>> settings()["deterministic"]
    False
    """
    return {
        **environment.flags(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "interop_threads": torch.get_num_interop_threads(),
        _CUBLAS: os.environ.get(_CUBLAS),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
    }


def hold(owner: object, run: str) -> None:
    """Note that the generators of this process are where a run that was resumed has put them."""
    _resumed[owner] = run


def let_go(owner: object) -> None:
    """Note that the training continues, and may use its generators freely."""
    _resumed.pop(owner, None)


def _rank() -> int:
    rank, size = ranks.of_this_training()
    told = [os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()]
    return rank if size > 1 or not told else int(told[0])
