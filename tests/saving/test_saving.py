"""Promise 6, through `RunState`: a file holds what there was at `save()`, whatever is written after it."""

from __future__ import annotations

import copy
import functools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import ResumableWarning, RunState, SaveFailed
from resumable.files import codec, tensor_file
from resumable.parts.collect import collect
from resumable.saving import host_memory, image_file, saver, snapshot
from resumable.saving.image import Image

Files = dict[str, dict[str, Tensor]]


class Model(nn.Module):
    """Every kind of tensor that a model may have."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        width = dice.choice([3, 8, 40])
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        if dice.random() < 0.5:
            self.tied[1].weight = self.tied[0].weight
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.halves = nn.Parameter(torch.randn(width, 5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.ParameterList([nn.Parameter(torch.randn(30, 4)), nn.Parameter(torch.randn(3))])
        self.frozen.requires_grad_(dice.random() < 0.3)
        self.register_buffer("mask", torch.rand(41) < 0.5)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("nothing", torch.zeros(0, 4))
        self.register_buffer("table", torch.randn(20, 20).t())


class Subclass(torch.optim.SGD):
    """A user's own optimizer, which writes in its step alone."""


class Own(torch.optim.SGD):
    """A user's own optimizer, which can write at other times too."""

    def decay(self) -> None:
        """Stand for a method that torch's optimizers do not have."""


class Averaging(torch.optim.Optimizer):
    """One that has two sets of values, as schedule-free ones do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self._trained():
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            parameter.data.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            average.lerp_(parameter.data, 0.5)

    def eval(self) -> None:
        for parameter in self._trained():
            if "average" in self.state[parameter]:
                kept = parameter.data.clone()
                parameter.data.copy_(self.state[parameter]["average"])
                self.state[parameter]["average"].copy_(kept)

    def _trained(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from (parameter for parameter in group["params"] if parameter.grad is not None)


def unhooked(parameters: Any) -> torch.optim.Optimizer:
    """Return one whose step somebody has copied, without what is hooked to it."""
    optimizer = torch.optim.AdamW(parameters)
    optimizer.step = functools.partial(type(optimizer).step.__wrapped__, optimizer)  # type: ignore
    return optimizer


OPTIMIZERS: list[Callable[[Any], Any]] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    lambda p: torch.optim.Adam(p, foreach=True),
    lambda p: torch.optim.Adam(p, fused=True),
    lambda p: torch.optim.AdamW(p, amsgrad=True, capturable=False),
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    torch.optim.Rprop,
    torch.optim.ASGD,
    torch.optim.Adafactor,
    lambda p: Subclass(p, momentum=0.9),
]
NOT_TRUSTED: list[Callable[[Any], Any]] = [Own, Averaging, unhooked]


class Schedule:
    """A random training, and the random order in which it is saved and written to."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.model = Model(self.dice)
        self.optimizers = dict(self._optimizers())
        self.extra: dict[str, Any] = {}
        if self.dice.random() < 0.5:
            self.extra["ema"] = copy.deepcopy(self.model)
        if self.dice.random() < 0.5:
            self.extra["queue"] = {"keys": torch.randn(70), "at": torch.tensor(2), "rows": [torch.ones(3, 3)]}
        if self.dice.random() < 0.5:
            self.extra["generator"] = torch.Generator().manual_seed(seed)
            self.extra["numpy"] = np.random.default_rng(seed)
        self.has_stepped = False

    def _optimizers(self) -> Iterator[tuple[str, Any]]:
        parameters = [*self.model.parameters()]
        kind = self.dice.choice(["one", "one", "one", "two", "not trusted", "both", "lbfgs"])
        if kind == "lbfgs":
            # What it cannot do
            plain = [p for p in parameters if p.dtype == torch.float32 and p.is_contiguous()]
            yield "first", torch.optim.LBFGS(plain)
        elif kind == "not trusted":
            yield "first", self.dice.choice(NOT_TRUSTED)(parameters)
        elif kind == "one":
            yield "first", self.dice.choice(OPTIMIZERS)(parameters)
        else:
            # The parameters in the middle are both's
            half, others = len(parameters) // 2, NOT_TRUSTED if kind == "both" else OPTIMIZERS
            yield "first", self.dice.choice(OPTIMIZERS)(parameters[:half])
            yield "second", self.dice.choice(others)(parameters[half - self.dice.choice([0, 2]) :])

    def guarded(self) -> set[int]:
        """Return the places of what only steps change that tell of themselves."""
        of = {True: set[int](), False: set[int]()}
        for optimizer in self.optimizers.values():
            is_trusted = type(optimizer) not in (Own, Averaging) and "step" not in vars(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = [v for values in optimizer.state.values() for v in values.values()]
            places = {t.data_ptr() for t in parameters + state if isinstance(t, Tensor)}
            of[self.has_stepped and is_trusted] |= places
        return of[True] - of[False]

    def state(self, run_dir: Path, **how: Any) -> RunState:
        return RunState.load(
            run_dir, model=self.model, optimizer=self.optimizers, extra=self.extra, keep=None, **how
        )

    def step(self) -> None:
        self.has_stepped = True
        self.model.norm(torch.randn(4, self.model.norm.num_features))
        self.model.seen += 1
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            needs_closure = isinstance(optimizer, torch.optim.LBFGS)
            optimizer.step((lambda: torch.rand(())) if needs_closure else None)

    def picture(self, state: RunState) -> Files:
        """Return copies of all that there is now, by file."""
        trees = collect(state._training.parts)[0]
        return {
            path: {name: t.detach().clone().contiguous() for name, t in group.tensors.items()}
            for path, group in codec.to_groups(trees).items()
        }

    def live(self, state: RunState) -> list[Tensor]:
        return [
            t
            for group in codec.to_groups(collect(state._training.parts)[0]).values()
            for t in group.tensors.values()
        ]

    @torch.no_grad()
    def write_at_once(self, state: RunState) -> None:
        """Write in any way to all that is not guarded."""
        guarded = self.guarded()
        free = [t for t in self.live(state) if t.data_ptr() not in guarded or not t.is_contiguous()]
        for tensor in self.dice.sample(free, len(free)):
            self._write(tensor)
        for parameter in self.model.parameters():
            if self.dice.random() < 0.3:
                # That of a guarded one too: it is not in the place that is copied
                parameter.data = parameter.data.clone().mul_(-1)
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, Averaging):
                optimizer.eval()
            if "step" in vars(optimizer):
                optimizer.step()
        for part in self.extra.values():
            if isinstance(part, dict):
                part["keys"] = part["keys"] + 1
            elif isinstance(part, torch.Generator):
                torch.rand(3, generator=part)

    @torch.no_grad()
    def write_everything(self, state: RunState) -> None:
        """Write to everything, once a step has told that all is copied."""
        for tensor in self.live(state):
            self._write(tensor)

    def _write(self, tensor: Tensor) -> None:
        # An optimizer counts its steps in a tensor, and divides by what it counts
        way = in_place if tensor.numel() == 1 else self.dice.choice(WAYS)
        way(tensor)


def in_place(tensor: Tensor) -> None:
    tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)


def through_data(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.data == 0)


def through_numpy(tensor: Tensor) -> None:
    if tensor.dtype == torch.bfloat16:
        return through_data(tensor)
    array = tensor.detach().numpy()
    array[...] = 1 - array if array.dtype != bool else ~array
    return None


def through_the_storage(tensor: Tensor) -> None:
    tensor.detach().as_strided([tensor.numel()], [1]).copy_(torch.arange(tensor.numel()) % 2)


def by_setting(tensor: Tensor) -> None:
    in_place(tensor)
    tensor.set_(tensor.clone())  # type: ignore[call-overload]


WAYS = [in_place, through_data, through_numpy, through_the_storage, by_setting]


@pytest.fixture
def _behind_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is copied behind the fence, however small, is copied late."""
    _put_behind_the_fence(monkeypatch)


def _put_behind_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Image.__init__.__defaults__
    assert defaults
    monkeypatch.setattr(Image.__init__, "__defaults__", (*defaults[:-1], 0))
    monkeypatch.setattr(image_file, "_SMALL", 0)
    monkeypatch.setattr(snapshot, "_AT_A_TIME", 1)
    monkeypatch.setattr(snapshot, "_copy", _late)


_real_copy = snapshot._copy
_late_copies: list[int] = []


def _late(copies: Any) -> None:
    if threading.current_thread().name == "resumable-image":
        _late_copies.append(len(copies))
        # Now and then, so that a schedule meets the image at its beginning, its middle or its end
        time.sleep(0.004 if len(_late_copies) % 7 == 0 else 0)
    _real_copy(copies)


def assert_holds(path: Path, expected: Files) -> None:
    found = {str(file.relative_to(path)): file for file in path.rglob("*.safetensors")}
    assert found.keys() == expected.keys()
    for name, file in found.items():
        read = safetensors.torch.load_file(file)
        assert read.keys() == expected[name].keys()
        wrong = [key for key, tensor in read.items() if not tensor_file.is_equal(tensor, expected[name][key])]
        assert not wrong, f"{name}: {wrong}"


def run_schedule(seed: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(seed)
    dice = schedule.dice

    monkeypatch.setattr(image_file, "_SMALL", dice.choice([0, 0, 200, 64 << 10]))
    monkeypatch.setattr(snapshot, "_AT_A_TIME", dice.choice([1, 1, 4096, 32 << 20]))
    expected: list[tuple[Any, Files]] = []
    with schedule.state(run_dir, resume="never") as state:
        for _ in range(dice.choice([2, 3])):
            for _ in range(dice.choice([0, 1, 1, 2])):
                schedule.step()
            before = schedule.picture(state)
            expected.append((state.save(), before))
            if dice.random() < 0.8:
                schedule.write_at_once(state)
            has_guarded, schedule.has_stepped = schedule.has_stepped, False
            if has_guarded or dice.random() < 0.5:
                schedule.step()
                schedule.write_everything(state)
            if dice.random() < 0.5:
                state.wait()
    for handle, before in expected:
        assert_holds(handle.path, before)
    for handle, before in expected:
        resumed = Schedule(seed)
        with resumed.state(run_dir, resume=handle.number) as state:
            # What was drawn before the first step the script draws again; here the generators come back too
            state.restore(handle.number)
            again = resumed.picture(state)
        for path in before:
            # Of a parameter that two optimizers train, only a step of this process tells who has used it
            extra = [n for n in again[path].keys() - before[path].keys() if ".gradients." not in n]
            assert (before[path].keys() - again[path].keys(), extra) == (set(), [])
            assert all(tensor_file.is_equal(before[path][n], again[path][n]) for n in before[path]), path


@pytest.mark.quick(7)
@pytest.mark.filterwarnings("ignore:this loop draws")
@pytest.mark.usefixtures("_behind_the_fence")
@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(n, marks=pytest.mark.heavy) for n in range(40, 200))]
)
def test_no_file_has_what_is_written_after_save(
    seed: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_schedule(seed, run_dir, monkeypatch)


STEPS, LENGTH = 12, 22


class Training:
    """A training whose every bit depends on the ones before it."""

    def __init__(self, seed: int, make: Callable[[Any], Any]) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.4), nn.Linear(40, 3)
        )
        self.model[0].bias.requires_grad_(False)
        self.optimizer = make(self.model.parameters())
        data = TensorDataset(torch.arange(6.0 * LENGTH).reshape(LENGTH, 6).sin(), torch.arange(LENGTH) % 3)
        self.loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=0)
        self.losses: list[float] = []

    def train(self, images: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def bits(self) -> list[bytes]:
        moments = [v for state in self.optimizer.state.values() for v in state.values()]
        tensors = [*self.model.state_dict().values(), *moments, torch.get_rng_state()]
        return [bytes(tensor_file.as_bytes(tensor)) for tensor in tensors]


def plain_bits(make: Callable[[Any], Any], epochs: int) -> tuple[list[bytes], list[float]]:
    training = Training(0, make)
    for _ in range(epochs):
        for batch in training.loader:
            training.train(*batch)
    return training.bits(), training.losses


def saved_bits(
    run_dir: Path, make: Callable[[Any], Any], epochs: int, stops: list[int]
) -> tuple[list[bytes], list[float]]:
    losses: list[float] = []
    for leg, stop in enumerate([*stops, 10**6]):
        training = Training(leg, make)
        with RunState.load(
            run_dir, model=training.model, optimizer=training.optimizer, loader=training.loader
        ) as state:
            for _ in state.epochs(epochs):
                for batch in state.batches():
                    training.train(*batch)
                    state.save()
                    if state.step == stop:
                        break
                else:
                    continue
                break
        losses += training.losses
    return training.bits(), losses


@pytest.mark.quick(3)
@pytest.mark.proves("transparent")
@pytest.mark.parametrize("is_fenced", [True, False])
@pytest.mark.parametrize("stops", [[], [3, 8]], ids=["never stopped", "resumed twice"])
@pytest.mark.parametrize("number", [0, 3], ids=["sgd", "fused adam"])
def test_a_training_that_saves_every_step_is_the_plain_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, is_fenced: bool, stops: list[int], number: int
) -> None:
    make = OPTIMIZERS[number]
    plain = plain_bits(make, epochs=2)
    _late_copies.clear()
    if is_fenced:
        _put_behind_the_fence(monkeypatch)

    assert saved_bits(run_dir, make, 2, stops) == plain
    assert (len(_late_copies) > STEPS) is is_fenced


class Small:
    """A model that is copied behind the fence, and its run."""

    def __init__(self, run_dir: Path, size: int = 1 << 18) -> None:
        self.model = nn.Linear(size, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.state = RunState.load(run_dir, model=self.model, optimizer=self.optimizer, keep=None)

    def step(self) -> None:
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()

    def assert_holds(self, path: Path, weight: Tensor) -> None:
        read = safetensors.torch.load_file(path / "model.safetensors")["weight"]
        assert torch.equal(read, weight)


class Held:
    """Keeps what copies behind the fence from continuing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.has_begun = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        monkeypatch.setattr(snapshot, "_copy", self._copy)

    def _copy(self, copies: Any) -> None:
        if threading.current_thread().name == "resumable-image":
            self.has_begun.set()
            assert self.may_go_on.wait(20)
            if self.error:
                raise self.error
        _real_copy(copies)


@pytest.fixture
def held(_behind_the_fence: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.may_go_on.set()


def test_what_a_forward_writes_to_is_not_guarded(run_dir: Path, held: Held) -> None:
    model = nn.Embedding(3000, 8, max_norm=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        for _ in range(3):
            model.weight.grad = torch.randn(3000, 8) * 9
            optimizer.step()
            before = model.weight.detach().clone()
            held.may_go_on.clear()
            saved = state.save()
            model(torch.arange(3000))
            held.may_go_on.set()
            saved.wait()
            assert not torch.equal(model.weight, before)
            read = safetensors.torch.load_file(saved.path / "model.safetensors")["weight"]
            assert torch.equal(read, before)


def test_a_write_around_the_fence_is_reported_by_the_next_save(run_dir: Path, held: Held) -> None:
    small = Small(run_dir)
    small.step()
    small.state.save()
    small.model.weight.data.fill_(7)
    held.may_go_on.set()

    with pytest.warns(
        ResumableWarning, match=r"(?s)weight was written to after save\(\), but not by a .*R19"
    ):
        small.state.save().wait()

    for number in range(2):
        small.step()
        before = small.model.weight.detach().clone()
        saved = small.state.save()
        held.may_go_on.clear()
        small.model.weight.data.fill_(number)
        saved.wait()
        small.assert_holds(saved.path, before)
    small.state.close()
    assert [*small.state.run.numbers()] == [2, 3, 4]


def test_a_write_around_the_fence_is_reported_by_handle_and_close(run_dir: Path, held: Held) -> None:
    for told in (lambda small, saved: saved.wait(), lambda small, saved: small.state.close()):
        small = Small(run_dir)
        small.step()
        saved = small.state.save()
        small.model.weight.data.fill_(7)
        held.may_go_on.set()
        with pytest.raises(SaveFailed, match="that checkpoint is not made"):
            told(small, saved)
        small.state.close()
        held.may_go_on.clear()


@pytest.mark.proves("quiet")
def test_the_end_of_a_body_does_not_wait_for_the_image(run_dir: Path, held: Held) -> None:
    small = Small(run_dir)
    for number in small.state.steps(3):
        held.may_go_on.set()
        small.step()
        small.state.wait()
        held.may_go_on.clear()
        held.has_begun.clear()
        small.state.save()
        assert held.has_begun.wait(20)
        if number == 2:
            held.may_go_on.set()
    small.state.close()


def test_an_error_of_the_copy_is_reported_once_and_the_training_continues(run_dir: Path, held: Held) -> None:
    small = Small(run_dir)
    small.step()
    held.error = RuntimeError("lost")
    held.may_go_on.set()
    saved = small.state.save()
    small.step()
    with pytest.raises(SaveFailed, match=r"could not be copied to host memory: RuntimeError.*lost") as told:
        saved.wait()
    assert told.value.__cause__ is held.error

    held.error = None
    before = small.model.weight.detach().clone()
    saved = small.state.save()
    small.step()
    small.state.close()
    small.assert_holds(saved.path, before)
    assert [*small.state.run.numbers()] == [saved.number, saved.number + 1]


def test_a_save_after_a_refused_one(run_dir: Path, held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    small = Small(run_dir)
    small.step()
    with monkeypatch.context() as full:
        full.setattr("resumable.run.checkpoint.commit", no_space)
        with pytest.raises(OSError, match="No space left"):
            small.state.save().wait()
    threading.Timer(0.05, held.may_go_on.set).start()

    before = small.model.weight.detach().clone()
    saved = small.state.save()
    small.model.weight.data.fill_(7)
    saved.wait()
    small.assert_holds(saved.path, before)
    small.state.close()


def test_a_save_waits_for_the_one_in_flight(run_dir: Path, held: Held) -> None:
    small = Small(run_dir)
    small.step()
    first = small.model.weight.detach().clone()
    handles = [small.state.save()]
    second = threading.Thread(target=lambda: handles.append(small.state.save()))
    second.start()
    second.join(0.05)
    assert second.is_alive()

    held.may_go_on.set()
    second.join(20)
    small.step()
    small.state.close()
    assert [handle.number for handle in handles] == [1, 2]
    for handle in handles:
        small.assert_holds(handle.path, first)


def test_a_long_wait_for_the_save_before_is_told_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Small(run_dir)
    for longest, count in [(60.0, 0), (-1.0, 1), (-1.0, 0)]:
        monkeypatch.setattr(saver, "A_LONG_WAIT", longest)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            small.state.save()
        assert ["Save less often" in str(one.message) for one in told] == [True] * count
    small.state.close()


def images() -> list[int]:
    """Return the sizes of the images that are in memory, without any help by the garbage collector."""
    return [len(found) for found in host_memory._maps]


@pytest.mark.proves("quiet")
@pytest.mark.parametrize("large", [True, False])
def test_one_image_which_goes_with_close(run_dir: Path, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr("resumable.saving.preparation._WORTH_PREPARING", 0)
    host_memory._maps.clear()
    threads = {*threading.enumerate()}
    for resume in range(3):
        small = Small(run_dir)
        for _ in range(3):
            small.step()
            small.optimizer.zero_grad()
            small.state.save()
        small.state.wait()
        assert len(images()) == 1
        assert images()[0] <= 1.02 * small.model.weight.nbytes
        assert small.optimizer._optimizer_step_pre_hooks
        small.state.close()
        assert images() == []
        assert not small.optimizer._optimizer_step_pre_hooks
        assert {*threading.enumerate()} <= threads
        assert small.state.step == 3 * (resume + 1)


@pytest.mark.parametrize("write", [*WAYS, lambda frozen: setattr(frozen, "data", frozen + 1)])
def test_what_is_frozen_is_written_to_and_saved_again(
    run_dir: Path, write: Callable[[Tensor], object]
) -> None:
    model = nn.Sequential(nn.Linear(1 << 18, 1, bias=False), nn.Linear(1, 3).requires_grad_(False))
    optimizer = torch.optim.SGD(model[0].parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer, keep=None) as state:
        for number in range(4):
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            path = state.save().path
            if number % 2:
                with torch.no_grad():
                    write(model[1].weight)
            state.wait()
            read = safetensors.torch.load_file(path / "model-frozen.safetensors")
            read |= safetensors.torch.load_file(path / "model.safetensors")
            assert read.keys() == expected.keys()
            assert all(torch.equal(read[name], expected[name]) for name in expected)
