"""The image of the tensors is what they were when it was taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from resumable import RunState, codec, tensorfile
from resumable.image import Image

TENSORS = {
    "plain": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "sliced": torch.arange(8.0)[::2],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "complex": torch.tensor([1 + 2j]),
    "bool": torch.tensor([True, False]),
    "eighth": torch.tensor([1.0, -0.0]).to(torch.float8_e4m3fn),
}


def take(image: Image, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what an image has of some tensors."""
    return image.take({"file": codec.encode(tensors, memo={})}).tensors("file")


@pytest.mark.parametrize("name", TENSORS)
def test_an_image_has_the_same_bits_in_memory_of_its_own(name: str) -> None:
    live = TENSORS[name].clone(memory_format=torch.preserve_format)
    taken = take(Image(), {name: live})[name]

    assert (taken.dtype, taken.shape, taken.is_contiguous()) == (live.dtype, live.shape, True)
    assert tensorfile.is_equal(taken, live)
    assert not live.numel() or taken.data_ptr() != live.data_ptr()


def test_an_image_does_not_follow_the_training() -> None:
    live = torch.ones(3, requires_grad=True)
    taken = take(Image(), {"live": live})["live"]
    live.data.add_(1)

    assert taken.tolist() == [1.0, 1.0, 1.0]


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
