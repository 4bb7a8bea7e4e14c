"""Models are put back exactly, whatever they hold and whatever they are wrapped in, under bare names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from resumable import ResumableWarning, RunState, StateMismatch, Unsupported, UsageError
from resumable.files.sharded_tensor import local
from resumable.parts import ddp_buckets
from resumable.parts.models import bare_name, unwrap

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """A model of two submodules, one of which can be wrapped."""

    def __init__(self, seed: int = 0, inner: Wrap = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = inner(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        self.module = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.module(self.body(inputs))
        return out


def _compile(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")
    return wrapped


def _averaged(module: nn.Module) -> nn.Module:
    # BatchNorm counts in integers, which have no average.
    return AveragedModel(module)


WRAPS: Mapping[str, Callable[[int], nn.Module]] = {
    "plain": Net,
    "parallel": lambda seed: nn.DataParallel(Net(seed)),
    "compiled": lambda seed: _compile(Net(seed)),
    "compiled parallel": lambda seed: _compile(nn.DataParallel(Net(seed))),
    "parallel compiled": lambda seed: nn.DataParallel(_compile(Net(seed))),
    "parallel inside": lambda seed: Net(seed, nn.DataParallel),
    "compiled inside": lambda seed: Net(seed, _compile),
    "both inside a parallel": lambda seed: nn.DataParallel(Net(seed, lambda m: _compile(nn.DataParallel(m)))),
}


def _save(run_dir: Path, **parts: Any) -> None:
    with RunState.load(run_dir, **parts) as state:
        state.save()


def _resume_twice(run_dir: Path, build: Callable[[int], nn.Module]) -> nn.Module:
    """Save the model of seed 0 and load it into those of seeds 1 and 2."""
    _save(run_dir, model=build(0))
    for seed in (1, 2):
        model = build(seed)
        _save(run_dir, model=model)
    return model


def _assert_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(_bits(tensor), _bits(other[name])), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("first", "second"), [*zip(WRAPS, [*WRAPS][3:] + [*WRAPS][:3], strict=True)])
def test_a_model_can_be_wrapped_otherwise_at_each_resume(run_dir: Path, first: str, second: str) -> None:
    model = WRAPS[first](0)
    inputs = torch.randn(5, 3)
    model(inputs)
    _save(run_dir, model=model, extra={"ema": _averaged(model)})
    model.eval()
    expected = model(inputs)
    for kind, seed in ((second, 1), (first, 2)):
        model = WRAPS[kind](seed)
        _save(run_dir, model=model, extra={"ema": (ema := _averaged(model))})

        for found in (model, ema):
            assert torch.equal(found.eval()(inputs), expected)


@pytest.mark.parametrize("kind", WRAPS)
def test_names_on_disk_are_those_of_the_bare_model(run_dir: Path, kind: str) -> None:
    model = WRAPS[kind](0)
    _save(run_dir, model=model)
    bare = Net(1)
    load_model(bare, run_dir / "newest" / "model.safetensors")

    assert load_file(run_dir / "newest" / "model.safetensors").keys() == bare.state_dict().keys()
    assert torch.equal(unwrap(model).module.weight, bare.module.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", WRAPS)
def test_a_wrapper_is_in_eval_mode_again(run_dir: Path, kind: str) -> None:
    _save(run_dir, model=WRAPS[kind](0).eval())
    for seed in (1, 2):
        model = WRAPS[kind](seed)
        RunState.load(run_dir, model=model).close()

        assert not any(module.training for module in model.modules())


def test_a_submodule_that_is_only_called_module_keeps_its_name() -> None:
    bare = bare_name(nn.DataParallel(Net()))

    assert bare("module.module.weight") == "module.weight"


def test_an_average_of_a_wrapped_model_has_the_names_of_a_bare_one(run_dir: Path) -> None:
    _save(run_dir, extra={"ema": AveragedModel(nn.DataParallel(nn.Linear(2, 2)))})
    for seed in (1, 2):
        torch.manual_seed(seed)
        ema = AveragedModel(nn.Linear(2, 2))
        ema.n_averaged += seed
        RunState.load(run_dir, extra={"ema": ema}).close()

        assert ema.n_averaged.item() == 0


class Tied(nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5, bias=False)
        self.decoder.weight = self.encoder.weight


def test_tied_weights_are_stored_once_and_stay_tied(run_dir: Path) -> None:
    model: Any = _resume_twice(run_dir, Tied)
    path = run_dir / "newest" / "model.safetensors"

    assert len(load_file(path)) == 1
    assert model.decoder.weight is model.encoder.weight
    assert torch.equal(model.decoder.weight, Tied(0).encoder.weight)
    load_model(other := Tied(7), path)
    assert torch.equal(other.decoder.weight, model.decoder.weight)


def test_a_shared_submodule_comes_back_under_each_of_its_names(run_dir: Path) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        shared = nn.Linear(2, 2)
        return nn.ModuleDict({"one": shared, "other": nn.Sequential(shared)})

    model: Any = _resume_twice(run_dir, build)

    assert torch.equal(model["one"].weight, build(0).state_dict()["other.0.weight"])
    assert model["one"] is model["other"][0]


@pytest.mark.parametrize("parametrize", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_parametrized_weights_come_back(run_dir: Path, parametrize: Callable[[nn.Module], Any]) -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module: nn.Module = parametrize(nn.Linear(3, 3))
        return module

    model: Any = _resume_twice(run_dir, build)

    _assert_equal(build(0).state_dict(), model.state_dict())
    assert torch.equal(model.weight, build(0).weight)  # type: ignore[arg-type]


def test_each_modules_own_mode_comes_back(run_dir: Path) -> None:
    def build(seed: int) -> nn.Sequential:
        return nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(1, 1)))

    model = build(0)
    model[1][0].eval()  # type: ignore[index]
    _save(run_dir, model=model)
    for seed in (1, 2):
        model = build(seed).eval()
        RunState.load(run_dir, model=model).close()

        modes = {name: module.training for name, module in model.named_modules()}
        assert modes == {"": True, "0": True, "1": True, "1.0": False, "1.1": True}


def test_what_was_unfrozen_during_the_training_is_unfrozen_again(run_dir: Path) -> None:
    def build() -> nn.Linear:
        model = nn.Linear(2, 2)
        model.weight.requires_grad_(False)
        return model

    model = build()
    with RunState.load(run_dir, model=model) as state:
        model.weight.requires_grad_(True)
        model.bias.requires_grad_(False)
        state.save()
    for _ in range(2):
        model = build()
        RunState.load(run_dir, model=model).close()

        assert [p.requires_grad for p in model.parameters()] == [True, False]


class Caches(nn.Module):
    """Buffers that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("later", None, persistent=False)
        self.register_buffer("mask", torch.ones(1, 3).expand(2, 3), persistent=False)
        self.register_buffer("until", torch.ones(1), persistent=False)


def test_buffers_that_are_not_persistent_come_back(run_dir: Path) -> None:
    model: Any = Caches()
    with RunState.load(run_dir, model=nn.DataParallel(model)) as state:
        model.inner.cache = torch.arange(3.0)
        model.later = torch.ones(2, dtype=torch.bfloat16)
        model.until = None
        model.register_buffer("made", torch.full((2,), 7.0), persistent=False)
        state.save()
    for _ in range(2):
        model = Caches()
        _save(run_dir, model=model)

        assert torch.equal(model.inner.cache, torch.arange(3.0))
        assert torch.equal(model.later, torch.ones(2, dtype=torch.bfloat16))
        assert model.until is None
        assert torch.equal(model.made, torch.full((2,), 7.0))
        assert model.state_dict().keys() == {"inner.weight", "inner.bias"}


def test_going_back_forgets_the_buffers_that_were_made_since(run_dir: Path) -> None:
    model: Any = Caches()
    with RunState.load(run_dir, model=model) as state:
        state.save()
        for _ in range(2):
            model.later = torch.ones(2)
            model.inner.register_buffer("made", torch.ones(2), persistent=False)
            state.restore("newest")

            assert model.later is None
            assert not hasattr(model.inner, "made")


def test_a_buffer_that_is_new_in_the_code_stays(run_dir: Path) -> None:
    _save(run_dir, model=nn.Sequential(nn.Linear(1, 1)))
    for _ in range(2):
        model = nn.Sequential(nn.Linear(1, 1))
        model[0].register_buffer("mask", torch.ones(2), persistent=False)
        RunState.load(run_dir, model=model).close()

        assert torch.equal(model[0].mask, torch.ones(2))  # type: ignore[arg-type]


def test_a_buffer_of_a_module_that_is_gone_is_left_out(run_dir: Path) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Identity())
    model[1].register_buffer("cache", torch.ones(1), persistent=False)
    _save(run_dir, model=model)
    for _ in range(2):
        model = nn.Sequential(nn.Linear(1, 1))
        RunState.load(run_dir, model=model).close()

        assert not list(model.buffers())


class Counting(nn.Module):
    """A module with a state beside its tensors."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), float(seed)))
        self.seen: dict[str, Any] = {"batches": seed, "last": torch.full((2,), float(seed))}

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


def test_the_extra_state_of_modules_comes_back(run_dir: Path) -> None:
    model: Any = _resume_twice(run_dir, lambda seed: nn.DataParallel(nn.Sequential(Counting(seed + 5))))

    seen = model.module[0].seen
    assert seen["batches"] == 5
    assert torch.equal(seen["last"], torch.tensor([5.0, 5.0]))
    assert "0._extra_state" not in load_file(run_dir / "newest" / "model.safetensors")


def test_extra_state_that_is_a_tensor_may_grow(run_dir: Path) -> None:
    class Growing(nn.Module):
        seen = torch.zeros(0)

        def get_extra_state(self) -> Tensor:
            return self.seen

        def set_extra_state(self, state: Tensor) -> None:
            self.seen = state

    for resume in range(3):
        model = Growing()
        with RunState.load(run_dir, model=model) as state:
            assert model.seen.tolist() == [*range(resume)]
            model.seen = torch.arange(resume + 1.0)
            state.save()


@pytest.mark.parametrize("then", [True, False])
def test_extra_state_that_only_one_side_has_is_named(run_dir: Path, then: bool) -> None:
    with_state, without = Counting(), nn.Module()
    without.weight = nn.Parameter(torch.zeros(1))
    _save(run_dir, model=with_state if then else without)
    word = "missing" if then else "new"

    with pytest.raises(StateMismatch, match=rf"model\._extra_state: {word} in the code"):
        RunState.load(run_dir, model=without if then else with_state)


class Renaming(nn.Module):
    """A module that says itself what its state is."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Linear(2, 2)
        self.note = f"seed {seed}"

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"w": self.net.weight.detach(), "note": self.note}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.net.weight.data.copy_(state_dict["w"])
        self.note = state_dict["note"]


def test_a_module_with_a_state_dict_of_its_own_is_asked(run_dir: Path) -> None:
    model: Any = _resume_twice(run_dir, Renaming)

    assert torch.equal(model.net.weight, Renaming(0).net.weight)
    assert model.note == "seed 0"


def test_a_lazy_module_has_to_see_a_batch_first(run_dir: Path) -> None:
    model = nn.LazyLinear(2)

    with pytest.raises(UsageError, match=r"model\.weight has no shape yet"):
        RunState.load(run_dir, model=model)
    model(torch.ones(1, 3))
    for _ in range(3):
        _save(run_dir, model=model)


def test_a_modules_extra_part_keeps_its_flags_too(run_dir: Path) -> None:
    teacher = nn.Linear(2, 2).eval().requires_grad_(False)
    _save(run_dir, extra={"teacher": teacher})
    for _ in range(2):
        live = nn.Linear(2, 2).requires_grad_(False)
        RunState.load(run_dir, extra={"teacher": live}).close()

        _assert_equal(teacher.state_dict(), live.state_dict())
        assert not live.training


@pytest.fixture
def _alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _forth_and_back(model: nn.Module, count: int = 1) -> None:
    for _ in range(count):
        model(torch.ones(2, 3)).sum().backward()


def _order(ddp: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in unwrap(ddp).named_parameters()}
    return [bare_name(unwrap(ddp))(names[id(parameter)]) for parameter in ddp_buckets.layout(ddp) or []]


REPLICATED: Mapping[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    # each with the wrapper in it
    "replicated": lambda: (ddp := DistributedDataParallel(Net()), ddp),
    "compiled": lambda: (_compile(ddp := DistributedDataParallel(Net())), ddp),
    "of a compiled one": lambda: (ddp := DistributedDataParallel(_compile(Net())), ddp),
    "inside": lambda: ((net := Net(inner=DistributedDataParallel)), net.body),
}


@pytest.mark.quick(3)
@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", REPLICATED)
def test_a_replica_continues_with_the_order_of_its_gradients(run_dir: Path, kind: str) -> None:
    model, ddp = REPLICATED[kind]()
    _forth_and_back(ddp if kind != "inside" else model, 3)
    expected = _order(ddp)
    _save(run_dir, model=model)
    for _ in range(2):
        model, ddp = REPLICATED[kind]()
        assert not _order(ddp)
        _save(run_dir, model=model)

        assert expected
        assert _order(ddp) == expected


@pytest.mark.heavy
@pytest.mark.usefixtures("_alone")
def test_a_replica_and_one_process_resume_each_other(run_dir: Path) -> None:
    for model in (Net(), DistributedDataParallel(Net(1)), Net(2), DistributedDataParallel(Net(3))):
        with RunState.load(run_dir, model=model) as state:
            _forth_and_back(model)
            state.save()
        _assert_equal(
            {name: parameter.detach() for name, parameter in unwrap(model).named_parameters()},
            {name: parameter.detach() for name, parameter in Net().named_parameters()},
        )


@pytest.mark.usefixtures("_alone")
def test_going_back_behind_the_first_backward_takes_the_first_order_too(run_dir: Path) -> None:
    ddp = DistributedDataParallel(Net())
    with RunState.load(run_dir, model=ddp) as state:
        first = state.save().number
        _forth_and_back(ddp, 2)
        second = state.save().number
        expected = _order(ddp)
        for _ in range(2):
            state.restore(first)
            assert not _order(ddp)
            state.restore(second)
            assert _order(ddp) == expected


@pytest.mark.usefixtures("_alone")
def test_a_replica_that_cannot_take_up_its_order_says_so(run_dir: Path) -> None:
    ddp = DistributedDataParallel(Net())
    _forth_and_back(ddp, 2)
    _save(run_dir, model=ddp)
    for _ in range(2):
        ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
        with pytest.warns(ResumableWarning, match="model: DistributedDataParallel is set up in another way"):
            RunState.load(run_dir, model=ddp).close()


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (1,))


def _fully_sharded() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))


def _sharded_in_place() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net := Net(), mesh=_mesh())
    return net


def _distributed(name: str) -> nn.Module:
    from torch.distributed.tensor import Replicate, distribute_tensor

    net = Net()
    owner = net.body[1]
    tensor = distribute_tensor(getattr(owner, name).detach(), _mesh(), [Replicate()])
    setattr(owner, name, nn.Parameter(tensor) if name in owner._parameters else tensor)
    return net


def _partial(name: str) -> nn.Module:
    from torch.distributed.tensor import DTensor, Partial

    net = _distributed(name)
    owner = net.body[1]
    local = getattr(owner, name).to_local().detach()
    tensor = DTensor.from_local(local, _mesh(), [Partial()])
    setattr(owner, name, nn.Parameter(tensor) if name in owner._parameters else tensor)
    return net


def _engine() -> nn.Module:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    engine.module = Net()
    return engine


def _partitioned() -> nn.Module:
    net = Net()
    net.module.weight.ds_id = 0
    return net


SPLIT: Mapping[str, tuple[Callable[[], nn.Module], str, str]] = {
    "FSDP": (_fully_sharded, r"model is split over the processes \(FSDP1\)", "torch.distributed.checkpoint"),
    "a parameter": (lambda: _partial("weight"), r"model\.body\.1\.weight is placed as Partial", "Shard"),
    "a buffer": (lambda: _partial("running_var"), r"model\.body\.1\.running_var is placed as", "Shard"),
    "an engine": (_engine, r"model is split .* \(DeepSpeed\)", "the engine's own save_checkpoint"),
    "its parameters": (_partitioned, r"model\.module\.weight is split .*DeepSpeed", "save_checkpoint"),
}


@pytest.mark.parametrize("kind", SPLIT)
@gloo.alone
@pytest.mark.heavy
def test_a_model_that_is_split_over_processes_is_refused(run_dir: Path, kind: str) -> None:
    build, text, tool = SPLIT[kind]
    model = build()

    with pytest.raises(Unsupported, match=text) as caught:
        RunState.load(run_dir, model=model)
    assert tool in caught.value.fix
    with pytest.raises(Unsupported, match=text.replace("model", r"extra\.it", 1)):
        RunState.load(run_dir, extra={"it": model})
    assert not run_dir.exists()


@pytest.mark.parametrize("kind", ["FSDP2", "a parameter", "a buffer"])
@gloo.alone
@pytest.mark.quick(3)
def test_a_model_sharded_over_one_process_is_saved_as_any_other(run_dir: Path, kind: str) -> None:
    names = {"a parameter": "weight", "a buffer": "running_var"}

    def build() -> nn.Module:
        return _sharded_in_place() if kind == "FSDP2" else _distributed(names[kind])

    first = build()
    _save(run_dir, model=first)
    second = build()
    for parameter in second.parameters():
        parameter.data.zero_()
    _save(run_dir, model=second)

    assert [path.name for path in run_dir.glob("checkpoints/000002*/model*")] == ["model.safetensors"]
    for name, value in first.state_dict().items():
        assert torch.equal(local(second.state_dict()[name]), local(value))


def test_what_only_sounds_like_a_share_is_taken(run_dir: Path) -> None:
    model = Net()
    model.ds_id = 7
    kernel = type("FusedAdam", (torch.optim.SGD,), {"__module__": "deepspeed.ops.adam.fused_adam"})
    for _ in range(2):
        _save(run_dir, model=model, optimizer=kernel(model.parameters(), lr=0.1))


def test_a_buffer_that_nothing_can_be_loaded_into_is_refused_at_first(run_dir: Path) -> None:
    def make(seed: int) -> nn.Module:
        model = Net(seed)
        with torch.inference_mode():
            model.register_buffer("table", torch.full((3,), float(seed)))
        return model

    with RunState.load(run_dir, model=make(0)) as state:
        state.save()
    model = make(1)
    before = {name: one.clone() for name, one in model.state_dict().items()}

    with pytest.raises(StateMismatch, match=r"(?s)model\.table: made in torch\.inference_mode.*Nothing was"):
        RunState.load(run_dir, model=model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    RunState.load(run_dir, model=model, allow=["model.table"]).close()
    assert torch.equal(model.module.weight, make(0).module.weight)
    state.run.open(1).verify()
