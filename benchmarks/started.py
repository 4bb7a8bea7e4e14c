"""The start of a process, seen from within: imports nothing that the library would import, too."""

import sys
import time

_seconds = time.perf_counter


def main() -> None:
    """Import, load a run, load the same by torch; print the seconds of each as JSON."""
    kind, run, file = sys.argv[1:]
    figures = _imported_alone() if kind == "alone" else _loaded(run, file)
    import json

    print(json.dumps(figures))


def _imported_alone() -> dict[str, float]:
    start = _seconds()
    import resumable  # noqa: F401

    return {"import_alone": _seconds() - start}


def _loaded(run: str, file: str) -> dict[str, float]:
    start = _seconds()
    import torch

    torched = _seconds()
    from resumable import RunState

    imported = _seconds()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    begun = _seconds()
    state = RunState.load(run, model=model, optimizer=optimizer)
    loaded = _seconds()
    state.close()
    again = _seconds()
    stored = torch.load(file, weights_only=True)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    return {
        "torch": torched - start,
        "import": imported - torched,
        "load": loaded - begun,
        "torch_load": _seconds() - again,
    }
