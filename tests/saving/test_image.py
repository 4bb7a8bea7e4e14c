"""The image of the tensors is what they were when it was taken, whoever writes to them since."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from fenced import Training, values
from torch import Tensor, nn

from resumable import SaveFailed
from resumable.files import codec, tensor_file
from resumable.files.codec import Encoded
from resumable.saving import image_file, snapshot
from resumable.saving.image import Image

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
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


def test_an_uninitialized_bool_is_a_bool_in_the_image() -> None:
    odd = torch.tensor([0, 1, 2, 255], dtype=torch.uint8).view(torch.bool)

    taken = take(Image(), {"odd": odd})["odd"]

    assert taken.view(torch.uint8).tolist() == [0, 1, 1, 1]


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


Write = Callable[[Training], object]


def to_each(write: Callable[[nn.Parameter], object]) -> Write:
    return lambda training: [write(parameter) for parameter in training.parameters]


AROUND: dict[str, Write] = {
    "in place": to_each(lambda p: p.detach().add_(1)),
    "data": to_each(lambda p: p.data.fill_(7)),
    "numpy": to_each(lambda p: p.detach().numpy().fill(7)),
    "storage": to_each(lambda p: p.untyped_storage().fill_(7)),
    "loading": to_each(lambda p: nn.ParameterList([p]).load_state_dict({"0": p.detach() + 1})),
    "set": to_each(torch.no_grad()(lambda p: p.set_(torch.full_like(p, 7.0)))),
    "foreach": to_each(lambda p: torch._foreach_mul_([p.detach()], 3.0)),
    "another optimizer": to_each(lambda p: torch.optim.SGD([p], lr=1.0).step()),
    "a step without the hook": lambda t: type(t.optimizer).step.__wrapped__(t.optimizer),
    "replaced data": to_each(lambda p: nn.utils.vector_to_parameters(p.detach().flatten() + 1, [p])),
}


@pytest.mark.parametrize("then_a_step", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_what_is_written_around_it_is_in_no_file(copier: Copier, name: str, then_a_step: bool) -> None:
    way = AROUND[name]
    training = Training(partial(torch.optim.SGD, fused=then_a_step), size=big())
    before = training.values()
    taken = training.take()
    way(training)
    copier.may_go_on.set()
    if then_a_step:
        training.step()
    if name == "replaced data":
        # What was there is still there
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


def test_a_write_while_its_tensor_is_being_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(size=big())

    def copy(copies: Any) -> None:
        # The copy has most of the old values when the write comes.
        half = big() - 3
        for copy in copies:
            copy.view[:half].copy_(copy.source[:half])
        AROUND["data"](training)
        for copy in copies:
            copy.view[half:].copy_(copy.source[half:])

    monkeypatch.setattr(snapshot, "_copy", copy)
    taken = training.take()

    with pytest.raises(SaveFailed, match="was written to"):
        values(taken)


def test_a_step_does_not_wait_for_a_copy_that_could_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(size=big())
    with monkeypatch.context() as failing:
        failing.setattr(threading.Thread, "start", _no_memory)
        with pytest.raises(MemoryError):
            training.take()

    training.step()
    assert values(training.take()) == training.values()


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
