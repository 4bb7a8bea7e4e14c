"""Files that several processes write together are those that one process would write."""

from __future__ import annotations

import contextlib
import gc
import mmap
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from resumable import SaveFailed
from resumable.files import block_queue, codec, large_files, tensor_file
from resumable.files.codec import Encoded
from resumable.processes import write_shares
from resumable.processes.write_shares import Range
from resumable.saving import host_memory, image_file, snapshot
from resumable.saving.gpu_copies import Copy
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot

PAGE = mmap.PAGESIZE
MODEL, OPTIMIZER, FROZEN = "model.safetensors", "optimizer.safetensors", "model-frozen.safetensors"


@contextlib.contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Let tensors of some kilobytes lie in several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_files, "BLOCK", size)
        patch.setattr(image_file, "_SMALL", 1000)
        yield


@pytest.fixture
def small() -> Iterator[None]:
    """Have blocks of one page."""
    with blocks_of(PAGE):
        yield


# The plan


def load(mine: Mapping[str, Range]) -> int:
    return sum(end - begin for begin, end in mine.values())


NAMES = st.sampled_from([f"{letter}.safetensors" for letter in "abcdefgh"])
SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 400), st.sampled_from([50, 150, 200, 900]))
PLANS = given(st.dictionaries(NAMES, SIZES), st.integers(1, 9), st.frozensets(NAMES))


@PLANS
@example({"a": 900, "b": 350}, 3, frozenset())
@example({"a": 150, "b": 160, "c": 900}, 2, frozenset())
@example({"a": 3000, "b": 900, "c": 900}, 3, frozenset("a"))
@example({"a": 1000, "b": 900, "c": 800, "d": 200}, 2, frozenset("abc"))
def test_every_byte_has_one_writer_and_every_share_is_of_whole_blocks(
    sizes: dict[str, int], count: int, whole: frozenset[str]
) -> None:
    with blocks_of(100):
        found = write_shares.plan(sizes, count, whole)

    assert len(found) == count
    for path, size in sizes.items():
        ranges = [mine[path] for mine in found if path in mine]
        assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == size
        assert all(begin % 100 == 0 and (begin < end or size == 0) for begin, end in ranges)
        assert len(ranges) == 1 or (path not in whole and size >= 200)
    assert {path for mine in found for path in mine} == {*sizes}


@PLANS
@example({"a": 3000, "b": 900, "c": 900}, 3, frozenset("a"))
def test_all_have_about_as_much_to_write_and_the_first_one_not_more(
    sizes: dict[str, int], count: int, whole: frozenset[str]
) -> None:
    with blocks_of(100):
        found = write_shares.plan(sizes, count, whole)

    loads = [*map(load, found)]
    in_one = {path: size for path, size in sizes.items() if path in whole or size < 200}
    assert max(loads) - min(loads) < 200 + max(in_one.values(), default=0)
    assert all(
        mine < min(loads) + 200 for mine, given in zip(loads, found, strict=True) if given.keys() - in_one
    )
    if not in_one:
        assert all(abs(mine - sum(loads) / count) < 100 for mine in loads)
        assert loads[0] <= sum(loads) / count


@given(st.dictionaries(NAMES, SIZES), st.integers(1, 9), st.frozensets(NAMES), st.randoms())
def test_every_process_finds_the_same_plan(
    sizes: dict[str, int], count: int, whole: frozenset[str], dice: random.Random
) -> None:
    items = [*sizes.items()]
    dice.shuffle(items)
    with blocks_of(100):
        assert write_shares.plan(sizes, count, whole) == write_shares.plan(dict(items), count, sorted(whole))


def test_a_writer_alone_writes_everything() -> None:
    sizes = {"large": 5 << 24, "frozen": 3 << 24, "small": 9, "empty": 0}

    assert write_shares.plan(sizes, 1, ["frozen"]) == [{path: (0, size) for path, size in sizes.items()}]
    assert write_shares.plan({}, 3) == [{}, {}, {}]
    with pytest.raises(ValueError, match="0 processes"):
        write_shares.plan(sizes, 0)


# The files


def odd_bools(count: int) -> Tensor:
    """Return bools in memory that nobody has set: any byte but 0 is True."""
    return torch.arange(count, dtype=torch.int32).to(torch.uint8).view(torch.bool)


def state() -> dict[str, dict[str, Tensor]]:
    """Return tensors of every kind, by file; the larger ones straddle the edges of blocks."""
    torch.manual_seed(3)
    tied = torch.randn(1500)
    model = {
        "weight": torch.randn(90, 70),
        "half": torch.randn(7001).to(torch.bfloat16),
        "bool": odd_bools(9001),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(61, 67).t(),
        "channels last": torch.randn(3, 5, 17, 19).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 50).expand(60, 50),
        "sliced": torch.randn(4, 3000)[:, ::2],
        "wide": torch.randn(1500, dtype=torch.complex128),
        "complex": torch.randn(2001, dtype=torch.complex64),
        "conjugate": torch.randn(1501, dtype=torch.complex64).conj(),
        "tied": tied,
        "tied too": tied,
        "eighth": torch.randn(5003).to(torch.float8_e4m3fn),
        **{f"small {number}": torch.randn(number % 40) for number in range(200)},
    }
    optimizer = {"exp_avg": torch.randn(8000), "steps": torch.arange(2000), "odd": torch.randn(70, 71).t()}
    return {MODEL: model, OPTIMIZER: optimizer, FROZEN: {"backbone": torch.randn(6000)}}


def encoded(
    tensors: Mapping[str, Mapping[str, Any]], memos: dict[str, codec.Memo] | None = None
) -> dict[str, Encoded]:
    memos = {} if memos is None else memos
    return {path: codec.encode(dict(them), memo=memos.setdefault(path, {})) for path, them in tensors.items()}


class Made(NamedTuple):
    """A file as it came to be."""

    content: bytes
    digest: str


def by_one(groups: Mapping[str, Encoded], folder: Path) -> dict[str, Made]:
    """Return the files that one process writes."""
    folder.mkdir()
    contents = Image().take(groups).contents({})
    written = block_queue.write(folder, contents)
    return {path: Made((folder / path).read_bytes(), file.digest) for path, file in written.items()}


def by_several(takens: Sequence[Snapshot], folder: Path, way: large_files.Way = "paced") -> dict[str, Made]:
    """Return the files that several processes write, each what it has taken."""
    folder.mkdir()
    digests: dict[str, list[bytes]] = {}
    for taken in takens:
        contents = taken.contents({})
        for path, content in contents.items():
            if content.is_share and path not in digests:
                large_files.create(folder / path, content.size)
        for path, written in block_queue.write(folder, contents, way).items():
            digests.setdefault(path, []).extend(written.blocks)
    return {path: Made((folder / path).read_bytes(), large_files.fold(digests[path])) for path in digests}


def take_shares(groups: Sequence[Mapping[str, Encoded]], images: Sequence[Image]) -> list[Snapshot]:
    """Return what each of several processes takes of its own copy of the state."""
    takens = []
    for rank, (image, group) in enumerate(zip(images, groups, strict=True)):
        plan = write_shares.plan(image.sizes(group), len(images), [FROZEN])
        takens.append(image.take(group, plan[rank]))
    return takens


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("worth_a_fence", [0, 1 << 30])
@pytest.mark.quick(3)
def test_several_write_the_files_that_one_writes(tmp_path: Path, count: int, worth_a_fence: int) -> None:
    expected = by_one(encoded(state()), tmp_path / "one")
    images = [Image(worth_a_fence=worth_a_fence) for _ in range(count)]
    memos: list[dict[str, codec.Memo]] = [{} for _ in images]

    for attempt in range(2):
        takens = take_shares([encoded(state(), memo) for memo in memos], images)
        assert by_several(takens, tmp_path / f"{attempt}") == expected


@pytest.mark.heavy
@pytest.mark.parametrize("way", ["paced", "direct", "plain"])
def test_several_write_the_files_that_one_writes_in_blocks_of_true_size(
    tmp_path: Path, way: large_files.Way
) -> None:
    tensors = {
        MODEL: {"a": torch.randn(5 << 20).to(torch.bfloat16), "b": torch.randn(7, (1 << 20) + 1).t()},
        OPTIMIZER: {"c": torch.arange((63 << 17) + 3), "step": torch.tensor(7.0)},
    }
    groups = encoded(tensors)
    expected = by_one(groups, tmp_path / "one")
    gc.collect()
    host_memory._maps.clear()

    takens = take_shares([groups] * 3, [Image() for _ in range(3)])

    assert [len(taken.paths()) for taken in takens] == [1, 2, 1]
    total = sum(tensor.nbytes for them in tensors.values() for tensor in them.values())
    assert sum(map(len, host_memory._maps)) <= 1.02 * total
    try:
        assert by_several(takens, tmp_path / "three", way) == expected
    except OSError:
        if way != "direct":
            raise
        pytest.skip("this disk cannot be written past the page cache")


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.complex128]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    lambda tensor: tensor[..., ::2],
    lambda tensor: tensor.unsqueeze(0).transpose(0, 1),
    lambda tensor: tensor.expand(3, *tensor.shape),
]


@st.composite
def random_tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    tensors = {}
    for number in range(draw(st.integers(1, 8))):
        shape = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        content = torch.arange(max(1, torch.Size(shape).numel())) * 7919 % 251
        plain = content[: torch.Size(shape).numel()].to(dtype).reshape(shape)
        tensors[f"t{number}"] = draw(st.sampled_from(LAYOUTS))(plain)
    return tensors


@settings(deadline=None, max_examples=80)
@given(random_tensors(), st.integers(1, 5), st.sampled_from([16, 64, 1024, PAGE]))
def test_whatever_the_tensors_the_shares_make_the_file(
    tensors: dict[str, Tensor], count: int, block: int
) -> None:
    group = codec.encode(tensors)
    with blocks_of(block):
        sizes = Image().sizes({MODEL: group})
        takens = [Image().take({MODEL: group}, mine) for mine in write_shares.plan(sizes, count)]
        contents = [content for taken in takens for content in taken.contents({}).values()]
        found = b"".join(bytes(content.data) for content in contents)
        held = [taken.tensors(MODEL) for taken in takens if taken.paths()]

    assert sizes == {MODEL: len(found)}
    assert found == bytes(tensor_file.to_safetensors(group.tensors, group.aliases))
    assert all(tensor_file.is_equal(them[name], group.tensors[name]) for them in held for name in them)


@pytest.mark.usefixtures("small")
def test_a_header_of_several_blocks_is_shared_too(tmp_path: Path) -> None:
    groups = encoded({MODEL: {f"{number:0300}": torch.tensor(number) for number in range(60)}})

    takens = take_shares([groups] * 4, [Image() for _ in range(4)])

    assert [*takens[0].tensors(MODEL)] == []
    assert by_several(takens, tmp_path / "four") == by_one(groups, tmp_path / "one")


# The image of a share


def cut(sizes: Mapping[str, int], begin: int, end: int | None = None) -> dict[str, Range]:
    """Return a share of each file, in blocks."""
    return {
        path: (begin * large_files.BLOCK, size if end is None else end * large_files.BLOCK)
        for path, size in sizes.items()
    }


@pytest.mark.usefixtures("small")
def test_a_share_has_the_tensors_that_lie_in_it_as_a_whole() -> None:
    tensors = {"a": torch.arange(2000.0), "b": torch.arange(30.0), "none": torch.zeros(3, 0)}
    group = codec.encode({**tensors, "c": torch.ones(1000)})
    image = Image()
    sizes = image.sizes({MODEL: group})

    first = image.take({MODEL: group}, cut(sizes, 0, 1)).tensors(MODEL)
    last = image.take({MODEL: group}, cut(sizes, 1)).tensors(MODEL)

    assert [*first] == []
    assert [*last] == ["b", "none", "c"]
    assert all(tensor_file.is_equal(last[name], group.tensors[name]) for name in last)


def test_what_is_not_mine_is_not_taken() -> None:
    groups = encoded({MODEL: {"a": torch.ones(9)}, OPTIMIZER: {"b": torch.ones(9)}})
    image = Image()
    sizes = image.sizes(groups)

    taken = image.take(groups, {OPTIMIZER: (0, sizes[OPTIMIZER])})

    assert taken.paths() == [OPTIMIZER]
    assert taken.tensors(OPTIMIZER)["b"].tolist() == [1.0] * 9
    with pytest.raises(KeyError):
        taken.tensors(MODEL)
    assert image.take(groups, {}).paths() == []
    with pytest.raises(KeyError):
        image.take(groups, {"other.safetensors": (0, 9)})
    assert image.take(groups).tensors(MODEL)["a"].tolist() == [1.0] * 9


@pytest.mark.usefixtures("small")
def test_another_share_of_the_same_tensors_is_laid_out_again(tmp_path: Path) -> None:
    groups = encoded(state())
    expected = by_one(groups, tmp_path / "one")
    image = Image()
    sizes = image.sizes(groups)

    for number, (begin, end) in enumerate([(0, 2), (2, 3), (3, None), (0, None), (1, 2)]):
        mine = cut({MODEL: sizes[MODEL]}, begin, end)
        (content,) = image.take(groups, mine).contents({}).values()
        data = expected[MODEL].content[slice(*mine[MODEL])]
        assert bytes(content.data) == data, number
        assert (content.begin, content.size) == (mine[MODEL][0], sizes[MODEL])


class Copier:
    """Counts the copies that the image makes, and lets those behind the fence wait."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.at_once: list[tuple[str, int]] = []
        self.later: list[tuple[str, int]] = []

    def copy(self, copies: Sequence[Copy]) -> None:
        is_later = threading.current_thread().name == "resumable-image"
        if is_later:
            assert self.may_go_on.wait(20)
        (self.later if is_later else self.at_once).extend((c.name, c.view.numel()) for c in copies)
        _real_copy(copies)


_real_copy = snapshot._copy


@pytest.fixture
def copier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copier]:
    """What copies behind the fence, and waits until it may continue."""
    held = Copier()
    monkeypatch.setattr(snapshot, "_copy", held.copy)
    yield held
    held.may_go_on.set()
    for thread in threading.enumerate():
        if thread.name == "resumable-image":
            thread.join(20)


class Training:
    """A model and its optimizer, of which each process has a copy."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(40))
        self.model(torch.ones(2, 8, 6, 6))
        self.model.to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.image = Image([self.optimizer], worth_a_fence=0)
        self.memos: dict[str, codec.Memo] = {}
        self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 8, 6, 6)).square().sum().backward()
        self.optimizer.step()

    def groups(self) -> dict[str, Encoded]:
        found = self.optimizer.state_dict()["state"].items()
        moments = {f"{index}.{name}": value for index, values in found for name, value in values.items()}
        return encoded({MODEL: self.model.state_dict(), OPTIMIZER: moments}, self.memos)

    def disturb(self) -> None:
        """Take a step, and write to all that no step writes to."""
        self.step()
        for buffer in self.model.buffers():
            buffer.fill_(7)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_shares_do_not_follow_the_training(tmp_path: Path, count: int) -> None:
    replicas = [Training() for _ in range(count)]
    for save in range(3):
        expected = by_one(replicas[0].groups(), tmp_path / f"one {save}")
        takens = take_shares([one.groups() for one in replicas], [one.image for one in replicas])
        for one in replicas:
            one.disturb()

        assert by_several(takens, tmp_path / f"several {save}") == expected


class Halved:
    """A parameter of which each of two processes has one half to write."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD) -> None:
        self.weight = nn.Parameter(torch.arange(float(PAGE)))
        self.optimizer = make([self.weight], lr=1.0)
        self.image = Image([self.optimizer], worth_a_fence=0)
        self.step()

    def step(self) -> None:
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer.step()

    def take(self, half: int) -> Snapshot:
        groups = {MODEL: codec.encode({"weight": self.weight}, memo={})}
        (size,) = self.image.sizes(groups).values()
        return self.image.take(groups, {MODEL: (0, PAGE) if half == 0 else (PAGE, size)})

    def bytes(self, half: int) -> bytes:
        whole = tensor_file.to_safetensors({"weight": self.weight}, {})
        return bytes(whole[:PAGE] if half == 0 else whole[PAGE:])


def content_of(taken: Snapshot) -> bytes:
    """Return the bytes of a share when they are there."""
    (content,) = taken.contents({}).values()
    return b"".join(bytes(content.block(at)) for at in range(0, content.data.nbytes, large_files.BLOCK))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("half", [0, 1])
def test_a_step_waits_until_a_part_of_what_it_changes_is_copied(copier: Copier, half: int) -> None:
    halved = Halved()
    before = halved.bytes(half)
    taken = halved.take(half)
    stepping = threading.Thread(target=halved.step)
    stepping.start()
    stepping.join(0.05)
    assert stepping.is_alive()
    assert halved.bytes(half) == before

    copier.may_go_on.set()
    stepping.join(20)
    assert halved.bytes(half) != before == content_of(taken)
    assert copier.at_once == []
    header = len(tensor_file.layout({"weight": halved.weight}, {}).header)
    assert copier.later == [("weight", (PAGE - header if half == 0 else 3 * PAGE + header) // 4)]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("then_a_step", [False, True])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_what_is_written_around_the_fence_is_never_in_a_share(
    copier: Copier, half: int, then_a_step: bool, make: Any
) -> None:
    halved = Halved(make)
    taken = halved.take(half)
    halved.weight.data.add_(1)
    copier.may_go_on.set()
    if then_a_step:
        halved.step()

    with pytest.raises(SaveFailed, match="weight was written to"):
        content_of(taken)
    halved.step()
    before = halved.bytes(half)
    taken = halved.take(half)
    halved.weight.data.add_(1)
    assert content_of(taken) == before


class Full(Tensor):
    """A tensor on a device that has no room for a second one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            raise torch.OutOfMemoryError("no room")
        if func is Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(Tensor).clone()
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_part_comes_over_from_a_device_that_has_no_room_for_a_copy() -> None:
    tensor = torch.arange(60.0).reshape(6, 10).t()
    view = torch.zeros(23)

    made = Copy("file", "name", 0, view, tensor.as_subclass(Full), part=(17, 40))

    assert made.source.tolist() == tensor.flatten()[17:40].tolist()
    assert not made.is_guarded({tensor.data_ptr()})
