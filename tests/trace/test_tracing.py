"""Traces of real trainings: they say what was trained, in one process or several, and change nothing."""

from __future__ import annotations

import errno
import os
import queue
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from forks import Forks
from grouped import grouped
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumable import Preempted, ResumableWarning, RunState, Trace, UsageError
from resumable.cli.app import main
from resumable.trace import digest, trace_file
from resumable.trace.trace_file import Record


class Noisy(Dataset[Any]):
    """Samples with an augmentation that draws from all of the process's generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + float(np.random.rand()) + torch.rand(3)
        return {"x": noise + index, "name": f"sample {index}"}


class Script:
    """A training script, started again: dropout, a shuffled loader, noise."""

    def __init__(self, run_dir: Path, workers: int = 0, **options: Any) -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers)
        self.state = RunState.load(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            **grouped(**{"trace_every": 3, "keep": None, **options}),
        )

    def step(self, batch: Any) -> None:
        loss = self.model(batch["x"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.state.note(loss=loss)

    def train(self, until: int = 99, saves: bool = True) -> None:
        """Train three epochs of four batches, or stop as if killed after so many steps."""
        for _ in self.state.epochs(3):
            for batch in self.state.batches():
                self.step(batch)
                if saves and self.state.step % 2 == 0:
                    self.state.save().wait()
                if self.state.step == until:
                    return
        self.state.close()

    def bits(self) -> bytes:
        """Return all that a trace might change."""
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        generators = repr(random.getstate()).encode() + np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
        return b"".join(tensor.numpy().tobytes() for tensor in tensors) + generators


@pytest.fixture
def straight(tmp_path: Path) -> list[Record]:
    """The trace of a training that was never stopped."""
    Script(tmp_path / "straight", trace=tmp_path / "straight.jsonl").train()
    return trace_file.read(tmp_path / "straight.jsonl")


def boundaries(records: list[Record]) -> list[Record]:
    return [record for record in records if record.why == "boundary"]


def test_there_is_a_line_for_each_boundary(straight: list[Record]) -> None:
    places = [(one.at.kind, one.at.epoch, one.at.batch, one.at.step) for one in boundaries(straight)]

    assert places[:6] == [
        *(("batch", 0, number, number) for number in range(1, 5)),
        ("epoch", 1, 0, 4),
        ("batch", 1, 1, 5),
    ]
    assert len(places) == 15
    assert [len(one.batches) for one in straight] == [0, *([1, 1, 1, 1, 0] * 3)]
    assert len({digest for one in straight for digest in one.batches}) == 12
    looks = [(one.at.kind, one.at.step) for one in straight if one.parts]
    assert looks == [
        *(("outside", 0), ("batch", 3), ("epoch", 4), ("batch", 6)),
        *(("epoch", 8), ("batch", 9), ("batch", 12), ("epoch", 12)),
    ]
    assert all(isinstance(one.noted["loss"], float) for one in straight if one.batches)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("stops", [(1, 6), (4, 5), (2, 11), (12,)])
def test_a_training_that_is_stopped_has_the_trace_of_one_that_is_not(
    stops: tuple[int, ...], workers: int, tmp_path: Path, straight: list[Record]
) -> None:
    trace = tmp_path / "a.jsonl"
    for until in (*stops, 99):
        script = Script(tmp_path / "run", trace=trace)
        script.train(until)
        script.state.close()

    found = trace_file.read(trace)
    assert not trace_file.first_difference(straight, found)
    assert not trace_file.first_difference(found, straight)
    # What was saved in the last body is trained, and nobody came to its boundary
    assert len(boundaries(found)) >= len(boundaries(straight)) - len(stops)


def test_what_came_after_an_older_checkpoint_is_dropped(tmp_path: Path, straight: list[Record]) -> None:
    Script(tmp_path / "run", trace=tmp_path / "a.jsonl").train()

    Script(tmp_path / "run", trace=tmp_path / "a.jsonl", resume=1).train(until=3)

    found = trace_file.read(tmp_path / "a.jsonl")
    assert not trace_file.first_difference(straight, found)
    assert found[-1].at.step == 2


def test_a_trace_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain = Script(tmp_path / "plain")
    plain.train()
    before = plain.bits()

    traced = Script(tmp_path / "traced", trace=tmp_path / "a.jsonl", trace_every=1)
    traced.train()

    assert traced.bits() == before


def test_a_batch_is_not_kept_alive(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    known = []

    for batch in script.state.batches():
        known.append(weakref.ref(batch["x"]))
        script.step(batch)
        assert [ref() is None for ref in known] == [*([True] * (len(known) - 1)), False]
        del batch
        assert known[-1]() is None


@pytest.mark.parametrize("name", ["a.jsonl", "deep/in/a.jsonl"])
def test_the_environment_overrides_the_argument(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMABLE_TRACE", str(tmp_path / name))
    Script(tmp_path / "run", trace=tmp_path / "b.jsonl").train(1)
    monkeypatch.setenv("RESUMABLE_TRACE", "")
    Script(tmp_path / "other", trace=tmp_path / "c.jsonl").train(1)

    assert [path.name for path in tmp_path.glob("**/*.jsonl")].count("history.jsonl") == 2
    assert (tmp_path / name).exists()
    assert not [*tmp_path.glob("[bc].jsonl")]


def test_a_trace_in_the_home_folder_is_written_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RESUMABLE_TRACE", raising=False)
    Script(tmp_path / "run", trace="~/a.jsonl").train(1)
    monkeypatch.setenv("RESUMABLE_TRACE", "~/b.jsonl")
    Script(tmp_path / "other").train(1)

    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"a.jsonl", "b.jsonl"}


def test_several_runs_of_one_process_have_a_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMABLE_TRACE", str(tmp_path / "a.jsonl"))
    for until in (2, 99):
        for fold in ("one", "two"):
            script = Script(tmp_path / fold)
            script.train(until)
            script.state.close()

    for name in ("a.jsonl", "a-2.jsonl"):
        assert len(boundaries(trace_file.read(tmp_path / name))) >= 14
    assert len([*tmp_path.glob("*.jsonl")]) == 2


def test_a_trace_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")

    with pytest.raises(UsageError, match=r"train\.py is a file with something else than a trace"):
        Script(tmp_path / "run", trace=tmp_path / "train.py")
    with pytest.raises(UsageError, match=r"Trace.every=-1 is not a count"):
        Script(tmp_path / "run", trace_every=-1)


def test_a_disk_that_is_full_ends_the_trace_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, write, left = Script(tmp_path / "run", trace=tmp_path / "a.jsonl"), os.write, [3]
    fds = os.listdir("/proc/self/fd")
    [fd] = [int(one) for one in fds if os.path.realpath(f"/proc/self/fd/{one}") == str(tmp_path / "a.jsonl")]

    def full(where: int, data: Any) -> int:
        # Once it was closed, the number is another file's
        if where != fd or left[0] < -1:
            return write(where, data)
        left[0] -= 1
        if left[0] >= 0:
            return write(where, data)
        if left[0] == -1:
            return write(where, bytes(data)[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.warns(ResumableWarning, match=r"a\.jsonl cannot be written any more: No space left") as told:
        script.train()

    assert len(told) == 1
    assert script.state.step == 12
    assert [one.at.step for one in trace_file.read(tmp_path / "a.jsonl")] == [0, 1, 2, 3]
    monkeypatch.undo()
    Script(tmp_path / "run", trace=tmp_path / "a.jsonl", resume=3).train()
    assert trace_file.read(tmp_path / "a.jsonl")[-1].at.step == 12


def test_a_training_that_goes_back_has_the_trace_of_what_it_has_kept(
    tmp_path: Path, straight: list[Record]
) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    script.train(until=7)
    script.state.restore(2)
    script.train()

    found = trace_file.read(tmp_path / "a.jsonl")
    assert [one.at.step for one in found if one.why == "restored"] == [4]
    assert not trace_file.first_difference(straight, found)
    assert [one.at for one in boundaries(found)][-9:] == [one.at for one in boundaries(straight)][-9:]


def test_batches_that_are_left_out_after_a_spike_are_in_no_record(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    losses = iter([0.1, 0.1, float("nan"), 0.1])
    for batch in script.state.batches():
        script.step(batch)
        if script.state.spiked(next(losses)):
            continue
        script.state.save().wait()

    found = trace_file.read(tmp_path / "a.jsonl")
    assert [(one.why, one.at.batch, len(one.batches)) for one in found] == [
        ("start", 0, 0),
        ("boundary", 1, 1),
        ("boundary", 2, 1),
        ("restored", 3, 0),
        ("boundary", 3, 0),
        ("boundary", 4, 1),
    ]


def test_the_batches_of_an_accumulation_window_are_gathered(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    for number, batch in enumerate(script.state.batches()):
        script.model(batch["x"]).sum().backward()
        if number % 2:
            script.optimizer.step()
    script.state.close()

    assert [len(one.batches) for one in boundaries(trace_file.read(tmp_path / "a.jsonl"))] == [2, 2]


def test_a_loop_over_steps_has_the_batches_that_it_notes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.manual_seed(0)
        model = nn.Linear(300, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        path = tmp_path / f"{name}.jsonl"
        with RunState.load(tmp_path / name, model=model, optimizer=optimizer, trace=path) as state:
            for _ in state.steps(4):
                x = torch.randn(100, 300)
                state.note(batch=x, tokens=[1, 2])
                # After it was noted it belongs to the script
                x.zero_()
                optimizer.step()
    a, b = (trace_file.read(tmp_path / f"{name}.jsonl") for name in "ab")

    assert not trace_file.first_difference(a, b)
    assert [(one.at.kind, one.why) for one in a] == [
        ("outside", "start"),
        *[("step", "boundary")] * 4,
        ("outside", "closed"),
    ]
    assert len({one.noted["batch"] for one in boundaries(a)}) == 4
    assert str(a[1].noted["batch"]).startswith("#")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.tensor(0.1), float(np.float32(0.1))),
        (torch.tensor([[7]]), 7),
        (torch.tensor(0.5, requires_grad=True) * 2, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([3]), 3),
        (True, True),
        (None, None),
        ("a text", "a text"),
        (-0.0, -0.0),
        (10**400, 10**400),
    ],
)
def test_a_number_is_noted_as_it_is(value: Any, told: Any, tmp_path: Path) -> None:
    with RunState.load(tmp_path / "run", trace=tmp_path / "a.jsonl") as state:
        for _ in state.steps(1):
            state.note(value=value)

    [record] = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert repr(record.noted) == repr({"value": told})


def test_what_cannot_be_distinguished_is_warned_of_once(tmp_path: Path) -> None:
    class Odd:
        """One that breaks when it is looked into."""

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("odd")

    state = RunState.load(tmp_path / "run", trace=tmp_path / "a.jsonl")
    with pytest.warns(ResumableWarning, match=r"cannot tell the batches \(.*Odd\) apart: Runtime") as told:
        assert len([*state.batches(lambda: iter([Odd(), Odd(), Odd()]))]) == 3
    state.close()

    assert len(told) == 1
    assert len(boundaries(trace_file.read(tmp_path / "a.jsonl"))) == 3


class Endless(IterableDataset[Any]):
    """Samples without a number."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(4.0))


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """Load in another thread, two ahead."""
    waiting: queue.Queue[Any] = queue.Queue(2)

    def work() -> None:
        for batch in batches:
            waiting.put([batch])
        waiting.put(None)

    threading.Thread(target=work, daemon=True).start()
    while found := waiting.get():
        yield found[0]


@pytest.mark.parametrize("how", ["plain", "through", "device", "iterable", "dataset", "function"])
def test_however_the_batches_come_their_digests_are_the_same(how: str, tmp_path: Path) -> None:
    data = [torch.full((2,), float(number)) for number in range(4)]
    loader: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    options: dict[str, Any] = {"through": {"through": ahead}, "device": {"device": "cpu"}}.get(how, {})
    with RunState.load(tmp_path / "run", loader=loader, trace=tmp_path / "a.jsonl") as state:
        looped = {"iterable": data, "function": lambda: iter(data)}.get(how)
        for _ in state.epochs(2):
            assert len([*state.batches(looped, **options)]) == 4

    found = trace_file.read(tmp_path / "a.jsonl")
    assert [len(one.batches) for one in boundaries(found)] == [1, 1, 1, 1, 0] * 2
    assert [one.batches for one in found[1:5]] == [[digest.of(batch)] for batch in data]
    assert [one.batches for one in found[6:10]] == [[digest.of(batch)] for batch in data]


def test_a_training_that_only_saves_has_a_boundary_at_each_save(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = RunState.load(tmp_path / "run", model=model, optimizer=optimizer, trace=tmp_path / "a.jsonl")
    for _ in range(3):
        optimizer.step()
        state.note(loss=0.5)
        state.save()
    state.close()

    found = trace_file.read(tmp_path / "a.jsonl")
    assert [(one.why, one.at.kind, one.at.step) for one in found] == [
        ("start", "outside", 0),
        *(("boundary", "outside", step) for step in (1, 2, 3)),
        ("closed", "outside", 3),
    ]


def test_steps_are_counted_and_not_batches_where_a_batch_has_several(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl", trace_every=5)
    for batch in script.state.batches():
        for _ in range(3):
            script.step(batch)
    script.state.close()

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert [(one.at.step, bool(one.parts)) for one in found] == [
        (3, False),
        (6, True),
        (9, False),
        (12, True),
    ]


def test_where_no_optimizer_counts_steps_batches_are_counted(tmp_path: Path) -> None:
    with RunState.load(tmp_path / "run", loader=[0] * 7, trace=Trace(tmp_path / "a.jsonl", every=3)) as state:
        for _ in state.epochs(2):
            assert len([*state.batches()]) == 7

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert [(one.at.kind, one.at.batch) for one in found if one.parts] == [
        *(("batch", 3), ("batch", 6), ("epoch", 0)),
        *(("batch", 3), ("batch", 6), ("epoch", 0)),
    ]


def test_a_body_of_steps_without_an_optimizer_is_not_looked_at_every_time(tmp_path: Path) -> None:
    with RunState.load(tmp_path / "run", trace=Trace(tmp_path / "a.jsonl", every=4)) as state:
        assert len([*state.steps(9)]) == 9

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert [one.at.step for one in found if one.parts] == [4, 8]


def test_epochs_without_batches_have_their_boundaries_and_short_ones_are_not_all_looked_at(
    tmp_path: Path,
) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RunState.load(
        tmp_path / "run", model=model, optimizer=optimizer, trace=Trace(tmp_path / "a.jsonl", every=20)
    ) as state:
        for _ in state.epochs(4):
            optimizer.step()
            state.note(loss=1)

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert [(*one.at, bool(one.parts)) for one in found] == [
        ("epoch", epoch, 0, epoch, epoch != 3) for epoch in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("stops", [(), (7,), (3, 9), (4, 8)])
def test_the_looks_at_epochs_ends_are_at_the_same_ones_after_a_resume(
    stops: tuple[int, ...], tmp_path: Path
) -> None:
    for until in (*stops, 99):
        script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl", trace_every=40)
        script.train(until)
        script.state.close()

    looks = [one.at.step for one in boundaries(trace_file.read(tmp_path / "a.jsonl")) if one.parts]
    assert looks == [4, 8, 12]


def test_what_a_save_is_given_is_in_the_trace(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    for epoch in script.state.epochs(2):
        for batch in script.state.batches():
            script.step(batch)
        script.state.save(accuracy=torch.tensor(0.5 + epoch), bad=float("nan"))
        script.state.save()
    script.state.close()

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    noted = [one.noted for one in found if one.at.kind == "epoch"]
    assert noted == [{"accuracy": 0.5, "bad": "nan"}, {"accuracy": 1.5, "bad": "nan"}]
    assert not any("accuracy" in one.noted for one in found if one.at.kind == "batch")


def steps(folder: Path, name: str, lr: float = 0.1, **options: Any) -> list[Record]:
    """Make five steps without a batch or a note; return the trace."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = folder / f"{name}.jsonl"
    with RunState.load(
        folder / name, model=model, optimizer=optimizer, **grouped(trace=path, **options)
    ) as state:
        for step in state.steps(5):
            optimizer.param_groups[0]["lr"] = lr if step == 3 else 0.1
            optimizer.zero_grad()
            model(torch.ones(2)).backward()
            optimizer.step()
        state.note(accuracy=1)
        torch.rand(9 if lr == 0.1 else 7)
    return trace_file.read(path)


def test_at_the_end_the_parts_are_looked_at_once_more_so_that_one_other_step_shows(tmp_path: Path) -> None:
    a, b = steps(tmp_path, "a"), steps(tmp_path, "b", lr=0.2)

    assert [(one.at.kind, one.at.step, one.why) for one in a if one.parts] == [
        ("outside", 0, "start"),
        ("outside", 5, "closed"),
    ]
    assert a[-1].noted == {"accuracy": 1}
    # Not the generators: what was drawn after the last step has trained nothing
    assert [one.part for one in trace_file.first_difference(a, b)] == ["model"]


@pytest.mark.parametrize(("every", "count"), [(0, 0), (1, 5), (2, 2), (5, 1), (100, 0)])
def test_the_look_at_the_end_can_be_compared_whatever_trace_every_was(
    every: int, count: int, tmp_path: Path
) -> None:
    found = steps(tmp_path, "a", trace_every=every)

    assert len([one for one in boundaries(found) if one.parts]) == count
    assert [bool(one.parts) for one in found if one.why == "closed"] == [every > 0]


def test_a_training_that_is_complete_is_not_looked_at_again(tmp_path: Path) -> None:
    for _ in range(2):
        Script(tmp_path / "run", trace=tmp_path / "a.jsonl").train()

    found = trace_file.read(tmp_path / "a.jsonl")
    assert [one.why for one in found if one.why != "boundary"] == ["start", "resumed"]


def leave_by_an_error(script: Script) -> None:
    with script.state as state:
        for batch in state.batches():
            script.step(batch)
            raise KeyError("stop")


def leave_by_a_signal(script: Script) -> None:
    with script.state as state:
        for batch in state.batches():
            script.step(batch)
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("leave", [leave_by_an_error, leave_by_a_signal])
@pytest.mark.parametrize("on_preempt", ["exit", "raise"])
def test_one_that_is_not_at_its_end_is_not_held_up_by_a_look(
    leave: Any, on_preempt: str, tmp_path: Path
) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl", on_preempt=on_preempt)

    with pytest.raises((KeyError, SystemExit, Preempted)):
        leave(script)

    assert "closed" not in {one.why for one in trace_file.read(tmp_path / "a.jsonl")}


def test_a_part_that_cannot_be_stored_leaves_the_digests_of_the_batches(tmp_path: Path) -> None:
    options = grouped(trace=tmp_path / "a.jsonl", every=None)
    with pytest.warns(ResumableWarning, match="cannot tell the parts apart: CannotStore: extra.odd.made is"):
        state = RunState.load(tmp_path / "run", extra={"odd": {"made": lambda: 0}}, loader=[1, 2], **options)
    assert len([*state.batches()]) == 2
    state.close()

    assert [len(one.batches) for one in trace_file.read(tmp_path / "a.jsonl")] == [0, 1, 1]


def test_a_run_is_let_go_of_even_if_a_warning_of_its_last_look_is_an_error(tmp_path: Path) -> None:
    extra: dict[str, Any] = {"odd": {"made": 1}}
    options: dict[str, Any] = {"extra": extra, "trace": tmp_path / "a.jsonl"}
    # Here warnings are errors
    with RunState.load(tmp_path / "run", **grouped(**options)) as state:
        for _ in state.steps(2):
            state.save().wait()
        extra["odd"]["made"] = print
    extra["odd"]["made"] = 1

    with RunState.load(tmp_path / "run", **grouped(**options)) as state:
        assert state.step == 2


def test_what_a_forked_child_does_is_not_in_the_trace(tmp_path: Path) -> None:
    script = Script(tmp_path / "run", trace=tmp_path / "a.jsonl")
    script.train(until=2)
    before = (tmp_path / "a.jsonl").read_bytes()

    if (child := os.fork()) == 0:
        script.state._session.trace = None
        os._exit(0)
    os.waitpid(child, 0)

    assert (tmp_path / "a.jsonl").read_bytes() == before


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_tracing import Script
from pathlib import Path

script = Script(Path("run"), trace="a.jsonl")
until = int(sys.argv[1])
for epoch in script.state.epochs(3):
    for batch in script.state.batches():
        script.step(batch)
        script.state.save().wait()
        if script.state.step == until:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.heavy
def test_a_training_that_is_killed_twice_has_the_trace_of_one_that_is_not(
    tmp_path: Path, straight: list[Record], forks: Forks
) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent))
    for until in (6, 9, 99):
        # Killed while it wrote a line
        with open(tmp_path / "a.jsonl", "ab") as file:
            file.write(b'{"at":{"ki' if until != 6 else b"")
        life = forks.run(["-c", code, until], tmp_path, environment={"PYTHONPATH": os.pathsep.join(sys.path)})
        assert life.code == (0 if until == 99 else -signal.SIGKILL), life.err

    found = trace_file.read(tmp_path / "a.jsonl")
    assert not trace_file.first_difference(straight, found)
    # Without what was saved in the body in which it was killed: nobody came to that boundary
    missing = {one.at for one in boundaries(straight)} - {one.at for one in boundaries(found)}
    assert {at.step for at in missing} == {6, 9}
    assert {one.why for one in found} == {"start", "resumed", "boundary"}


def _of_a_rank(rank: int, folder: str, seed: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(seed + rank)
    with RunState.load(
        f"{folder}/run-{seed}", model=ddp, optimizer=optimizer, trace=Trace(f"{folder}/{seed}.jsonl", every=2)
    ) as state:
        for step in state.steps(4):
            # Rank 1 gets other data from the third step on
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step + (step > 1) * seed * rank))
            ddp(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.note(batch=x)


@pytest.mark.heavy
def test_each_rank_has_a_file_and_the_one_that_parts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        ended = gloo.run(2, _of_a_rank, str(tmp_path), seed, folder=tmp_path / "meeting")
        assert [one.error for one in ended] == [None, None]

    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        *("0-rank00001.jsonl", "0.jsonl", "1-rank00001.jsonl", "1.jsonl")
    ]
    assert main(["diff", "--trace", str(tmp_path / "0.jsonl"), str(tmp_path / "1.jsonl")]) == 1
    assert "part at step 3 on rank 1: batch differs" in capsys.readouterr().out
    # Every rank looks at what it has, not at what it saves
    by_rank = [trace_file.read(tmp_path / name) for name in ("0.jsonl", "0-rank00001.jsonl")]
    assert by_rank[0][2].parts["model"] == by_rank[1][2].parts["model"]


@pytest.mark.cuda
def test_what_is_on_a_gpu_is_in_the_line_of_its_own_boundary(tmp_path: Path) -> None:
    data = [torch.full((300, 300), float(number), device="cuda") for number in range(20)]
    model = nn.Linear(300, 1, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RunState.load(
        tmp_path / "run", model=model, optimizer=optimizer, trace=Trace(tmp_path / "a.jsonl", every=3)
    ) as state:
        for batch in state.batches(data):
            loss = batch.mean()
            state.note(loss=loss)
            loss.zero_()
            optimizer.step()

    found = boundaries(trace_file.read(tmp_path / "a.jsonl"))
    assert [one.noted["loss"] for one in found] == [float(number) for number in range(20)]
    assert [one.batches for one in found] == [[digest.of(batch.cpu(), digest.MOST)] for batch in data]


@pytest.mark.parametrize(
    ("name", "draw"),
    [("python", random.random), ("numpy", np.random.rand), ("torch", lambda: torch.rand(1))],
)
def test_one_number_that_is_drawn_shows_in_the_next_look(name: str, draw: Any, tmp_path: Path) -> None:
    for path in ("a", "b"):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        with RunState.load(tmp_path / path, trace=Trace(tmp_path / f"{path}.jsonl", every=1)) as state:
            for _ in state.steps(1):
                for _ in range(9 + (path == "b")):
                    draw()
    [a], [b] = (boundaries(trace_file.read(tmp_path / f"{path}.jsonl")) for path in "ab")

    assert [(one.part, one.name) for one in trace_file.differences(a, b)] == [("random", name)]


def test_a_relative_trace_stays_where_it_was_when_the_script_changes_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunState.load("run", trace="trace.jsonl") as state:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for _ in state.steps(2):
            state.note(loss=1.0)

    assert [at.why for at in trace_file.read(tmp_path / "trace.jsonl")][:1] == ["start"]
    assert [*(tmp_path / "elsewhere").iterdir()] == []
