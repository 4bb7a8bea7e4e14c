"""Loading: all of a checkpoint or nothing of it, into the tensors that are there, with the right bits."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils
from torch.utils.data import DataLoader

from resumable import CannotRead, CheckpointDamaged, ResumableWarning, Run, RunState, StateMismatch
from resumable.files import file_reader, large_files, tensor_file
from resumable.parts import restore, watch
from resumable.parts.copies import taken
from resumable.run import manifest

LARGE = 64 << 10
"""Tensors of so many bytes are read into memory of their own; smaller ones together."""


def bits(value: Any) -> Any:
    """Return what is equal only for the same content, tensors to the last bit."""
    if isinstance(value, Tensor):
        flags = value.requires_grad if value.is_leaf else None
        return str(value.dtype), tuple(value.shape), flags, tensor_file.as_bytes(value).tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value)


def of_model(model: nn.Module) -> Any:
    """Return all that a model holds."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return bits([named, gradients, [module.training for module in model.modules()]])


def of_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """Return all that an optimizer holds."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return bits([groups, [dict(optimizer.state.get(p, {})) for p in parameters], len(optimizer.state)])


class Net(nn.Module):
    """Large and small weights, a frozen one, tied ones, and buffers of most kinds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(160, 160)
        self.norm = nn.BatchNorm1d(160)
        self.backbone = nn.Linear(160, 140).requires_grad_(False)
        self.tied = nn.Linear(160, 160)
        self.tied.weight = self.first.weight
        self.register_buffer("mask", torch.rand(300, 300) > 0.5)
        self.register_buffer("phase", torch.randn(5, dtype=torch.complex64))
        self.register_buffer("passing", torch.randn(3), persistent=False)


class Training:
    """A model, its optimizer and its scheduler, all of torch's own."""

    def __init__(self, seed: int) -> None:
        self.model = Net(seed)
        self.optimizer: Any = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler: Any = lr_scheduler.StepLR(self.optimizer, 3)
        self.notes = {"seed": [seed], "tensor": torch.full((3,), float(seed))}

    @property
    def parts(self) -> dict[str, Any]:
        """What is given to RunState."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extra": {"notes": self.notes},
        }

    def step(self) -> None:
        """Take a step, from gradients that are random."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        with torch.no_grad():
            self.model.norm.running_mean.add_(1)

    def look(self) -> Any:
        """Return all that can be seen of it."""
        seen = of_model(self.model), of_optimizer(self.optimizer), bits(self.scheduler.state_dict())
        return *seen, bits(self.notes), torch.get_rng_state().tolist(), random.getstate()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let large tensors lie in several blocks."""
    monkeypatch.setattr(large_files, "BLOCK", 24 << 10)


@pytest.fixture
def saved(run_dir: Path, small_blocks: None) -> list[Any]:
    """Leave two checkpoints behind, and return what each holds."""
    training, seen = Training(0), []
    with RunState.load(run_dir, **training.parts, every=None) as state:
        for number in range(2):
            training.step()
            training.notes["seed"] = [number]
            state.save().wait()
            seen.append(training.look())
    return seen


def folder(run_dir: Path, number: int) -> Path:
    """Return where a checkpoint lies."""
    return Run(run_dir).open(number).path


def put(path: Path, content: bytes) -> None:
    """Give a file other content; what shares it with another checkpoint keeps it."""
    path.unlink()
    path.write_bytes(content)


def forge(found: Path, **files: bytes | tuple[bytes, int]) -> None:
    """Write files of a checkpoint as if it had been saved so; with a number, the manifest lies."""
    about = manifest.from_json((found / manifest.NAME).read_bytes())
    records = dict(about.files)
    for key, content in files.items():
        name = key.replace("__", "/").replace("_dot_", ".")
        data, size = content if isinstance(content, tuple) else (content, len(content))
        put(found / name, data)
        records[name] = manifest.FileRecord(size, large_files.digest(data))
    put(found / manifest.NAME, manifest.to_json(replace(about, files=records)))


# All or nothing: damage.


def _offsets(path: Path) -> list[int]:
    size = path.stat().st_size
    header = 0
    if path.suffix == ".safetensors":
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    edges = [at + by for at in range(0, size, large_files.BLOCK * 3) for by in (-1, 0, 1)]
    return sorted(
        {at for at in (0, 7, 8, header // 2, header - 1, header, size - 1, *edges) if 0 <= at < size}
    )


FILES = ("model.safetensors", "model-frozen.safetensors", "optimizer.safetensors", "extra.safetensors")


@pytest.mark.quick(4)
@pytest.mark.proves("all or nothing")
@pytest.mark.parametrize("file", [*FILES, "state.json", "ranks/00000.safetensors", "manifest.json"])
def test_a_flipped_bit_leaves_every_object_as_it_was(run_dir: Path, saved: list[Any], file: str) -> None:
    path = folder(run_dir, 2) / file
    content = path.read_bytes()
    live = Training(1)
    live.step()
    before = live.look()
    for number, at in enumerate(_offsets(path)):
        put(path, content[:at] + bytes([content[at] ^ 1 << number % 8]) + content[at + 1 :])

        with pytest.raises(CheckpointDamaged):
            RunState.load(run_dir, **live.parts, resume=2)

        assert live.look() == before, at


@pytest.mark.quick(5)
@pytest.mark.proves("noticed")
@pytest.mark.filterwarnings("ignore:.*is damaged")
@pytest.mark.parametrize("file", [*FILES, "state.json", "ranks/00000.json"])
def test_nothing_of_a_damaged_checkpoint_is_loaded(run_dir: Path, saved: list[Any], file: str) -> None:
    path = folder(run_dir, 2) / file
    content = path.read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        put(path, content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        for _ in range(2):
            live = Training(1)
            RunState.load(run_dir, **live.parts).close()

            assert live.look() == saved[0]
    put(path, content)
    RunState.load(run_dir, **live.parts).close()

    assert live.look() == saved[1]


# All or nothing: parts that refuse, files that change, interrupts.


class Own:
    """A part of the user's: what it does when its state is loaded is up to the test."""

    def __init__(self, then: Callable[[], Any] = lambda: None) -> None:
        self.then = then
        self.seen: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"it": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = self.then()


def with_own(training: Training, then: Callable[[], Any]) -> dict[str, Any]:
    """Return its parts, with one of the user's, and a module after that."""
    after = nn.Linear(150, 150)
    return training.parts | {"extra": {"notes": training.notes, "own": Own(then), "after": after}}


def _fail() -> None:
    raise ValueError("not this")


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("then", [_fail, _interrupt])
def test_a_refusal_puts_the_weights_back(run_dir: Path, small_blocks: None, then: Callable[[], None]) -> None:
    training = Training(0)
    training.optimizer.param_groups[0]["foreign"] = [1]
    with RunState.load(run_dir, **with_own(training, lambda: None)) as state:
        training.step()
        state.save()
    for steps in (0, 1):
        live, seen = Training(1), []
        for _ in range(steps):
            live.step()
        parts = with_own(live, lambda live=live, seen=seen: (seen.append(of_model(live.model)), then()))
        before = live.look(), of_model(parts["extra"]["after"])

        with pytest.raises((StateMismatch, KeyboardInterrupt)):
            RunState.load(run_dir, **parts)

        assert seen[0] == of_model(training.model)
        assert (live.look(), of_model(parts["extra"]["after"])) == before


def _flip_later(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the file change once everything has been verified, before the weights are filled."""
    load = lr_scheduler.StepLR.load_state_dict

    def flip(self: Any, state: Any) -> None:
        load(self, state)
        content = path.read_bytes()
        middle = len(content) // 2
        put(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])

    monkeypatch.setattr(lr_scheduler.StepLR, "load_state_dict", flip)


@pytest.mark.proves("noticed")
@pytest.mark.parametrize("file", ["model.safetensors", "model-frozen.safetensors", "optimizer.safetensors"])
def test_a_file_that_changes_at_the_last_moment_is_noticed(
    run_dir: Path, saved: list[Any], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    live = Training(1)
    live.step()
    path = folder(run_dir, 2) / file
    content = path.read_bytes()
    with monkeypatch.context() as patch:
        _flip_later(patch, path)

        with pytest.raises(CheckpointDamaged, match=r"has changed since .* objects .* hold a mixture"):
            RunState.load(run_dir, **live.parts, resume=2)
    put(path, content)
    for _ in range(2):
        RunState.load(run_dir, **live.parts).close()

        assert live.look() == saved[1]


def test_a_file_that_changes_before_a_users_part_loads_changes_nothing(
    run_dir: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(0)
    with RunState.load(run_dir, **with_own(training, lambda: None)) as state:
        training.step()
        state.save()
    live = Training(1)
    parts = with_own(live, lambda: None)
    before = live.look(), of_model(parts["extra"]["after"])
    _flip_later(monkeypatch, folder(run_dir, 1) / "model.safetensors")

    with pytest.raises(CheckpointDamaged, match=r"has changed since (?!.*mixture)"):
        RunState.load(run_dir, **parts)

    assert (live.look(), of_model(parts["extra"]["after"])) == before


class _Interrupter:
    """Interrupts at a call: of our code, or of torch's that loads."""

    PLACES = ("/resumable/", "/torch/optim/", "/torch/nn/modules/module.py")

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls: list[str] = []

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if not any(place in code.co_filename for place in self.PLACES):
            return
        self.calls.append(code.co_name)
        if len(self.calls) == self.at:
            raise KeyboardInterrupt(code.co_name)

    def run(self, job: Callable[[], None]) -> BaseException | None:
        """Do the job, and return how it ended."""
        # The coverage of the tests after this one is measured by such a function
        before = sys.gettrace()
        sys.settrace(self)
        try:
            job()
        except KeyboardInterrupt as exc:
            return exc
        finally:
            sys.settrace(before)
        return None


CRUCIAL = {
    *("scan_files", "scan_files_again", "fill", "restore", "restore_part", "move", "_scan", "_read_again"),
    *("apart", "load_state_dict", "_copied", "taken", "clones_nearby"),
    *("_keep_types", "_keep_memory", "_set_last_lr"),
}


@pytest.mark.proves("all or nothing")
# A file that was just opened is closed when nobody has it any more
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.heavy
def test_an_interrupt_leaves_old_or_new_or_says_so(run_dir: Path, small_blocks: None, is_own: bool) -> None:
    def parts(training: Training) -> dict[str, Any]:
        return with_own(training, lambda: None) if is_own else training.parts

    training = Training(0)
    with RunState.load(run_dir, **parts(training)) as state:
        training.step()
        state.save()
    new = training.look()
    live = Training(1)
    live.step()
    old = live.look()
    start = copy.deepcopy(live)
    whole = _Interrupter(0)
    assert whole.run(lambda: RunState.load(run_dir, **parts(copy.deepcopy(start))).close()) is None
    crucial = [at for at, name in enumerate(whole.calls, 1) if name in CRUCIAL]
    others = random.Random(0).sample(range(1, len(whole.calls)), 10)
    seen = []
    for at in sorted({*crucial, *others}):
        again = copy.deepcopy(start)
        given = parts(again)
        _put_generators(old)
        exc = _Interrupter(at).run(lambda given=given: RunState.load(run_dir, **given).close())
        look = again.look()
        if "mixture" not in str(exc):
            assert look in (old, new), (at, whole.calls[at - 1], exc)
        seen.append("mixture" if "mixture" in str(exc) else "old" if look == old else "new")

    assert {*seen} >= {"old", "mixture"}
    assert seen.count("mixture") < len(seen) / 3


def _put_generators(look: Any) -> None:
    torch.set_rng_state(torch.tensor(look[-2], dtype=torch.uint8))
    random.setstate(look[-1])


@pytest.mark.parametrize("width", [3, 150])
@pytest.mark.parametrize("then", [lambda: None, _fail])
def test_gradients_of_a_window_come_back_or_stay(run_dir: Path, width: int, then: Callable[[], None]) -> None:
    def make(seed: int, then: Callable[[], None]) -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, {
            "model": model,
            "optimizer": optimizer,
            "extra": {"own": Own(then)},
            "loader": _loader(),
        }

    model, parts = make(0, lambda: None)
    with RunState.load(run_dir, **parts) as state:
        for _ in state.batches():
            model(torch.ones(width)).square().sum().backward()
            state.save().wait()
            break
    seen = of_model(model)
    for gradients in (0, 1):
        other, parts = make(1, then)
        for _ in range(gradients):
            other.bias.grad = torch.ones(width)
        before = of_model(other)
        try:
            RunState.load(run_dir, **parts).close()
        except StateMismatch:
            assert of_model(other) == before
        else:
            assert (then is not _fail, of_model(other)) == (True, seen)


@pytest.mark.parametrize("width", [3, 150])
def test_going_back_in_a_window_that_fails_leaves_its_gradients(run_dir: Path, width: int) -> None:
    model, own = nn.Linear(width, width), Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"model": model, "optimizer": optimizer, "extra": {"own": own}}
    with RunState.load(run_dir, **parts, loader=_loader()) as state:
        for _ in state.batches():
            model(torch.ones(width)).square().sum().backward()
            state.save().wait()
            seen = of_model(model)
            own.then = _fail
            model(torch.ones(width)).square().sum().backward()
            before = of_model(model)
            for _ in range(2):
                with pytest.raises(StateMismatch):
                    state.restore(1)

                assert of_model(model) == before
            own.then = lambda: None
            state.restore(1)

            assert of_model(model) == seen
            break


def _loader() -> DataLoader[Any]:
    return DataLoader(range(9), 3)


# The right bits.

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64, torch.complex64, torch.complex128),
]
SIZES = [
    (),
    (0,),
    (3, 0),
    (1,),
    (5,),
    (7, 3),
    (4, 3, 2, 2),
    (127, 129),
    (128, 128),
    (129, 128),
    (32, 8, 16, 8),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
    "channels-last": lambda tensor: (
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    ),
    "beside": lambda tensor: torch.stack([tensor, tensor])[1],
    "spread": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0] if tensor.numel() else tensor,
}


def _random_tensor(dtype: torch.dtype, shape: tuple[int, ...], values: random.Random) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > values.random()
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(values.randrange(1 << 30))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def random_model(seed: int, values: int, layouts: int) -> nn.Module:
    """Return a model that `seed` makes, with contents of `values`, laid out as `layouts` says."""
    form, content, layout = random.Random(seed), random.Random(values), random.Random(layouts)
    model = nn.Module()
    for number in range(form.randint(4, 10)):
        inner = nn.Module()
        shape, dtype = form.choice(SIZES), form.choice(DTYPES)
        kind = form.choice(["weight", "weight", "weight", "buffer", "passing", "frozen"])
        lay = LAYOUTS[layout.choice([*LAYOUTS])]
        if kind in ("weight", "frozen") and not dtype.is_complex:
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(content.randrange(1 << 30)))
            if dtype.is_floating_point and dtype.itemsize > 1:
                weight = weight.to(dtype)
            inner.weight = nn.Parameter(lay(weight), requires_grad=kind == "weight")
        else:
            value = lay(_random_tensor(dtype, shape, content))
            inner.register_buffer("value", value, persistent=kind == "buffer")
        model.add_module(f"m{number}", inner)
    weights = [inner for inner in model.children() if hasattr(inner, "weight")]
    if len(weights) > 1 and form.random() < 0.5:
        weights[0].tied = weights[-1].weight
    model.register_parameter(
        "always", nn.Parameter(torch.randn(form.choice([3, LARGE // 4, LARGE // 4 + 1])))
    )
    return model


class Subclassed(torch.optim.SGD):
    """An optimizer of the user's own."""


def _hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters)

    def rename(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "note": torch.ones(2)}

    optimizer.register_state_dict_post_hook(rename)
    optimizer.register_load_state_dict_pre_hook(
        lambda _, state: {k: v for k, v in state.items() if k != "note"}
    )
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "tensors": lambda p: torch.optim.Adam(
        p, lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.8)), capturable=False, foreach=False
    ),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "subclassed": lambda p: Subclassed(p, lr=0.1, momentum=0.9),
    "hooked": _hooked,
}


class RandomTraining:
    """A random model and an optimizer of its trained weights."""

    def __init__(self, seed: int, optimizer: str, values: int = 0, layouts: int = 0) -> None:
        self.model = random_model(seed, values, layouts)
        self.is_torchs_own = optimizer not in ("subclassed", "hooked")
        self.optimizer: Any = OPTIMIZERS[optimizer]([p for p in self.model.parameters() if p.requires_grad])

    @property
    def parts(self) -> dict[str, Any]:
        """What is given to RunState."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        """Take a step, from gradients that are random."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def look(self) -> Any:
        """Return all that can be seen of it."""
        return of_model(self.model), of_optimizer(self.optimizer)

    def places(self) -> dict[str, int]:
        """Return where the tensors lie."""
        found = {name: t.data_ptr() for name, t in self.model.state_dict().items()}
        # What another's code loads may have made new.
        states = self.optimizer.state.values() if self.is_torchs_own else ()
        for number, state in enumerate(states):
            plain = {k: t for k, t in state.items() if isinstance(t, Tensor) and _is_plain(t)}
            found |= {f"{number}.{key}": t.data_ptr() for key, t in plain.items()}
        return found


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.numel() > 0


CASES = [
    pytest.param(seed, optimizer, marks=[pytest.mark.heavy] if seed >= 2 * len(OPTIMIZERS) else [])
    for seed, optimizer in enumerate(itertools.islice(itertools.cycle(OPTIMIZERS), 10 * len(OPTIMIZERS)))
]


@pytest.mark.quick(8)
@pytest.mark.parametrize(("seed", "optimizer"), CASES)
def test_any_training_comes_back_to_the_last_bit(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int, optimizer: str
) -> None:
    monkeypatch.setattr(large_files, "BLOCK", [1 << 12, LARGE, LARGE - 8, 16 << 20][seed % 4])
    training = RandomTraining(seed, optimizer)
    with RunState.load(run_dir, **training.parts, keep=None) as state:
        training.step()
        state.save().wait()
        first = training.look()
        training.step()
        state.save().wait()
    expected = training.look()
    for resume in (1, 2):
        fresh = RandomTraining(seed, optimizer, values=resume, layouts=resume)
        for _ in range(resume - 1):
            fresh.step()
        with RunState.load(run_dir, **fresh.parts, keep=None, every=None) as state:
            assert fresh.look() == expected
            fresh.step()
            state.save().wait()
            expected, places = fresh.look(), fresh.places()
            fresh.step()
            state.restore("newest")

            assert (fresh.look(), fresh.places()) == (expected, places)
            fresh.step()
            moments = of_optimizer(fresh.optimizer)
            state.restore(1, only="model")

            assert of_model(fresh.model) == first[0]
            assert of_optimizer(fresh.optimizer) == moments
        Run(run_dir).open(resume + 2).verify()


@pytest.mark.parametrize("seed", range(6))
def test_what_was_saved_on_a_gpu_comes_back_on_the_cpu(run_dir: Path, seed: int) -> None:
    training = RandomTraining(seed, ["adam", "nadam", "sgd"][seed % 3])
    with RunState.load(run_dir, **training.parts) as state:
        training.step()
        state.save()
    found = folder(run_dir, 1)
    forge(found, state_dot_json=json.dumps(_on_gpu(json.loads((found / "state.json").read_bytes()))).encode())
    for steps in (0, 1):
        fresh = RandomTraining(seed, ["adam", "nadam", "sgd"][seed % 3], values=1)
        for _ in range(steps):
            fresh.step()
        with pytest.warns(ResumableWarning, match="will change bits  device  cuda  -> cpu"):
            RunState.load(run_dir, **fresh.parts).close()

        assert fresh.look() == training.look()


@pytest.mark.parametrize("width", [3, 150])
def test_moments_of_another_dtype_than_the_live_ones_come_back(run_dir: Path, width: int) -> None:
    def make(seed: int, dtype: torch.dtype) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(width, width)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to(dtype)
        return model, optimizer

    model, optimizer = make(0, torch.float32)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        other, live = make(1, dtype)
        RunState.load(run_dir, model=other, optimizer=live).close()

        assert (of_model(other), of_optimizer(live)) == (of_model(model), of_optimizer(optimizer))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: tensor.conj().imag.clone()._neg_view(),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("length", [5, LARGE])
def test_a_view_that_stands_for_something_else_comes_back(run_dir: Path, length: int, view: str) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(150, 150)
        model.register_buffer("view", VIEWS[view](torch.randn(length, dtype=torch.complex64)))
        return model

    model = make(0)
    with RunState.load(run_dir, model=model) as state:
        state.save()
    for _ in range(2):
        other = make(1)
        RunState.load(run_dir, model=other).close()

        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
        assert torch.equal(other.weight, model.weight)


def _on_gpu(tree: Any) -> Any:
    if isinstance(tree, list):
        return [*map(_on_gpu, tree)]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        name, about = tree["$tensor"] if isinstance(tree["$tensor"], list) else (tree["$tensor"], {})
        return {"$tensor": [name, {**about, "device": "cuda:0"}]}
    return {key: _on_gpu(value) for key, value in tree.items()}


@pytest.mark.parametrize("is_tied", [True, False])
def test_tying_or_untying_that_is_allowed_fills_the_right_ones(run_dir: Path, is_tied: bool) -> None:
    def make(seed: int, is_tied: bool) -> Any:
        torch.manual_seed(seed)
        model: Any = nn.ModuleDict({"a": nn.Linear(150, 150), "b": nn.Linear(150, 150)})
        if is_tied:
            model["b"].weight = model["a"].weight
        return model

    model = make(0, is_tied)
    with RunState.load(run_dir, model=model) as state:
        state.save()
    for _ in range(2):
        other = make(1, not is_tied)
        RunState.load(run_dir, model=other, allow=["model.a.weight = b.weight"]).close()

        assert torch.equal(other["b"].weight, model["b"].weight)
        assert not is_tied or torch.equal(other["a"].weight, model["a"].weight)


# Code that is not torch's.


class OwnModule(nn.Linear):
    """A module with a way of its own to load."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = state_dict[f"{prefix}weight"].clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Hooked(nn.Linear):
    """A module with a hook that sees what is loaded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._register_load_state_dict_pre_hook(self._look)

    def _look(self, state: Any, prefix: str, *_: Any) -> None:
        self.seen = state[f"{prefix}weight"].clone()


class Replaced(nn.Linear):
    """A module one of which has another load_state_dict."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.load_state_dict = self._load

    def _load(self, state: Any, *args: Any, **options: Any) -> Any:
        self.seen = state["weight"].clone()
        return super().load_state_dict(state, *args, **options)


class Wrapped(nn.Linear):
    """A module whose own method passes for the one that it replaces."""

    @functools.wraps(nn.Module._load_from_state_dict)
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = state_dict[f"{prefix}weight"].clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


@pytest.mark.parametrize("kind", [OwnModule, Hooked, Replaced, Wrapped])
@pytest.mark.parametrize("width", [3, 150])
def test_a_modules_own_way_to_load_sees_the_weights(run_dir: Path, kind: type[Any], width: int) -> None:
    model = kind(width, width)
    with RunState.load(run_dir, model=model) as state:
        state.save()
    for _ in range(2):
        other = kind(width, width)
        RunState.load(run_dir, model=other).close()

        assert torch.equal(other.seen, model.weight)
        assert torch.equal(other.weight, model.weight)


class Lookahead(torch.optim.SGD):
    """An optimizer that looks at the weights when its state is loaded."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.seen = [p.detach().clone() for group in self.param_groups for p in group["params"]]


@pytest.mark.parametrize("width", [3, 150])
def test_the_users_code_sees_the_restored_weights_while_it_loads(run_dir: Path, width: int) -> None:
    def make() -> tuple[Any, Any, Any, dict[str, Any]]:
        model, average = nn.Linear(width, width), swa_utils.AveragedModel(nn.Linear(width, width))
        optimizer = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
        first = Own(lambda: [model.weight.clone(), optimizer.state[model.weight]["momentum_buffer"].clone()])
        last = Own(lambda: [average.module.weight.clone()])
        return model, average, optimizer, {"first": first, "average": average, "last": last}

    model, average, optimizer, extra = make()
    with RunState.load(run_dir, model=model, optimizer=optimizer, extra=extra) as state:
        model(torch.ones(width)).sum().backward()
        optimizer.step()
        state.save()
    moments = optimizer.state[model.weight]["momentum_buffer"]
    for _ in range(2):
        other, _, live, parts = make()
        RunState.load(run_dir, model=other, optimizer=live, extra=parts).close()

        assert bits(live.seen) == bits([model.weight.detach(), model.bias.detach()])
        assert bits(parts["first"].seen) == bits([model.weight.clone(), moments])
        assert bits(parts["last"].seen) == bits([average.module.weight.clone()])


def test_a_hook_of_an_optimizer_sees_the_restored_weights(run_dir: Path) -> None:
    training = Training(0)
    with RunState.load(run_dir, **training.parts) as state:
        training.step()
        state.save()
    for _ in range(2):
        live, seen = Training(1), []
        weight, hook = live.model.first.weight, live.optimizer.register_load_state_dict_post_hook
        hook(lambda _, weight=weight, seen=seen: seen.append(bits(weight.clone())))
        RunState.load(run_dir, **live.parts).close()

        assert seen == [bits(training.model.first.weight.clone())]


@pytest.mark.parametrize("width", [3, 150])
def test_weights_that_the_users_part_writes_while_it_loads_stay(run_dir: Path, width: int) -> None:
    model = nn.Linear(width, width)
    with RunState.load(run_dir, model=model, extra={"own": Own()}) as state:
        state.save()
    for _ in range(2):
        other = nn.Linear(width, width)
        own = Own(lambda other=other: nn.init.ones_(other.weight))
        RunState.load(run_dir, model=other, extra={"own": own}).close()

        assert torch.equal(other.weight, torch.ones(width, width))
        assert torch.equal(other.bias, model.bias)


# What is in the groups of an optimizer is not in the place where it will be.


def _grouped(seed: float) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 3)
    options: dict[str, Any] = {"betas": (torch.tensor(seed), torch.tensor(seed)), "foreach": False}
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(seed), **options)
    optimizer.param_groups[0]["own"] = {"array": np.full(3, seed), "tensors": [torch.full((3,), seed)]}
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:(?s).* has changed since .*optimizer")
def test_tensors_and_arrays_in_the_groups_come_back(run_dir: Path) -> None:
    model, optimizer = _grouped(0.5)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
    for _ in range(2):
        other, live = _grouped(0.25)
        lr = live.param_groups[0]["lr"]
        RunState.load(run_dir, model=other, optimizer=live).close()

        assert of_optimizer(live) == of_optimizer(optimizer)
        assert live.param_groups[0]["lr"] is lr


@pytest.mark.filterwarnings("ignore:(?s).* has changed since .*optimizer")
def test_a_learning_rate_that_is_a_tensor_can_be_overridden(run_dir: Path) -> None:
    model, optimizer = _grouped(0.5)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
    for _ in range(2):
        other, live = _grouped(0.25)
        RunState.load(run_dir, model=other, optimizer=live, override=["optimizer.lr"]).close()

        assert live.param_groups[0]["lr"].item() == 0.25
        assert live.param_groups[0]["betas"][0].item() == 0.5


# In place.


@pytest.mark.parametrize("width", [3, 150])
def test_going_back_keeps_every_tensor_and_counts_that_it_was_written_to(run_dir: Path, width: int) -> None:
    model = nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        for _ in state.steps(2):
            model(torch.ones(width)).sum().backward()
            optimizer.step()
            state.save()
        held = [*model.parameters(), *optimizer.state[model.weight].values()]
        before = [(id(t), t.data_ptr(), t._version) for t in held]
        for _ in range(2):
            state.restore(1)
        after = [*model.parameters(), *optimizer.state[model.weight].values()]

    assert [(id(t), t.data_ptr()) for t in after] == [(one, place) for one, place, _ in before]
    assert all(t._version > version for t, (_, _, version) in zip(after, before, strict=True))


def test_weights_that_are_put_back_after_the_save_of_a_body_are_noticed(run_dir: Path) -> None:
    model = nn.Linear(150, 150)
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
        for _ in state.epochs(1):
            torch.nn.init.zeros_(model.weight)
            state.save().wait()
            state.restore(1, only="model")
            with pytest.warns(UserWarning, match=r"model changed after save\(\)"):
                state._loops._body_ended()


class _Counting:
    """Counts the bytes of the tensors that are made, and where they lie."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made = self.copied = 0
        self.places: set[int] = set()
        for name in ("empty", "empty_strided"):
            monkeypatch.setattr(torch, name, self._counting(getattr(torch, name)))

        def counting(tensors: Any) -> Any:
            self.copied += sum(tensor.nbytes for tensor in tensors.values())
            return taken(tensors)

        monkeypatch.setattr(restore, "taken", counting)
        monkeypatch.setattr(watch, "clones", counting)

    def _counting(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            if not tensor.is_meta:
                self.made += tensor.nbytes
                self.places.add(tensor.data_ptr())
            return tensor

        return made


def _plain(width: int = 400) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width).requires_grad_(False))
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad])


def _backward(model: Any) -> None:
    model(torch.ones(model[0].in_features)).sum().backward()


@pytest.mark.proves("quiet")
def test_a_load_makes_no_second_copy_of_the_state(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = _plain()
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()
        state.save()
    large = model[0].weight.nbytes
    for _ in range(2):
        other, live = _plain()
        count = _Counting(monkeypatch)
        RunState.load(run_dir, model=other, optimizer=live).close()
        moments = [live.state[other[0].weight][key] for key in ("exp_avg", "exp_avg_sq")]

        # Nothing of the model, and of the optimizer's state just what it keeps.
        assert 2 * large <= count.made < 2 * large + LARGE
        assert {t.data_ptr() for t in moments} <= count.places
        assert count.copied < LARGE
        monkeypatch.undo()
        assert (of_model(other), of_optimizer(live)) == (_no_gradients(model), of_optimizer(optimizer))


def _no_gradients(model: nn.Module) -> Any:
    model.zero_grad()
    return of_model(model)


# Files that somebody made to do harm.


def _file(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _slot(begin: int, end: int, shape: Any = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


GIGA = 1 << 30
# The rest of what a reader refuses is in tests/files/test_tensorfile.py.
ATTACKS: dict[str, bytes | tuple[bytes, int]] = {
    "a header longer than the file": _file({}, length=GIGA),
    "a header that is nested": _file(b"[" * 100_000 + b"]" * 100_000),
    "a tensor beyond the file": _file({"weight": _slot(0, GIGA)}, b"1234"),
    "a tensor of a huge shape": _file({"weight": _slot(0, 4, [2**40, 2**40])}, b"1234"),
    "tensors that overlap": _file({"weight": _slot(0, 4), "bias": _slot(2, 6)}, b"123456"),
    "no booleans": _file({"weight": _slot(0, 4, dtype="BOOL")}, b"\0\1\2\3"),
    "a large one of no booleans": _file({"weight": _slot(0, LARGE, dtype="BOOL")}, b"\7" * LARGE),
    "a size that lies": (_file({"weight": _slot(0, 4)}, b"1234"), GIGA),
    "a size of 10^30": (_file({"weight": _slot(0, 4)}, b"1234"), 10**30),
    "a size of nothing": (_file({"weight": _slot(0, 4)}, b"1234"), 0),
}


@pytest.mark.proves("safe")
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("file", ["model_dot_safetensors", "optimizer_dot_safetensors"])
@pytest.mark.quick(9)
def test_a_file_that_lies_is_refused_and_takes_no_memory(
    run_dir: Path, saved: list[Any], monkeypatch: pytest.MonkeyPatch, file: str, attack: str
) -> None:
    forge(folder(run_dir, 2), **{file: ATTACKS[attack]})
    live = Training(1)
    before = live.look()
    count = _Counting(monkeypatch)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged):
            RunState.load(run_dir, **live.parts, resume=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (peak < 16 << 20, count.made < 16 << 20) == (True, True)
    assert live.look() == before


def test_bytes_of_a_live_tensor_that_are_no_booleans_are_refused(run_dir: Path, saved: list[Any]) -> None:
    found = folder(run_dir, 2)
    content = (found / "model.safetensors").read_bytes()
    forge(found, model_dot_safetensors=content[:-1] + b"\7")
    live = Training(1)
    before = live.look()

    with pytest.raises(CheckpointDamaged, match="neither 0 nor 1"):
        RunState.load(run_dir, **live.parts, resume=2)

    assert live.look() == before


def test_a_header_that_changes_before_the_file_is_verified_is_noticed(
    run_dir: Path, saved: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = file_reader.read_start

    def swapped(found: Path, name: str, size: int, count: int) -> memoryview:
        # Two weights of one shape, each under the name of the other.
        text = bytes(read(found, name, size, count))
        for old, new in ((b'"exp_avg.', b'"exp_new.'), (b'"exp_avg_sq.', b'"exp_avg.'), (b"new", b"avg_sq")):
            text = text.replace(old, new)
        return memoryview(text if len(text) == count else text.ljust(count))

    live = Training(1)
    before = live.look()
    monkeypatch.setattr(file_reader, "read_start", swapped)

    with pytest.raises(CheckpointDamaged, match="has changed while it was read"):
        RunState.load(run_dir, **live.parts, resume=2)

    assert live.look() == before


@pytest.mark.parametrize("device", ["nn:0", "cuda:0:1", "cuda:300", "", 5], ids=str)
def test_a_checkpoint_with_a_device_that_is_none_is_damaged(
    run_dir: Path, saved: list[Any], device: Any
) -> None:
    found = folder(run_dir, 2)
    tree = json.loads((found / "state.json").read_bytes())
    tree["model"]["model"]["first.weight"] = {"$tensor": ["first.weight", {"device": device}]}
    forge(found, state_dot_json=json.dumps(tree).encode())
    live = Training(1)
    with pytest.warns(ResumableWarning, match="is damaged"):
        RunState.load(run_dir, **live.parts).close()

    assert live.look() == saved[0]


def test_a_tensor_that_two_files_have_is_refused(run_dir: Path, saved: list[Any]) -> None:
    found = folder(run_dir, 2)
    forge(found, **{"model-frozen_dot_safetensors": (found / "model.safetensors").read_bytes()})
    live = Training(1)
    before = live.look()

    with pytest.raises(CheckpointDamaged, match="is in two files"):
        RunState.load(run_dir, **live.parts, resume=2)

    assert live.look() == before


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory"), torch.OutOfMemoryError("full")])
def test_a_lack_of_memory_is_no_damage_and_no_older_checkpoint_is_used(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def trained() -> tuple[nn.Module, Any]:
        model = nn.Linear(200, 200)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = trained()
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        for _ in range(2):
            model(torch.ones(200)).sum().backward()
            optimizer.step()
            state.save().wait()

    def full(*_: object) -> Tensor:
        raise error

    model, optimizer = trained()
    before = model.weight.detach().clone()
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "empty", full)
        for _ in range(2):
            with pytest.raises(CannotRead, match=r"no room on cpu for the 160,000 bytes of exp_avg") as told:
                RunState.load(run_dir, model=model, optimizer=optimizer)
            assert "damaged" in told.value.fix
    assert torch.equal(model.weight, before)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        assert state.step == 2


def test_what_goes_to_a_device_goes_there_when_it_is_reported_too(tmp_path: Path) -> None:
    content = bytes(range(200))
    (tmp_path / "file").write_bytes(content)
    took, told = bytearray(), []
    target = file_reader.Target(0, 200, None, lambda lane, at, piece: took.extend(piece))
    scan = file_reader.Scan("file", 200, [target], told=told.append)
    file_reader.scan_files(tmp_path, [(scan, large_files.digest(content))])

    assert (took, told) == (content, [200])


@pytest.mark.parametrize("size", [GIGA, 10**30])
@pytest.mark.parametrize("file", ["state_dot_json", "ranks__00000_dot_json"])
def test_a_json_file_whose_size_is_a_lie_is_refused(
    run_dir: Path, saved: list[Any], file: str, size: int
) -> None:
    found = folder(run_dir, 2)
    forge(found, **{file: ((found / file.replace("__", "/").replace("_dot_", ".")).read_bytes(), size)})

    with pytest.raises(CheckpointDamaged, match="bytes, its manifest says"):
        RunState.load(run_dir, **Training(1).parts, resume=2)
