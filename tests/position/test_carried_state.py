"""What a loop carries along in tuples, containers, losses, objects and data, and no checkpoint has."""

from __future__ import annotations

import random
import warnings
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

from resumable import ResumableWarning, RunState

Script = Callable[["Objects", RunState], None]
Pair = namedtuple("Pair", "mean count")


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.scale, self.epoch, self.seen = 0.1, 0, 0
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index + self.epoch)) * self.scale

    def harder(self) -> None:
        self.scale = min(0.5, self.scale * 1.5)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class KnowsItself(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.scale = saved["scale"]


class Weighted(Sampler[int]):
    def __init__(self) -> None:
        self.weights = torch.ones(6)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.weights, 6, True).tolist())


class Objects:
    """A model, what trains it, and what it is trained with."""

    def __init__(self, script: Script) -> None:
        of_script = getattr(script, "dataset", Numbers)
        self.data: Any = of_script()
        self.labels = torch.zeros(6, 1)
        if script is labels_that_are_replaced:
            self.data = TensorDataset(torch.rand(6, 1), self.labels)
        if script is data_that_are_added:
            self.data = [*torch.rand(6, 1)]
        self.sampler: Any = {
            weights_of_a_sampler: Weighted,
            weights_of_a_sampler_of_torch: lambda: WeightedRandomSampler(torch.ones(6).tolist(), 6),
        }.get(script, lambda: None)()
        self.loader = DataLoader(self.data, batch_size=2, sampler=self.sampler)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)

    def train(self, loss: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def said(run_dir: Path, script: Script, **given: Any) -> list[str]:
    objects = Objects(script)
    loader = None if script in WITHOUT_LOADER else objects.loader
    parts = {"model": objects.model, "optimizer": objects.optimizer, "loader": loader}
    with (
        warnings.catch_warnings(record=True) as caught,
        RunState.load(run_dir, progress=False, **parts, **given) as state,
    ):
        warnings.simplefilter("always")
        script(objects, state)
    return [str(one.message) for one in caught if issubclass(one.category, ResumableWarning)]


def a_hidden_state(found: Objects, state: RunState) -> None:
    hidden = (torch.zeros(1), torch.zeros(1))
    for _ in state.steps(4):
        hidden = tuple(one.detach() for one in hidden)
        out = torch.tanh(found.model(hidden[0]))
        found.train(out.sum())
        hidden = out, hidden[1]
        state.save()


def a_tuple_of_numbers(found: Objects, state: RunState) -> None:
    mean = (0.0, 1)
    for _ in state.epochs(3):
        for batch in state.batches():
            loss = found.train(found.model(batch).square().mean() / (1 + mean[0]))
            mean = (0.9 * mean[0] + loss.item(), 1)
            state.save()


def a_default_dict(found: Objects, state: RunState) -> None:
    means: defaultdict[str, float] = defaultdict(float)
    for _ in state.epochs(3):
        for batch in state.batches():
            loss = found.train(found.model(batch).square().mean() / (1 + means["loss"]))
            means["loss"] = 0.9 * means["loss"] + loss.item()
            state.save()


def a_counter(found: Objects, state: RunState) -> None:
    counts: Counter[str] = Counter()
    for _ in state.epochs(3):
        for batch in state.batches():
            counts["seen"] += len(batch)
            found.train(found.model(batch).square().mean() / counts["seen"])
            state.save()


def a_list_of_tensors(found: Objects, state: RunState) -> None:
    means = [torch.zeros(1), torch.zeros(1)]
    for _ in state.epochs(3):
        for batch in state.batches():
            loss = found.train(found.model(batch).square().mean() / (1 + means[0].sum() + means[1].sum()))
            at = int(batch[0, 0] > 0)
            means[at] = 0.9 * means[at] + loss
            if state.batch == 1:
                state.save()
        # Here the loop over the epochs is the one around, which does not carry them.
        state.save()


def a_dict_of_tensors(found: Objects, state: RunState) -> None:
    means = {0: torch.zeros(1), 1: torch.zeros(1)}
    for _ in state.steps(5):
        loss = found.train(found.model(torch.ones(1)).square().sum() / (1 + means[0].sum()))
        at = int(loss > 0)
        means[1 - at] = 0.9 * means[1 - at] + loss
        state.save()


def the_last_losses(found: Objects, state: RunState) -> None:
    last = deque([torch.zeros(1)] * 3, maxlen=3)
    for _ in state.epochs(3):
        for batch in state.batches():
            loss = found.model(batch).square().mean() / (1 + torch.stack([*last]).sum())
            last.append(found.train(loss).reshape(1))
            state.save()


class Normalized:
    def __init__(self) -> None:
        self.mean = torch.zeros(1)

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean.sum())


def an_object_that_is_called(found: Objects, state: RunState) -> None:
    normalized = Normalized()
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(normalized(found.model(batch).square().mean()))
            state.save()


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center, self.margin, self.calls = torch.zeros(1), 0.1, 0
        self.mask: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        loss = (out - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * out.mean().detach()
        return loss


def a_loss_with_an_attribute(found: Objects, state: RunState) -> None:
    criterion = Centered()
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(criterion(found.model(batch)))
            state.save()


class Margin(Centered):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        return (out - self.margin).square().mean()


def a_margin_that_the_loop_raises(found: Objects, state: RunState) -> None:
    criterion = Margin()
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(criterion(found.model(batch)))
        criterion.margin += 0.1
        state.save()


def data_that_become_harder(found: Objects, state: RunState) -> None:
    data = found.data
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
        data.scale = min(0.5, data.scale * 1.5)
        state.save()


def data_that_become_harder_by_a_method(found: Objects, state: RunState) -> None:
    data = found.data
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
        data.harder()
        state.save()


def weights_of_a_sampler(found: Objects, state: RunState) -> None:
    sampler = found.sampler
    for epoch in state.epochs(3):
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
        sampler.weights = torch.arange(1.0, 7.0) * (epoch + 1)
        state.save()


def weights_of_a_sampler_of_torch(found: Objects, state: RunState) -> None:
    weights_of_a_sampler(found, state)


def labels_that_are_replaced(found: Objects, state: RunState) -> None:
    labels = found.labels
    for epoch in state.epochs(3):
        for x, y in state.batches():
            found.train((found.model(x) - y).square().mean())
        chosen = torch.rand(6) < 0.5
        labels[chosen] = epoch + 1.0
        labels[:1] += 1
        state.save()


def data_that_are_added(found: Objects, state: RunState) -> None:
    samples = found.data
    for epoch in state.epochs(3):
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
        samples.append(torch.full((1,), float(epoch)))
        state.save()


def an_order_that_is_shuffled(found: Objects, state: RunState) -> None:
    order = np.arange(6)
    for _ in state.epochs(3):
        np.random.shuffle(order)
        for at in order:
            found.train(found.model(torch.full((1,), float(at))).square().mean())
        state.save()


def a_list_that_is_shuffled(found: Objects, state: RunState) -> None:
    order = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    for _ in state.epochs(4):
        random.shuffle(order)
        for at in order:
            found.train(found.model(torch.full((1,), at)).square().mean())
        state.save()


def an_attribute_of_a_class(found: Objects, state: RunState) -> None:
    class Annealing:
        temperature = 1.0

    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean() * Annealing.temperature)
        Annealing.temperature *= 0.9
        state.save()


def an_attribute_that_a_class_inherits(found: Objects, state: RunState) -> None:
    class Annealing:
        temperature = 1.0

    class Warmer(Annealing):
        pass

    for _ in state.epochs(1):
        for x in state.batches():
            found.train(found.model(x).square().mean() * Warmer.temperature)
        Warmer.temperature *= 0.9
        state.save()


def an_attribute_of_a_function(found: Objects, state: RunState) -> None:
    def decayed(loss: torch.Tensor) -> torch.Tensor:
        decayed.calls += 1  # type: ignore[attr-defined]
        return loss * 0.9**decayed.calls  # type: ignore[attr-defined]

    decayed.calls = 0  # type: ignore[attr-defined]
    for _ in state.epochs(3):
        for x in state.batches():
            found.train(decayed(found.model(x).square().mean()))
        state.save()


class Best(NamedTuple):
    """Its fields are known without its own code, which may fail."""

    loss: float = 9e9

    def __iter__(self) -> Any:
        raise RuntimeError


class Settings(NamedTuple):
    temperature: float = 1.0
    epochs: int = 0


def a_named_tuple_that_each_body_makes_from_the_last(found: Objects, state: RunState) -> None:
    settings = Settings()
    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean() * settings.temperature)
        settings = Settings(settings.temperature * 0.9, settings.epochs + 1)
        state.save()


def the_best_in_a_named_tuple(found: Objects, state: RunState) -> None:
    best = Best()
    for _ in state.epochs(6):
        for x in state.batches():
            loss = found.model(x).square().mean()
            found.train(loss)
        if loss.item() < best.loss:
            best = Best(loss.item())
            found.train(found.model(x).square().mean())
        state.save()


def a_named_tuple_of_tensors(found: Objects, state: RunState) -> None:
    pair = Pair(torch.zeros(1), torch.ones(1))
    for _ in state.epochs(3):
        for x in state.batches():
            loss = found.model(x).square().mean() / (1 + pair.mean)
            found.train(loss)
            pair = Pair(0.9 * pair.mean + 0.1 * loss.detach(), pair.count)
        state.save()


@dataclass(frozen=True)
class Frozen:
    temperature: float = 1.0


def an_object_that_each_body_makes_from_the_last(found: Objects, state: RunState) -> None:
    frozen = Frozen()
    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean() * frozen.temperature)
        frozen = Frozen(frozen.temperature * 0.9)
        state.save()


def cooled(frozen: Frozen) -> Frozen:
    return Frozen(frozen.temperature * 0.9)


def an_object_that_a_function_makes_from_the_last(found: Objects, state: RunState) -> None:
    frozen = Frozen()
    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean() * frozen.temperature)
        frozen = cooled(frozen)
        state.save()


WARNED: dict[Script, str] = {
    a_hidden_state: "hidden",
    a_tuple_of_numbers: "mean",
    a_default_dict: "means['loss']",
    a_counter: "counts['seen']",
    a_list_of_tensors: "means",
    a_dict_of_tensors: "means[0]",
    the_last_losses: "last",
    an_object_that_is_called: "normalized.mean",
    a_loss_with_an_attribute: "criterion.center",
    a_margin_that_the_loop_raises: "criterion.margin",
    data_that_become_harder: "data.scale",
    data_that_become_harder_by_a_method: "data.scale",
    weights_of_a_sampler: "sampler.weights",
    weights_of_a_sampler_of_torch: "sampler.weights",
    labels_that_are_replaced: "labels",
    an_order_that_is_shuffled: "order",
    a_list_that_is_shuffled: "order",
    an_attribute_of_a_class: "Annealing.temperature",
    the_best_in_a_named_tuple: "best.loss",
    an_attribute_that_a_class_inherits: "Warmer.temperature",
    an_attribute_of_a_function: "decayed.calls",
    a_named_tuple_that_each_body_makes_from_the_last: "settings.temperature",
    a_named_tuple_of_tensors: "pair.mean",
    an_object_that_a_function_makes_from_the_last: "frozen.temperature",
    an_object_that_each_body_makes_from_the_last: "frozen.temperature",
}


@pytest.mark.parametrize("script", WARNED, ids=lambda script: script.__name__)
def test_what_a_loop_carries_along_is_warned_of_by_name(run_dir: Path, script: Script) -> None:
    (message,) = said(run_dir, script)

    assert message.startswith(f"{WARNED[script]} controls this loop and changes")


def a_hidden_state_of_one_epoch(found: Objects, state: RunState) -> None:
    for _ in state.epochs(3):
        hidden = (torch.zeros(1), 0)
        for batch in state.batches():
            out = torch.tanh(found.model(batch) + hidden[0]).mean(0)
            found.train(out.sum())
            hidden = out.detach(), 1
        state.save()


def tuples_of_each_body(found: Objects, state: RunState) -> None:
    for epoch in state.epochs(3):
        for batch in state.batches():
            pair = batch, found.model(batch)
            shown = Pair(found.train((pair[0] - pair[1]).square().mean()), epoch)
            print(shown.mean)
            state.save()


def a_log(found: Objects, state: RunState) -> None:
    log: defaultdict[str, list[Any]] = defaultdict(list)
    counts: Counter[int] = Counter()
    last: deque[torch.Tensor] = deque(maxlen=3)
    for epoch in state.epochs(3):
        for batch in state.batches():
            loss = found.train(found.model(batch).square().mean())
            log["loss"].append((epoch, loss))
            counts[epoch] += 1
            last.append(loss)
            print(log["loss"][-1], counts, sum(last))
            state.save()


def features_of_a_hook(found: Objects, state: RunState) -> None:
    features: list[torch.Tensor] = []
    hook = found.model.register_forward_hook(lambda module, given, out: features.append(out))
    for _ in state.epochs(3):
        for batch in state.batches():
            features.clear()
            found.model(batch)
            found.train(features[-1].square().mean())
            state.save()
    hook.remove()


def buffers_in_turn(found: Objects, state: RunState) -> None:
    buffers = [torch.empty(2, 1), torch.empty(2, 1)]
    for _ in state.epochs(3):
        for number, batch in enumerate(state.batches()):
            buffers[number % 2].copy_(batch)
            found.train(found.model(buffers[number % 2]).square().mean())
            state.save()


class Masked(Centered):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != len(out):
            self.mask = torch.ones(len(out), 1)
        self.calls += 1
        self.last = (out * self.mask).square().mean()
        if self.calls % 2 == 0:
            print(self.last)
        return self.last


def a_loss_that_keeps_a_mask(found: Objects, state: RunState) -> None:
    criterion = Masked()
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(criterion(found.model(batch[: 1 + state.batch % 2])))
            state.save()


def a_loss_that_is_switched(found: Objects, state: RunState) -> None:
    criterion = Margin()
    for epoch in state.epochs(3):
        criterion.train()
        criterion.margin = 0.1 * epoch
        for batch in state.batches():
            found.train(criterion(found.model(batch)))
            state.save()
        criterion.eval()
        state.save()


class Windowed(Centered):
    def forward(self, out: torch.Tensor) -> torch.Tensor:
        if self.mask is not None and self.calls == out.shape[1]:
            window = self.mask
        else:
            window = torch.ones(out.shape[1])
        self.mask, self.calls = window, out.shape[1]
        return (out * window).square().mean()


def a_loss_that_makes_its_window_once(found: Objects, state: RunState) -> None:
    criterion = Windowed()
    criterion.mask = torch.zeros(3)
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(criterion(found.model(batch)))
            state.save()


class Bar:
    def __init__(self) -> None:
        self.done, self.best = 0, 9.0

    def __call__(self, loss: float) -> None:
        self.done += 1
        self.best = min(loss, self.best)
        if self.done >= 3:
            print(self.best)
            self.done = 0


def a_bar_that_is_called(found: Objects, state: RunState) -> None:
    bar = Bar()
    for _ in state.epochs(3):
        for batch in state.batches():
            bar(found.train(found.model(batch).square().mean()).item())
            state.save()


def data_in_two_modes(found: Objects, state: RunState) -> None:
    data = found.data
    for _ in state.epochs(3):
        data.scale = 0.1
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
            state.save()
        data.scale = 0.2
        print(found.model(data[0]))
        state.save()


class Clock:
    def __init__(self) -> None:
        self.calls, self.last = 0, torch.zeros(1)

    def __call__(self, loss: torch.Tensor) -> str:
        self.calls += 1
        self.last = 0.9 * self.last + 0.1 * loss
        return f"{self.calls}: {self.last}"


def an_object_that_only_shows(found: Objects, state: RunState) -> None:
    clock = Clock()
    for _ in state.epochs(3):
        for batch in state.batches():
            print(clock(found.train(found.model(batch).square().mean())))
            state.save()


def data_of_each_epoch(found: Objects, state: RunState) -> None:
    data = found.data
    for epoch in state.epochs(3):
        data.set_epoch(epoch)
        data.scale = 0.1 * (epoch + 1)
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
            state.save()
        state.save()


def data_that_count(found: Objects, state: RunState) -> None:
    data = found.data
    for _ in state.epochs(3):
        for batch in state.batches():
            found.train(found.model(batch).square().mean())
            data.seen += len(batch)
            state.save()


def data_that_know_themselves(found: Objects, state: RunState) -> None:
    data_that_become_harder(found, state)


data_that_know_themselves.dataset = KnowsItself  # type: ignore[attr-defined]


def an_order_of_each_body(found: Objects, state: RunState) -> None:
    for _ in state.epochs(3):
        order = np.arange(6)
        np.random.shuffle(order)
        for at in order:
            found.train(found.model(torch.full((1,), float(at))).square().mean())
        state.save()


def an_attribute_of_a_class_that_is_only_shown(found: Objects, state: RunState) -> None:
    class Seen:
        batches = 0

    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean())
            Seen.batches += 1
            if Seen.batches % 2 == 0:
                print(Seen.batches)
        state.save()


def an_attribute_of_a_class_that_each_body_sets(found: Objects, state: RunState) -> None:
    class Annealing:
        temperature = 1.0

    for epoch in state.epochs(3):
        Annealing.temperature = 0.9**epoch
        for x in state.batches():
            found.train(found.model(x).square().mean() * Annealing.temperature)
        state.save()


def a_class_and_a_function_that_the_epoch_chooses(found: Objects, state: RunState) -> None:
    class Square:
        """It has a docstring, as the other has none."""

    class Absolute:
        pass

    def full(x: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return x

    def half(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    kind, scale = Square, full
    for epoch in state.epochs(3):
        if epoch == 1:
            kind, scale = Absolute, half
        for x in state.batches():
            loss = scale(found.model(x))
            found.train(loss.square().mean() if kind is Square else loss.abs().mean())
        state.save()


def a_named_tuple_that_is_kept_in_vars(found: Objects, state: RunState) -> None:
    settings = Settings(state.vars.get("temperature", 1.0))
    for _ in state.epochs(3):
        for x in state.batches():
            found.train(found.model(x).square().mean() * settings.temperature)
        settings = Settings(settings.temperature * 0.9)
        state.vars["temperature"] = settings.temperature
        state.save()


def a_named_tuple_that_each_body_sets(found: Objects, state: RunState) -> None:
    settings = Settings()
    for epoch in state.epochs(3):
        settings = settings._replace(temperature=0.9**epoch)
        for x in state.batches():
            found.train(found.model(x).square().mean() * settings.temperature)
        state.save()


def named_tuples_of_each_body(found: Objects, state: RunState) -> None:
    for epoch in state.epochs(3):
        settings = Settings(0.9**epoch)
        for x in state.batches():
            settings = settings._replace(epochs=settings.epochs + 1)
            found.train(found.model(x).square().mean() * settings.temperature)
        print(settings.epochs)
        state.save()


def the_output_of_a_batch_that_the_next_epoch_shows(found: Objects, state: RunState) -> None:
    out = Pair(torch.zeros(1), 0)
    for epoch in state.epochs(3):
        if epoch:
            print(out.mean.item())
        for x in state.batches():
            out = Pair(found.model(x).square().mean(), 1)
            found.train(out.mean)
        state.save()


SILENT: list[Script] = [
    an_attribute_of_a_class_that_is_only_shown,
    an_attribute_of_a_class_that_each_body_sets,
    a_class_and_a_function_that_the_epoch_chooses,
    a_named_tuple_that_is_kept_in_vars,
    a_named_tuple_that_each_body_sets,
    named_tuples_of_each_body,
    the_output_of_a_batch_that_the_next_epoch_shows,
    a_hidden_state_of_one_epoch,
    tuples_of_each_body,
    a_log,
    features_of_a_hook,
    buffers_in_turn,
    a_loss_that_keeps_a_mask,
    a_loss_that_is_switched,
    a_loss_that_makes_its_window_once,
    a_bar_that_is_called,
    data_in_two_modes,
    an_object_that_only_shows,
    data_of_each_epoch,
    data_that_count,
    data_that_know_themselves,
    an_order_of_each_body,
]


def test_a_sum_in_a_named_tuple_is_told_to_be_averaged(run_dir: Path) -> None:
    def sums(found: Objects, state: RunState) -> None:
        for _ in state.epochs(3):
            settings = Settings(0.0)
            for x in state.batches():
                loss = found.model(x).square().mean()
                found.train(loss)
                settings = Settings(settings.temperature + loss.item(), settings.epochs + 1)
                state.save(loss=settings.temperature / settings.epochs)

    (message,) = said(run_dir, sums)

    assert message.startswith("settings.epochs, settings.temperature are summed over the epoch")


def test_data_that_grow_are_only_warned_of_by_their_loader(run_dir: Path) -> None:
    messages = said(run_dir, data_that_are_added)

    assert messages
    assert [one for one in messages if not one.startswith("loader: the dataset has")] == []


WITHOUT_LOADER = an_order_that_is_shuffled, a_list_that_is_shuffled, an_order_of_each_body


@pytest.mark.parametrize("script", SILENT, ids=lambda script: script.__name__)
def test_what_each_body_makes_or_only_shows_is_not_warned_of(run_dir: Path, script: Script) -> None:
    assert said(run_dir, script) == []


def test_an_object_that_is_called_and_given_is_not_warned_of(run_dir: Path) -> None:
    class Given(Normalized):
        def state_dict(self) -> dict[str, Any]:
            return {"mean": self.mean}

        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.mean = saved["mean"]

    given = Given()

    def script(found: Objects, state: RunState) -> None:
        for _ in state.epochs(3):
            for batch in state.batches():
                found.train(given(found.model(batch).square().mean()))
                state.save()

    assert said(run_dir, script, extra={"given": given}) == []
