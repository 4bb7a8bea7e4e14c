"""The image of the tensors is what they were when it was taken, whoever writes to them since."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fenced import Training, values
from torch import Tensor, nn

from resumable import RunState, SaveFailed
from resumable.files import codec, tensor_file
from resumable.files.codec import Encoded
from resumable.parts.copies import clones
from resumable.saving import host_memory, image_file, snapshot
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot

TENSORS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "sliced": torch.arange(8.0)[::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "complex": torch.tensor([1 + 2j]),
    "half": torch.tensor([1.5, -0.0, torch.nan], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "eighth": torch.tensor([1.0, -0.0]).to(torch.float8_e4m3fn),
}
FROZEN = "model-frozen.safetensors"


def groups(
    tensors: Mapping[str, Any], path: str = "file", memo: codec.Memo | None = None
) -> dict[str, Encoded]:
    return {path: codec.encode(dict(tensors), memo={} if memo is None else memo)}


def take(image: Image, tensors: Mapping[str, Any], path: str = "file") -> dict[str, Tensor]:
    """Return what an image has of some tensors."""
    return image.take(groups(tensors, path)).tensors(path)


def lists(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _bits(tensor: Tensor) -> list[int]:
    return list(tensor_file.as_bytes(tensor))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_many_small_tensors_keep_every_bit_also_of_a_nan(dtype: torch.dtype) -> None:
    size = 24 * dtype.itemsize
    bits = torch.randint(0, 256, (20, size), dtype=torch.uint8)
    bits[:, size // 2 :] = 0xFF  # NaNs of all kinds
    bits[::2, -1] = 0x7F
    bits[::2, -2] = 0x81 if dtype == torch.bfloat16 else 0xFD
    tensors = {f"p{i}": one.view(dtype).reshape(4, 6) for i, one in enumerate(bits)}
    tensors |= {f"s{i}": bits[i].view(dtype)[0] for i in range(9)}
    tensors |= {f"t{i}": tensors[f"p{i}"].t() for i in range(9)}

    image = Image()
    for _ in range(2):
        taken = take(image, tensors)
        assert {k: _bits(one) for k, one in taken.items()} == {k: _bits(one) for k, one in tensors.items()}


def test_a_row_of_tensors_ends_where_another_shape_or_an_empty_one_lies() -> None:
    tensors = {f"a{i}": torch.randn(2, 3) for i in range(9)}
    tensors |= {"empty": torch.zeros(0, 3), **{f"b{i}": torch.randn(1 + i, 3) for i in range(9)}}
    tensors |= {f"d{i}": torch.randn(2, 5) for i in range(9)}
    tensors |= {f"c{i}": torch.randn(7) for i in range(9)} | {"large": torch.randn(70_000)}
    image, memo = Image(), dict[Any, Any]()
    for _ in range(4):
        torch._foreach_add_([*tensors.values()], 1.0)
        assert lists(image.take(groups(tensors, memo=memo)).tensors("file")) == lists(tensors)


class Copier:
    """Stands before the copies that the image makes behind the fence."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.error: BaseException | None = None
        self.has_begun = threading.Event()
        self.at_once = self.later = 0

    def copy(self, copies: Any) -> None:
        if threading.current_thread().name == "resumable-image":
            self.has_begun.set()
            assert self.may_go_on.wait(20)
            if self.error:
                raise self.error
            self.later += len(copies)
        else:
            self.at_once += len(copies)
        _real_copy(copies)


_real_copy = snapshot._copy


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    """What copies behind the fence, and waits until it may continue."""
    held = Copier()
    monkeypatch.setattr(snapshot, "_copy", held.copy)
    yield held
    held.may_go_on.set()
    _join("resumable-image")


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(20)


def big() -> int:
    """Return the number of elements from which a tensor is copied by itself."""
    return image_file._SMALL // 4


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("worth_a_fence", [0, 1 << 30])
def test_an_image_has_the_same_bits_in_memory_of_its_own(name: str, worth_a_fence: int) -> None:
    live = TENSORS[name].clone(memory_format=torch.preserve_format)
    taken = take(Image(worth_a_fence=worth_a_fence), {name: live})[name]

    assert (taken.dtype, taken.shape, taken.is_contiguous()) == (live.dtype, live.shape, True)
    assert tensor_file.is_equal(taken, live)
    assert not live.numel() or taken.data_ptr() != live.data_ptr()


def test_an_image_does_not_follow_the_training() -> None:
    live = torch.ones(3, requires_grad=True)
    taken = take(Image(), {"live": live})["live"]
    live.data.add_(1)

    assert taken.tolist() == [1.0, 1.0, 1.0]


def test_clones_do_not_follow_the_training() -> None:
    live = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in TENSORS.items()}
    copies = clones(live)

    for name, tensor in live.items():
        if tensor.numel():
            tensor.copy_(torch.zeros_like(tensor))
        assert tensor_file.is_equal(copies[name], TENSORS[name])


def test_a_bool_that_is_uninitialized_is_a_bool_in_the_image() -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)

    taken = take(Image(), {"odd": odd})["odd"]

    assert taken.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_a_file_of_the_image_is_a_safetensors_file() -> None:
    content = Image().take(groups(TENSORS)).contents({})["file"]

    read = tensor_file.from_safetensors(content.block(0))
    assert all(tensor_file.is_equal(read[name], TENSORS[name]) for name in TENSORS)


def test_a_step_waits_until_what_it_changes_is_copied(copier: Copier) -> None:
    training = Training(size=big())
    before = training.values()
    taken = training.take()
    assert copier.has_begun.wait(20)
    stepping = threading.Thread(target=training.step)
    stepping.start()

    stepping.join(0.05)
    assert stepping.is_alive()
    assert training.values() == before

    copier.may_go_on.set()
    stepping.join(20)
    assert training.values() != before
    assert values(taken) == before
    assert copier.at_once == 0


@pytest.mark.parametrize("step_after", [1, 2, 3])
def test_a_step_waits_for_the_last_piece(monkeypatch: pytest.MonkeyPatch, step_after: int) -> None:
    monkeypatch.setattr(snapshot, "_AT_A_TIME", 1)
    training = Training(torch.optim.Adam, size=big())
    moments = [s["exp_avg"] for s in training.optimizer.state.values()]
    everything = dict(zip("abcd", [*training.parameters, *moments], strict=True))
    before = lists(everything)
    begun, go = threading.Semaphore(0), threading.Semaphore(0)

    def copy(copies: Any) -> None:
        if copies:
            begun.release()
            assert go.acquire(timeout=20)
            _real_copy(copies)

    monkeypatch.setattr(snapshot, "_copy", copy)
    taken = training.image.take(groups(everything))
    go.release(step_after)
    for _ in range(step_after + 1):
        begun.acquire(timeout=20)
    stepping = threading.Thread(target=training.step)
    stepping.start()
    stepping.join(0.02)
    go.release(9)
    stepping.join(20)

    assert lists(taken.tensors("file")) == before != lists(everything)


def test_what_no_step_changes_is_copied_before_take_returns(copier: Copier) -> None:
    training = Training(size=big())
    channels_last = nn.Parameter(torch.randn(8, 64, 8, 8).to(memory_format=torch.channels_last))
    training.optimizer.add_param_group({"params": [channels_last]})
    others = {name: tensor.clone(memory_format=torch.preserve_format) for name, tensor in TENSORS.items()}
    others["buffer"] = torch.ones(big())
    expected = {**clones(others), "channels": channels_last.detach().clone()}
    taken = training.image.take(groups({**others, "channels": channels_last, "a": training.parameters[0]}))
    for tensor in [*others.values(), channels_last.data]:
        tensor.untyped_storage().fill_(0)
    copier.may_go_on.set()

    found = taken.tensors("file")
    assert all(tensor_file.is_equal(found[name], tensor) for name, tensor in expected.items())
    assert copier.later == 1


def test_a_tensor_whose_data_is_replaced_is_in_the_file_as_it_was(copier: Copier) -> None:
    training = Training(size=big())
    before = training.values()
    taken = training.take()
    for parameter in training.parameters:
        parameter.data = torch.full((big(),), 7.0)
    gc.collect()
    copier.may_go_on.set()

    assert values(taken) == before


def test_nothing_is_copied_later_unless_a_step_has_passed_since_the_last_image(copier: Copier) -> None:
    copier.may_go_on.set()
    training = Training(size=big())
    values(training.take())
    assert (copier.at_once, copier.later) == (0, 2)

    before = training.values()
    taken = training.take()
    for parameter in training.parameters:
        parameter.data.fill_(7)
    assert values(taken) == before
    assert (copier.at_once, copier.later) == (2, 2)

    for parameter in training.parameters:
        parameter.data.fill_(0)
    training.step()
    assert values(training.take()) == training.values()
    assert copier.later == 4


def test_an_image_that_is_not_worth_a_fence_is_copied_at_once(copier: Copier) -> None:
    training = Training(size=big())
    training.image = Image([training.optimizer])
    training.step()
    before = training.values()
    taken = training.take()
    training.step()

    assert values(taken) == before
    assert copier.later == 0


def in_place(training: Training) -> None:
    for parameter in training.parameters:
        with torch.no_grad():
            parameter.add_(1)


def through_data(training: Training) -> None:
    for parameter in training.parameters:
        parameter.data.fill_(7)


def through_numpy(training: Training) -> None:
    for parameter in training.parameters:
        parameter.detach().numpy()[...] = 7


def through_a_storage(training: Training) -> None:
    for parameter in training.parameters:
        parameter.untyped_storage().fill_(7)


def by_loading(training: Training) -> None:
    module = nn.ParameterList(training.parameters)
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


def by_swapping_with_an_average(training: Training) -> None:
    for parameter in training.parameters:
        average, kept = parameter.detach() + 1, parameter.detach().clone()
        parameter.data.copy_(average)
        average.copy_(kept)


def by_setting(training: Training) -> None:
    for parameter in training.parameters:
        with torch.no_grad():
            parameter.set_(torch.full((big(),), 7.0))  # type: ignore[call-overload]


def by_foreach(training: Training) -> None:
    with torch.no_grad():
        torch._foreach_mul_(training.parameters, 3.0)


def by_another_optimizer(training: Training) -> None:
    torch.optim.SGD(training.parameters, lr=1.0).step()


def by_a_step_without_the_hook(training: Training) -> None:
    type(training.optimizer).step.__wrapped__(training.optimizer)


def by_a_vector(training: Training) -> None:
    vector = nn.utils.parameters_to_vector(training.parameters)
    nn.utils.vector_to_parameters(vector + 1, training.parameters)


def by_initializing(training: Training) -> None:
    for parameter in training.parameters:
        nn.init.normal_(parameter)


AROUND = [
    in_place,
    through_data,
    through_numpy,
    through_a_storage,
    by_loading,
    by_swapping_with_an_average,
    by_setting,
    by_foreach,
    by_another_optimizer,
    by_a_step_without_the_hook,
    by_a_vector,
    by_initializing,
]
FUSED = partial(torch.optim.SGD, fused=True)


@pytest.mark.parametrize("then_a_step", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize("way", AROUND, ids=lambda way: way.__name__)
def test_what_is_written_around_the_fence_is_never_in_a_file(
    copier: Copier, way: Callable[[Training], None], make: Any, then_a_step: bool
) -> None:
    training = Training(make, size=big())
    before = training.values()
    taken = training.take()
    way(training)
    copier.may_go_on.set()
    if then_a_step:
        training.step()
    if way is by_a_vector:
        # It replaces `.data`, and what was there is still there
        assert values(taken) == before
        return
    with pytest.raises(SaveFailed, match=r"[ab] was written to after save\(\), but not by a step") as told:
        values(taken)
    assert "before save()" in told.value.fix

    training.step()
    later = copier.later
    before = training.values()
    taken = training.take()
    way(training)
    assert values(taken) == before
    assert copier.later == later, "whoever has written once may write again"


@pytest.mark.parametrize("way", [in_place, through_data, through_numpy, by_loading], ids=lambda w: w.__name__)
def test_what_is_written_around_the_fence_when_all_is_copied_is_no_harm(
    copier: Copier, way: Callable[[Training], None]
) -> None:
    copier.may_go_on.set()
    training = Training(size=big())
    before = training.values()
    taken = training.take()
    training.step()
    way(training)

    assert values(taken) == before


def test_a_write_while_its_tensor_is_being_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(size=big())

    def copy(copies: Any) -> None:
        # The copy has most of the old values when the write comes.
        half = big() - 3
        for copy in copies:
            copy.view[:half].copy_(copy.source[:half])
        through_data(training)
        for copy in copies:
            copy.view[half:].copy_(copy.source[half:])

    monkeypatch.setattr(snapshot, "_copy", copy)
    taken = training.take()

    with pytest.raises(SaveFailed, match="was written to"):
        values(taken)


def test_a_step_in_a_captured_graph_is_not_waited_for_and_nothing_is_guarded_again(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(size=big())
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        training.step()
    training.step()
    before = training.values()
    taken = training.take()
    by_a_step_without_the_hook(training)

    assert values(taken) == before
    assert (copier.at_once, copier.later) == (2, 0)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
def test_an_error_of_the_copy_is_reported_and_the_fence_opens(
    copier: Copier, error: type[BaseException]
) -> None:
    training = Training(size=big())
    copier.error = error("lost")
    taken = training.take()
    copier.may_go_on.set()

    for _ in range(2):
        with pytest.raises(SaveFailed, match=r"could not be copied.*lost"):
            taken.tensors("file")
    training.step()
    copier.error = None
    assert values(training.take()) == training.values()


def test_a_step_does_not_wait_for_a_copy_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(size=big())
    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", _no_memory)
        with pytest.raises(MemoryError):
            training.take()

    training.step()
    assert values(training.take()) == training.values()


def test_a_step_that_waits_continues_when_the_copy_fails(copier: Copier) -> None:
    training = Training(size=big())
    copier.error = RuntimeError("lost")
    training.take()
    assert copier.has_begun.wait(20)
    stepping = threading.Thread(target=training.step)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()

    copier.may_go_on.set()
    stepping.join(20)
    assert not stepping.is_alive()


def test_an_image_waits_for_the_one_before_it_whatever_has_become_of_its_file(copier: Copier) -> None:
    training = Training(size=big())
    first = training.take()
    taken: list[Snapshot] = []
    second = threading.Thread(target=lambda: taken.append(training.take()))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "both would copy into the same memory"
    before = training.values()

    copier.may_go_on.set()
    second.join(20)
    del first
    through_data(training)
    assert values(taken[0]) == before


def test_a_fence_is_not_opened_by_the_image_before(copier: Copier) -> None:
    training = Training(size=big())
    copier.may_go_on.set()
    training.take()
    training.step()
    copier.may_go_on.clear()
    copier.has_begun.clear()
    before = training.values()
    taken = training.take()
    assert copier.has_begun.wait(20)
    stepping = threading.Thread(target=training.step)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    copier.may_go_on.set()
    stepping.join(20)

    assert values(taken) == before


def sizes() -> list[int]:
    """Return the sizes of the images that are in memory."""
    gc.collect()
    return [len(found) for found in host_memory._maps]


@pytest.fixture
def _alone() -> Iterator[None]:
    """No image of another test is in memory."""
    host_memory._maps.clear()
    yield
    host_memory._maps.clear()


def places(taken: Snapshot) -> list[int]:
    return [tensor.data_ptr() for tensor in taken.tensors("file").values()]


@pytest.mark.usefixtures("_alone")
def test_every_image_is_taken_into_the_same_memory() -> None:
    training = Training(size=1 << 18)
    first = places(training.take())

    for _ in range(3):
        training.step()
        taken = training.take()
        assert places(taken) == first
        assert values(taken) == training.values()

    state = sum(parameter.nbytes for parameter in training.parameters)
    assert len(sizes()) == 1
    assert sizes()[0] <= 1.02 * state


@pytest.mark.usefixtures("_alone")
def test_an_image_grows_with_the_state_and_the_old_memory_is_given_back_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"a": torch.ones(1 << 18)}
    image = Image()
    take(image, state)
    most: list[int] = []
    touch = host_memory.HostMemory.touch

    def touched(new: host_memory.HostMemory) -> None:
        most.append(sum(sizes()))
        touch(new)

    monkeypatch.setattr(host_memory.HostMemory, "touch", touched)
    state["b"] = torch.full((1 << 18,), 2.0)

    found = take(image, state)

    assert (found["a"][0], found["b"][0]) == (1, 2)
    total = sum(tensor.nbytes for tensor in state.values())
    assert max(most) <= 1.02 * total
    assert sum(sizes()) <= 1.02 * total


@pytest.mark.usefixtures("_alone")
def test_an_image_of_less_stays_where_it_is() -> None:
    image, state = Image(), {"a": torch.ones(5000), "b": torch.zeros(5000)}
    take(image, state)
    before = sizes()
    del state["a"]

    assert take(image, state)["b"].tolist() == [0.0] * 5000
    assert sizes() == before


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "order", "more", "fewer"])
def test_an_image_is_laid_out_again_when_the_tensors_are_others(change: str) -> None:
    image, state = Image(), {"a": torch.arange(4.0), "b": torch.arange(6.0)}
    take(image, state)
    changed = {
        "shape": {"a": torch.arange(4.0).reshape(2, 2), "b": torch.arange(6.0)},
        "dtype": {"a": torch.arange(4), "b": torch.arange(6.0)},
        "name": {"a": torch.arange(4.0), "c": torch.arange(6.0)},
        "order": {"b": torch.arange(6.0), "a": torch.arange(4.0)},
        "more": {**state, "c": torch.ones(3)},
        "fewer": {"b": torch.arange(6.0)},
    }[change]

    found = take(image, changed)

    assert [*found] == [slot.name for slot in tensor_file.layout(changed, {}).slots]
    assert all(tensor_file.is_equal(found[name], tensor) for name, tensor in changed.items())
    assert lists(take(image, state)) == lists(state)


@pytest.mark.usefixtures("_alone")
def test_memory_that_was_reserved_is_the_images() -> None:
    image, state = Image(), {"a": torch.ones(1 << 18)}

    image.reserve((1 << 20) + 4096)
    (reserved,) = host_memory._maps
    found = take(image, state)

    assert [*host_memory._maps] == [reserved]
    assert tensor_file.is_equal(found["a"], state["a"])
    assert len(sizes()) == 1
    assert sizes()[0] <= 1.02 * (1 << 20)
    image.reserve(1 << 20)
    take(image, state)
    assert [*host_memory._maps] == [reserved], "there was memory enough"


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux")
def test_an_image_asks_for_huge_pages_and_does_without() -> None:
    asked: list[int] = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "no huge pages here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mmap, "mmap", Refusing)
        memory = host_memory.HostMemory(5 * mmap.PAGESIZE)

    memory.touch()
    assert asked.count(mmap.MADV_HUGEPAGE) == 1
    assert bytes(memory.bytes) == bytes(5 * mmap.PAGESIZE)


@pytest.mark.usefixtures("_alone")
def test_an_image_waits_for_the_memory_that_is_being_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    image, state, go = Image(), {"a": torch.ones(9)}, threading.Event()
    touch = host_memory.HostMemory.touch
    monkeypatch.setattr(host_memory.HostMemory, "touch", lambda self: (go.wait(20), touch(self))[1])
    image.reserve(9000)
    found: list[dict[str, Tensor]] = []
    taking = threading.Thread(target=lambda: found.append(take(image, state)))
    taking.start()
    taking.join(0.05)
    assert taking.is_alive()
    go.set()
    taking.join(20)

    assert found[0]["a"].tolist() == [1.0] * 9
    assert len(host_memory._maps) == 1


@pytest.mark.usefixtures("_alone")
def test_a_closed_image_has_given_back_memory_hooks_and_threads() -> None:
    before = {*threading.enumerate()}
    training = Training(size=big())
    training.image.reserve(1 << 21)
    training.step()
    values(training.take())
    (found,) = host_memory._maps
    kept = weakref.ref(found)
    del found
    assert training.optimizer._optimizer_step_pre_hooks

    training.image.close()
    _join("resumable-image")
    gc.collect()

    assert kept() is None
    assert not training.optimizer._optimizer_step_pre_hooks
    assert {*threading.enumerate()} == before


def test_an_image_that_is_closed_while_it_is_taken_stays_whole(copier: Copier) -> None:
    training = Training(size=big())
    before = training.values()
    taken = training.take()
    closing = threading.Thread(target=training.image.close)
    closing.start()
    closing.join(0.05)
    copier.may_go_on.set()
    closing.join(20)
    training.step()

    assert values(taken) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_takes_its_own_image_and_leaves_the_parents_alone(copier: Copier) -> None:
    training = Training(size=big())
    before = training.values()
    taken = training.take()

    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            copier.may_go_on.set()
            training.step()
            mine = training.values()
            ok = values(training.take()) == mine != before
            training.image.close()
            gc.collect()
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    copier.may_go_on.set()
    assert values(taken) == before


class Freezer:
    """A frozen group, and how often it is copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.image = Image()
        self.memos: tuple[codec.Memo, codec.Memo] = ({}, {})
        self.small, self.large = torch.ones(7), torch.ones(big())
        self.copies = 0
        monkeypatch.setattr(snapshot, "_copy", self._copy)

    def _copy(self, copies: Any) -> None:
        self.copies += sum(copy.path == FROZEN for copy in copies)
        _real_copy(copies)

    def take(self, **others: Tensor) -> dict[str, Any]:
        mine = groups({"small": self.small, "large": self.large}, FROZEN, self.memos[0])
        theirs = groups(others, memo=self.memos[1]) if others else {}
        return lists(self.image.take({**theirs, **mine}).tensors(FROZEN))

    def values(self) -> dict[str, Any]:
        return {"small": self.small.tolist(), "large": self.large.tolist()}


def test_what_is_frozen_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    freezer, other = Freezer(monkeypatch), torch.ones(3)
    for _ in range(4):
        assert freezer.take(other=other.add_(1)) == freezer.values()

    assert freezer.copies == 1


@pytest.mark.parametrize("which", ["small", "large"])
@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.data[-1:].fill_(3),
        lambda tensor: tensor.numpy().__setitem__(2, 9.0),
        lambda tensor: tensor.set_(tensor + 2),
        lambda tensor: setattr(tensor, "data", tensor * 5),
    ],
    ids=["in place", "data", "numpy", "set", "replaced data"],
)
def test_a_write_to_what_is_frozen_is_in_the_next_image(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Tensor], object], which: str
) -> None:
    freezer = Freezer(monkeypatch)
    freezer.take()
    freezer.take()
    write(getattr(freezer, which))

    for _ in range(2):
        assert freezer.take() == freezer.values()
    assert freezer.copies == 2


def test_what_is_frozen_is_copied_again_into_another_place(monkeypatch: pytest.MonkeyPatch) -> None:
    freezer = Freezer(monkeypatch)
    freezer.take()

    for number, size in enumerate((9999, 99999, 5000), 2):
        assert freezer.take(more=torch.zeros(size)) == freezer.values()
        assert freezer.copies == number


def test_what_is_frozen_is_copied_again_after_an_image_that_was_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freezer = Freezer(monkeypatch)
    with monkeypatch.context() as failing:
        failing.setattr(snapshot, "_copy", _no_memory)
        with pytest.raises(MemoryError):
            freezer.take()

    assert freezer.take() == freezer.values()


def _no_memory(copies: object) -> None:
    raise MemoryError


def test_what_is_frozen_is_copied_again_after_a_copy_that_failed(copier: Copier) -> None:
    frozen = nn.Parameter(torch.ones(big()))
    optimizer = torch.optim.SGD([frozen], lr=0.0)
    image = Image([optimizer], worth_a_fence=0)
    frozen.grad = torch.zeros(big())
    optimizer.step()
    copier.error = RuntimeError("lost")
    copier.may_go_on.set()
    mine = groups({"frozen": frozen}, FROZEN)
    with pytest.raises(SaveFailed, match=r"could not be copied.*lost"):
        image.take(mine).tensors(FROZEN)
    copier.error = None

    assert image.take(mine).tensors(FROZEN)["frozen"].tolist() == frozen.tolist()


def test_what_is_frozen_is_copied_again_after_an_image_of_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    freezer, other = Freezer(monkeypatch), torch.ones(3)
    freezer.take(other=other)
    frozen = groups({"small": freezer.small, "large": freezer.large}, FROZEN, freezer.memos[0])
    both = {**groups({"other": other}, memo=freezer.memos[1]), **frozen}

    taken = freezer.image.take(both, {"file": (0, freezer.image.sizes(both)["file"])})

    assert taken.paths() == ["file"]
    freezer.small.add_(1)
    for _ in range(2):
        assert freezer.take(other=other.add_(1)) == freezer.values()
    assert freezer.copies == 2


def test_what_changes_right_after_save_is_not_in_the_file(run_dir: Path) -> None:
    for resume in range(3):
        model = nn.Linear(50, 50)
        optimizer = torch.optim.Adam(model.parameters())
        extra = {"t": torch.zeros(9)}
        with RunState.load(run_dir, model=model, optimizer=optimizer, extra={"it": extra}) as state:
            assert extra["t"].tolist() == [float(resume)] * 9
            model(torch.ones(1, 50)).sum().backward()
            optimizer.step()
            extra["t"] += 1
            expected = [p.detach().clone() for p in model.parameters()]
            handle = state.save()
            for tensor in (*model.parameters(), *optimizer.state[model.weight].values()):
                tensor.data.fill_(7)
            handle.wait()
            extra["t"] += 7

            state.restore("newest")

            assert all(torch.equal(*pair) for pair in zip(expected, model.parameters(), strict=True))
            assert (optimizer.state[model.weight]["exp_avg"] != 7).all()
