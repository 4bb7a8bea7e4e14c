"""What the loops of a script change in its variables is stored, and put back at their heads."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import chosen
import numpy as np
import pytest
import torch
import xxhash
from forks import Forks
from places import DATA, SUPPORT

from resumable.objects import own, walks
from resumable.variables import columns
from resumable.variables.looks import Look, Namespace
from resumable.variables.owned import Owned
from resumable.variables.putting import Putting
from resumable.variables.script import enumerates

HEAD = f"""
import sys
sys.path.insert(0, {str(SUPPORT / "site-packages")!r})
from carrying import batches, epochs, note
"""

STOPPED = 128 + signal.SIGTERM
LOOP = """
for epoch in epochs(3):
    START
    for batch in batches():
        CHANGE
        note(batch, SHOWN)
    END
note(SHOWN)
"""
IN_FUNCTION = """
def main():
    BODY

main()
"""
METER = """
class Meter:
    best = None

    def __init__(self):
        self.sum, self.count, self.seen = 0.0, 0, []

    def update(self, x):
        self.sum += x / 3
        self.count += 1
        self.seen.append(x)
"""


def script(text: str) -> str:
    """Return the script that a section describes."""
    before, change, shown, end, start = [*text.split("\n-- "), "pass", "pass"][:5]
    body = LOOP.replace("CHANGE", change.replace("\n", "\n        ")).replace("SHOWN", shown)
    head = before.replace("NUMPY", "import numpy as np").replace("METER", METER)
    return f"{head}\n{body.replace('END', end).replace('START', start)}"


TRAINING = """
import copy, torch
from torch import nn
import carrying
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.randn(9, 4)
carrying.loader = torch.utils.data.DataLoader(data, 3, shuffle=True)
BEFORE
carrying.parts |= {'model': model, 'optimizer': optimizer}
def fit(x, scale=1.0, by=None):
    by = by or optimizer
    loss = scale * (model(x) - 1).square().mean()
    by.zero_grad()
    loss.backward()
    by.step()
    return loss.item()
for epoch in epochs(3):
    START
    for x in batches():
        CHANGE
        note(loss, *(p.double().sum().item() for p in model.parameters()))
    END
"""


def training(text: str) -> str:
    """Return the training that a section describes."""
    before, change, end, start = [*text.split("\n-- "), "pass", "pass"][:4]
    filled = TRAINING.replace("BEFORE", before).replace("CHANGE", change.replace("\n", "\n        "))
    return filled.replace("END", end).replace("START", start.replace("\n", "\n    "))


def sections(name: str) -> dict[str, str]:
    """Return the sections of a file by their names."""
    return dict(one.split("\n", 1) for one in (DATA / name).read_text().strip().split("\n## ")[1:])


ALL, TRAININGS = sections("carrying.txt"), sections("training.txt")
BESIDE = TRAININGS.pop("beside.py")
STOPS = ([1, 2], [2, 3], [3, 1], [4, 2], [5, 4], [7, 1])
"""In mid-epoch, after its last batch, and at its end, twice."""


def variants(source: str) -> dict[str, str]:
    """Return a script as it is, and in a function."""
    return {"module": source, "function": IN_FUNCTION.replace("BODY", source.strip().replace("\n", "\n    "))}


def noted(forks: Forks, source: str, folder: Path, stops: Sequence[int] = ()) -> tuple[list[list[str]], str]:
    """Return what all starts of a script have noted, each stopped after a number of bodies but the last."""
    folder.mkdir()
    (folder / "train.py").write_text(HEAD + source)
    (folder / "beside.py").write_text(BESIDE)
    for stop in stops:
        stopped = forks.run(["train.py"], folder, environment={"STOP": str(stop)})
        assert stopped.code == STOPPED, stopped.err
    forks.run(["train.py"], folder).checked()
    lines = (folder / "noted").read_text().splitlines()
    return [json.loads(one) for one in lines], (folder / "problems").read_text().strip()


@pytest.mark.parametrize("where", ["module", "function"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.quick(9)
def test_what_a_loop_changes_in_variables_comes_back(
    name: str, where: str, forks: Forks, tmp_path: Path
) -> None:
    source = variants(script(ALL[name]))[where]
    expected, _ = noted(forks, source, tmp_path / "plain")
    dice = random.Random(name)

    for number, stops in enumerate(([2, 2], [3, 1], [4, 1, 3], [dice.randrange(1, 9), dice.randrange(1, 3)])):
        found = noted(forks, source, tmp_path / str(number), stops)
        assert (stops, *found) == (stops, expected, "")


@pytest.mark.proves("exact")
@pytest.mark.parametrize("where", ["module", "function"])
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.quick(24)
def test_what_a_script_keeps_beside_its_parts_comes_back_or_is_told(
    name: str, where: str, forks: Forks, tmp_path: Path
) -> None:
    source = variants(training(TRAININGS[name]))[where]
    must_be_exact, told = re.fullmatch(r"[^(]*(?:\((exact, )?told: (.*)\))?", name).groups("")
    expected, told_at_once = noted(forks, source, tmp_path / "plain")

    is_told = told in told_at_once
    for number, stops in enumerate(STOPS if where == "module" else STOPS[:4:3]):
        found, problems = noted(forks, source, tmp_path / str(number), stops)
        assert problems == "" or told, (stops, problems)
        assert found == expected or (told in problems and told and not must_be_exact), stops
        is_told |= told in problems
    assert is_told


def test_a_signal_ends_the_body_in_which_an_optimizer_made_in_the_loop_steps(
    forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HEAD + training(TRAININGS["optimizer made in the loop"]))
    forks.run(["train.py"], tmp_path, environment={"STOP": "5"})

    assert len((tmp_path / "noted").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("then", "told"),
    [("fit", ""), ("train", ""), ("train, best = other", "best: no loop of the script assigns it")],
)
def test_variables_of_a_function_with_another_name_are_found_by_theirs(
    then: str, told: str, forks: Forks, tmp_path: Path
) -> None:
    source = """
def fit():
    best, seen = 0, []
    for epoch in epochs(2):
        for batch in batches():
            best += batch
            seen.append(best)
            note(seen)

fit()
"""
    expected, _ = noted(forks, source, tmp_path / "plain")
    (tmp_path / "train.py").write_text(HEAD + source)
    forks.run(["train.py"], tmp_path, environment={"STOP": "2"})
    name, _, variable = then.partition(", best = ")
    (tmp_path / "train.py").write_text(HEAD + source.replace("fit", name).replace("best", variable or "best"))
    forks.run(["train.py"], tmp_path).checked()

    lines = [json.loads(one) for one in (tmp_path / "noted").read_text().splitlines()]
    assert (lines == expected) is not bool(told)
    assert told in (tmp_path / "problems").read_text()


EDITED = """
import sys
patience, rate, best = 5, {'decays': 1.0, 'stays': 1.0}, 0
if 'edited' in sys.argv:
    patience, rate, best = 9, {'decays': 7.0, 'stays': 7.0}, 7
for epoch in epochs(2):
    for batch in batches():
        best += 1
        rate['decays'] /= 2
        note(patience, rate, best)
"""


def test_what_the_loop_leaves_alone_is_what_the_script_says_now(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + EDITED)
    for stop, arguments in (("1", []), ("1", ["edited"]), ("-1", ["edited"])):
        forks.run(["train.py", *arguments], tmp_path, environment={"STOP": stop})
    lines = [json.loads(one) for one in (tmp_path / "noted").read_text().splitlines()]

    assert lines == [
        ["5", "{'decays': 0.5, 'stays': 1.0}", "1"],
        ["9", "{'decays': 0.25, 'stays': 7.0}", "2"],
        ["9", "{'decays': 0.125, 'stays': 7.0}", "3"],
        *(["9", f"{{'decays': {0.5**n}, 'stays': 7.0}}", str(n)] for n in (4, 5, 6)),
    ]


AGAIN = """
import carrying, os, torch
model, count = torch.nn.Linear(1, 1), 0
torch.nn.init.zeros_(model.weight)
carrying.parts = {'model': model}
def save(where):
    if os.environ.get('SAVES') == where:
        carrying.run().save().wait()
        os._exit(0)
save('before the loop')
for epoch in epochs(2):
    count += 1
    model.weight.data += 1
    save('in its first lines')
    for batch in batches():
        note(count, model.weight.item())
"""


@pytest.mark.parametrize("where", ["before the loop", "in its first lines"])
def test_a_save_in_lines_that_run_again_has_what_they_have_not_changed(
    where: str, forks: Forks, tmp_path: Path
) -> None:
    expected, _ = noted(forks, AGAIN, tmp_path / "plain")
    (folder := tmp_path / "stopped").mkdir()
    (folder / "train.py").write_text(HEAD + AGAIN)

    for environment in ({"STOP": "5"}, {"SAVES": where}, {"STOP": "1"}, {"SAVES": where}, {}):
        forks.run(["train.py"], folder, environment=environment)

    assert [json.loads(one) for one in (folder / "noted").read_text().splitlines()] == expected


def test_a_thread_that_loads_batches_leaves_the_variables_alone(forks: Forks, tmp_path: Path) -> None:
    source = """
import threading
def main():
    best = 0
    for epoch in epochs(4):
        found = []
        thread = threading.Thread(target=lambda: found.extend(batches()))
        thread.start()
        thread.join()
        best += sum(found)
        note(best)
main()
"""
    expected, _ = noted(forks, source, tmp_path / "plain")

    assert noted(forks, source, tmp_path / "stopped", [4, 4])[0] == expected


def test_optimizers_share_again_what_they_shared(forks: Forks, tmp_path: Path) -> None:
    source = """
import carrying, torch
models = {name: torch.nn.Linear(1, 1, bias=False) for name in 'ab'}
for name, model in models.items():
    torch.nn.init.constant_(model.weight, ord(name))
optimizers = {name: torch.optim.Adam(model.parameters(), 0.1) for name, model in models.items()}
carrying.parts = {'model': models, 'optimizer': optimizers}
for epoch in epochs(3):
    for batch in batches():
        for name, model in models.items():
            optimizers[name].zero_grad()
            model(torch.ones(1)).square().sum().backward()
            optimizers[name].step()
        note(*(float(model.weight) for model in models.values()))
    if epoch == 0:
        optimizers['b'].load_state_dict(optimizers['a'].state_dict())
"""
    expected, _ = noted(forks, source, tmp_path / "plain")

    for stops in ([4, 1], [6, 2], [9, 1]):
        assert noted(forks, source, tmp_path / str(stops), stops)[0] == expected


def names(variables: dict[str, Any], may_be_bound: Collection[str] = ()) -> Namespace:
    """Return the variables of a module that does not run."""
    return Namespace("module:train", variables, None, frozenset(may_be_bound), variables.update)


def stored(before: Namespace, change: Any, bound: Mapping[str, Any], owned: Owned | None = None) -> Any:
    """Return what a look stores of a change in place, and of variables that are bound."""
    first = Look(owned or Owned())
    look = Look(owned or Owned(), walks.met(walks.walk(before.roots(), first.is_leaf), first.content).get)
    change(before.variables)
    look.changes(before.roots())
    rows = [[name, look.value(one, name)] for name, one in bound.items()]
    return {"namespaces": [["module:train", rows]], "entries": look.entries}, look.lost


def test_what_a_part_restores_is_referred_to_and_not_copied() -> None:
    weight, other = torch.zeros(2, 3), torch.ones(2, 3)
    owned, owned_later = Owned([("model.weight", weight)]), Owned([("model.weight", other)])
    bound = {"tied": weight, "row": weight[1], "both": [weight, weight.detach()]}
    tree, lost = stored(names({}), lambda held: weight.add_(1), bound, owned)

    later = names({"tied": None, "row": None, "both": None}, bound)
    Putting(tree).put([later], owned_later)
    other[1] = 5

    held = later.variables
    assert lost == []
    assert held["tied"] is held["both"][0] is other
    assert held["row"].tolist() == [5, 5, 5]
    assert held["both"][1].data_ptr() == other.data_ptr()


def test_only_what_a_loop_assigns_is_bound() -> None:
    tree, _ = stored(names({}), lambda _: None, {"command": "rm", "best": 1})
    later = names({"command": "ls"}, {"best"})
    putting = Putting(tree)

    assert putting.put([later], Owned()) == ["best"]
    assert later.variables == {"command": "ls", "best": 1}
    assert putting.problems == ["command: no loop of the script assigns it"]


class Reader:
    """What holds something that no checkpoint can have."""

    def __init__(self) -> None:
        self.lock, self.lines = threading.Lock(), 3


def test_an_object_made_in_the_loop_is_never_made_half() -> None:
    tree, lost = stored(names({"Reader": Reader}), lambda _: None, {"reader": Reader(), "lines": 3})
    later = names({"Reader": Reader, "reader": "as it is"}, {"reader", "lines"})
    putting = Putting(tree)
    putting.put([later], Owned())

    assert lost == [("reader", "it holds a lock")]
    assert later.variables == {"Reader": Reader, "reader": "as it is", "lines": 3}
    assert putting.problems == ["reader: it holds a lock"]


def test_an_object_with_an_open_file_is_left_whole() -> None:
    before = names({"reader": Reader(), "other": [1]})

    def change(held: Any) -> None:
        held["reader"].lines += 1
        held["other"].append(2)

    tree, lost = stored(before, change, {})
    later, putting = names({"reader": Reader(), "other": [1]}), Putting(tree)
    putting.put([later], Owned())

    assert lost == [("reader", "it holds a lock")]
    assert (later.variables["reader"].lines, later.variables["other"]) == (3, [1, 2])


def test_what_is_not_there_any_more_is_named_and_the_rest_is_put_back() -> None:
    before = names({"a": {"x": [1]}, "b": np.zeros(2), "c": [1]})

    def change(held: Any) -> None:
        held["a"]["x"].append(2)
        held["b"] += 1
        held["c"].append(3)

    tree, _ = stored(before, change, {})
    later, putting = names({"a": {"y": [1]}, "b": np.zeros(3), "c": [1]}), Putting(tree)
    putting.put([later], Owned())

    assert later.variables["c"] == [1, 3]
    assert later.variables["a"] == {"y": [1]}
    assert putting.problems == [
        "a['x']: it is not there any more",
        "b: an array of float64[3] where one of float64[2] was",
    ]


def test_a_second_head_fills_the_same_objects_again() -> None:
    tree, _ = stored(names({}), lambda _: None, {"best": {"w": [1.0]}})
    later, putting = names({"best": None}, {"best"}), Putting(tree)
    putting.put([later], Owned())
    first = later.variables["best"]
    first["w"].append(2)
    later.variables["best"] = None
    putting.put([later], Owned())

    assert later.variables["best"] is first
    assert first == {"w": [1.0]}


LIBRARY = """
class Env:
    level = None

    def __init__(self):
        import numpy as np
        self.dice, self.state, self.steps, self.place = np.random.default_rng(3), None, 0, np.zeros(2)
        self.seen, self.name, self.inner, self.stats = [], "env", Inner(), {"mean": 0.0}
        self.mean = np.zeros(())

    def step(self, x):
        self.steps += 1
        # Every other one is where the first one was.
        self.place = self.place + x
        self.state = (self.dice.random() + x, [self.steps])
        self.seen.append(self.state[0])
        self.stats["mean"] += x
        # An array without dimensions becomes a number.
        self.level, self.mean = self.steps, self.mean + x
        self.inner.count = self.inner.count + 1
        return self.state

class Inner:
    __slots__ = ("count", "file")

    def __init__(self):
        self.count = 0
"""
IN_LIBRARY = """
from library import Env
env, wrapped = Env(), {'env': Env()}
for epoch in epochs(2):
    for batch in batches():
        note(env.step(batch), wrapped['env'].step(1), env.seen, env.stats, env.inner.count, env.place)
        note(env.level, env.mean)
"""


def test_numbers_in_objects_of_libraries_come_back(forks: Forks, tmp_path: Path) -> None:
    for name in ("plain", "stopped"):
        (tmp_path / f"{name}-library/site-packages").mkdir(parents=True)
        (tmp_path / f"{name}-library/site-packages/library.py").write_text(LIBRARY)
    head = "import sys; sys.path.insert(0, '../{}-library/site-packages')\n"
    expected, _ = noted(forks, head.format("plain") + IN_LIBRARY, tmp_path / "plain")

    found = noted(forks, head.format("stopped") + IN_LIBRARY, tmp_path / "stopped", [2, 2])
    assert found == (expected, "")


def test_what_cannot_be_stored_is_named_and_the_rest_is_stored(forks: Forks, tmp_path: Path) -> None:
    source = """
import datetime, zoneinfo
when, deep, best = None, [], 0
for epoch in epochs(1):
    for batch in batches():
        before = when
        when = datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo('UTC'))
        for _ in range(2000):
            deep = [deep]
        best += batch
        note(best)
"""
    expected, _ = noted(forks, source, tmp_path / "plain")
    found, problems = noted(forks, source, tmp_path / "stopped", [2])

    assert found == expected
    assert "when: a time of the zone UTC" in problems
    assert "maximum recursion depth" in problems


class Foreign:
    """What is given the place of a library's object below."""

    def __init__(self) -> None:
        self.count, self.name, self.call, self.kept = 1, "ls", print, {"a": 1.0}

    def step(self) -> None:
        """Be called by the script."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "rm"),
        ("call", "rm"),
        ("count", "rm"),
        ("step", 3),
        ("kept", {"a": "rm"}),
    ],
)
def test_nothing_but_numbers_is_put_into_an_object_of_a_library(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "is_own_class", lambda kind: kind is not Foreign)
    before = names({"env": Foreign(), "print": print})
    tree, lost = stored(before, lambda held: setattr(held["env"], name, value), {})
    assert len(lost) == 1
    (entry,) = [one for one in tree["entries"] if "data" in one]
    entry["data"] = [[name, value if not isinstance(value, dict) else {"entry": len(tree["entries"])}]]
    tree["entries"].append({"kind": "dict", "class": "builtins:dict", "set": [["a", "rm"]], "is_all": True})
    later = names({"env": Foreign(), "print": print})
    putting = Putting(tree)
    putting.put([later], Owned())

    assert vars(later.variables["env"]) == vars(Foreign())
    assert len(putting.problems) == 1


@pytest.mark.parametrize(
    ("compiled", "change", "is_told"),
    [
        (lambda: np.random.PCG64(1), lambda held: held.random_raw(), True),
        (lambda: np.random.PCG64(1), lambda _: None, False),
        (xxhash.xxh64, lambda held: held.update(b"a"), True),
        (lambda: re.compile("a"), lambda held: held.match("a"), False),
    ],
)
def test_numbers_beside_a_compiled_object_that_changes_are_told_and_not_filled(
    compiled: Any, change: Any, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "is_own_class", lambda kind: False)
    inner, outer = Foreign(), Foreign()
    inner.call, outer.call = compiled(), inner

    def step(held: Any) -> None:
        change(inner.call)
        inner.count += 1
        outer.count += 1

    tree, lost = stored(names({"env": outer}), step, {})

    assert {where for where, _ in lost} >= ({"env", "env.call"} if is_told else set())
    assert any("data" in one for one in tree["entries"]) is not is_told
    assert bool(lost) is is_told


def test_the_index_of_an_enumerate_is_set_and_a_huge_one_is_left() -> None:
    other, huge = enumerate("ab"), enumerate("ab", 1 << 70)

    assert not enumerates.set_index(huge, 5)
    assert not enumerates.set_index(other, -1)
    assert (next(huge), next(other)) == ((1 << 70, "a"), (0, "a"))


WITHOUT_BATCHES = """
import carrying, os
from carrying import run

def save_and_die():
    run().save().wait()
    if carrying.left == 1:
        os._exit(143)

class Trainer:
    total = 0

    def batches_of(self):
        return run().batches()

    def train(self):
        for batch in self.batches_of():
            self.total += batch

trainer, weight = Trainer(), 1.0
for epoch in epochs(4):
    if epoch % 2 == 0:
        BEFORE
        weight = weight / 3 + trainer.total
    else:
        trainer.train()
    note(weight, trainer.total)
    if epoch % 3 != 1:
        save_and_die()
"""


@pytest.mark.proves("exact")
@pytest.mark.parametrize("before", ["pass", "save_and_die(); trainer.train()"])
def test_a_save_behind_which_no_batch_can_be_asked_for_ends_the_epoch(
    before: str, forks: Forks, tmp_path: Path
) -> None:
    source = WITHOUT_BATCHES.replace("BEFORE", before)
    expected, _ = noted(forks, source, tmp_path / "plain")

    for number, stops in enumerate(([1, 1], [2, 1], [1, 2], [3])):
        assert (stops, *noted(forks, source, tmp_path / str(number), stops)) == (stops, expected, "")


SAVED_LAST = """
import carrying, os
from carrying import run
total, seen = 0, []
for epoch in epochs(4):
    for batch in batches():
        total += batch
        if batch == 4:
            run().save()
    seen.append(total)
    note(total, seen)
    if carrying.left == 1 and epoch % 2:
        run().save().wait()
        os._exit(143)
    run().save(total=total)
"""


@pytest.mark.proves("exact")
def test_each_save_that_is_the_last_of_its_body_has_what_is_there_then(forks: Forks, tmp_path: Path) -> None:
    expected, _ = noted(forks, SAVED_LAST, tmp_path / "plain")

    for number, stops in enumerate(([8, 1], [4, 4], [5, 3], [1, 3, 8])):
        assert noted(forks, SAVED_LAST, tmp_path / str(number), stops) == (expected, ""), stops


PLACES = """
from carrying import run

def handed(batches):
    total = 0
    for batch in batches:
        total += batch
        yield total
        AFTER

def keep():
    run().save().wait()

for epoch in epochs(2):
    for total in handed(batches()):
        note(total)
        IN_BATCH
    for name in 'ab':
        IN_INNER
    BEHIND
"""


@pytest.mark.parametrize(
    ("where", "lines", "told"),
    [
        ("AFTER", "pass", ""),
        ("AFTER", "total *= 2", "handed: what it does behind the yield that hands a batch on"),
        ("IN_BATCH", "if total > 5: break", "may be left by a break or a return behind save()"),
        ("IN_BATCH", "break", "was left right after save()"),
        ("IN_INNER", "keep()", "save() is called in a loop inside of the body"),
        ("BEHIND", "keep()", ""),
        ("BEHIND", "[keep() for _ in range(2)]", "save() is called in a loop inside of the body"),
        ("handed(batches())", "enumerate(run().batches())", ""),
    ],
)
def test_what_stands_behind_a_save_is_told_as_it_is_called(
    where: str, lines: str, told: str, forks: Forks, tmp_path: Path
) -> None:
    is_in_batch = where not in ("IN_INNER", "BEHIND")
    script = PLACES.replace("IN_BATCH", "keep()\n        IN_BATCH" if is_in_batch else "IN_BATCH")
    script = script.replace(where, lines)
    for other in ("AFTER", "IN_BATCH", "IN_INNER", "BEHIND"):
        script = script.replace(other, "pass")

    found = noted(forks, script, tmp_path / "plain")[1]

    assert told in found
    assert bool(told) == bool(found)


AROUND_BATCHES = """
import carrying, os
from carrying import ended, run
total, seen = 0, []
while run().epoch < 3:
    for batch in run().batches():
        total += batch + run().epoch
        seen.append(total)
        note(total, seen)
        if carrying.left == 1:
            run().save().wait()
            os._exit(143)
        ended()
    run().save().wait()
    if carrying.left == 1:
        os._exit(143)
    ended()
"""


@pytest.mark.proves("exact")
def test_a_while_around_the_batches_goes_on_with_its_variables(forks: Forks, tmp_path: Path) -> None:
    expected, _ = noted(forks, AROUND_BATCHES, tmp_path / "plain")

    for number, stops in enumerate(([1, 3], [4, 4], [3, 5, 2])):
        assert noted(forks, AROUND_BATCHES, tmp_path / str(number), stops)[0] == expected, stops


GOING_BACK = """
import torch
import carrying
from carrying import run
model = torch.nn.Linear(1, 1)
with torch.no_grad():
    [p.fill_(1.0) for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), 0.5)
carrying.parts |= {'model': model, 'optimizer': optimizer, 'keep': 9}
seen, went = [], 0
for epoch in epochs(3):
    of_epoch = []
    for number, batch in enumerate(batches()):
        loss = model(torch.tensor([float(batch)])).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch)
        of_epoch += [batch]
        note(seen, of_epoch, number, went, optimizer.param_groups[0]['lr'], *model.parameters())
        if batch == 3:
            run().save()
        if batch == 4 and went < 2:
            GO_BACK
            went += 1
            optimizer.param_groups[0]['lr'] /= 2
            note(seen, of_epoch, went, *model.parameters())
            LEAVE
    else:
        run().save()
"""
WAYS_BACK = [
    ("run().restore('newest')", "break", [[0, 1, 2, 3], [3]]),
    ("run().restore('newest')", "run().save()\n            break", [[0, 1, 2, 3], [3]]),
    ("run().restore(1)", "break", [[0, 1, 2], [0, 1, 2]]),
    ("run().spiked(float('inf'))", "continue", [[0, 1, 2, 3], [3]]),
]


@pytest.mark.proves("exact")
@pytest.mark.parametrize(("way", "leave", "there"), WAYS_BACK)
def test_going_back_puts_the_variables_back_and_what_follows_counts(
    way: str, leave: str, there: Any, forks: Forks, tmp_path: Path
) -> None:
    script = GOING_BACK.replace("GO_BACK", way).replace("LEAVE", leave)

    expected, _ = noted(forks, script, tmp_path / "plain")

    rows = [one for one in expected if len(one) == 5]
    assert [one[:3] for one in rows[:1]] == [[*map(repr, there), "1"]]
    assert [one[2] for one in rows] == ["1", "2"][: len(rows)]
    assert expected[-1][3:5] == [str(len(rows)), "0.125" if "save" in leave else "0.25"]
    for number, stops in enumerate(([4, 2], [5, 1, 1], [6, 3])):
        assert noted(forks, script, tmp_path / str(number), stops)[0] == expected, stops


def test_the_variables_of_a_generator_that_waits_come_back(forks: Forks, tmp_path: Path) -> None:
    script = PLACES.replace("IN_BATCH", "keep(); carrying.left == 1 and os._exit(143)")
    for other in ("AFTER", "IN_INNER", "BEHIND"):
        script = script.replace(other, "pass")
    script = f"import carrying, os\n{script}"
    expected, _ = noted(forks, script, tmp_path / "plain")

    for number, stops in enumerate(([1, 1], [2, 1], [4, 1, 2])):
        assert (stops, *noted(forks, script, tmp_path / str(number), stops)) == (stops, expected, "")


NUMBERED = """
from carrying import ended, run

def logged(batches):
    for number, batch in enumerate(batches):
        yield batch
        note('logged', number)

for epoch in epochs(2):
    for number, batch in NUMBERED:
        note(number, batch)
        AFTER
    note(number)
"""
NUMBERINGS = [
    "enumerate(batches())",
    "enumerate(run().batches(), 5)",
    "enumerate(batches(), start=10 * run().epoch + run().batch)",
    "enumerate(logged(batches()), 1)",
    "enumerate(one for one in batches() if one % 2 == 0)",
    "enumerate(enumerate(map(str, batches()), 7))",
]


@pytest.mark.proves("exact")
@pytest.mark.parametrize("numbering", NUMBERINGS)
@pytest.mark.quick(3)
def test_batches_are_numbered_as_without_a_stop(numbering: str, forks: Forks, tmp_path: Path) -> None:
    after = "ended()" if "run().batches" in numbering else "pass"
    body = NUMBERED.replace("NUMBERED", numbering).replace("AFTER", after)
    source = IN_FUNCTION.replace("BODY", body.strip().replace("\n", "\n    "))
    expected, _ = noted(forks, source, tmp_path / "plain")

    for number, stops in enumerate(([1, 1], [2, 1], [3, 1], [4, 2, 1], [5, 1])):
        assert (stops, *noted(forks, source, tmp_path / str(number), stops)) == (stops, expected, "")


def test_what_the_loop_leaves_alone_is_that_of_the_first_start(forks: Forks, tmp_path: Path) -> None:
    unseeded = """
import numpy as np, os, random, torch
torch.seed()
noise, mask = torch.rand(3), np.frombuffer(os.urandom(4), np.uint8).copy()
dice, fixed = random.Random(), torch.arange(3)
for epoch in epochs(2):
    for batch in batches():
        note(noise.tolist(), mask.tolist(), dice.getstate()[1][:3], fixed.tolist())
"""
    lines, problems = noted(forks, unseeded, tmp_path / "stopped", [2, 3])

    assert len(lines) == 6
    assert all(line == lines[0] for line in lines)
    told = "it is not what it was when the loop began; that of the checkpoint is used"
    assert {
        *(one.split("[R12, docs/guide/inexact.md#r12]: ")[1] for one in problems.splitlines() if one)
    } == {f"{name}: {told}" for name in ("noise", "mask", "dice")}


def test_rows_are_columns_with_numbers_of_two_kinds_and_places_without_an_array() -> None:
    rows = [(np.int64(n) if n % 3 else n, None if n % 5 else np.full(2, n)) for n in range(70)]
    table = columns.table_of(rows)
    assert table is not None
    back = columns.rows_of(tuple, table.columns, table.pools)
    other = columns.table_of([(7, rows[7][1]) if n == 7 else row for n, row in enumerate(rows)])

    assert [(type(a), a, type(b), b is None or b.tolist()) for a, b in back] == [
        (type(a), a, type(b), b is None or b.tolist()) for a, b in rows
    ]
    assert columns.digest(other) != columns.digest(table)


class Thing:
    """An object of the script with a little of everything."""

    best = 0.0

    def __init__(self) -> None:
        self.n, self.seen, self.inner = 1, [1], {"a": [1]}


def rich() -> Namespace:
    """Return variables of every kind."""

    def f(x: int, seen: list[int] = [1]) -> int:  # noqa: B006
        return total

    total = 0
    variables = {
        "Thing": Thing,
        "f": f,
        "thing": Thing(),
        "rows": [(n, 1.0, np.zeros(2)) for n in range(70)],
        "numbers": [1],
        "array": np.zeros(3),
        "tensor": torch.zeros(3),
        "dice": random.Random(1),
        "net": torch.nn.Linear(2, 2),
        "texts": {"a": "b"},
        "odd": {1, "a"},
        "buffer": bytearray(b"ab"),
        "env": Foreign(),
        "queue": deque([1], 3),
        "order": OrderedDict(a=1),
        "default": defaultdict(list),
        "made": None,
        "path": Path("a"),
    }
    return names(variables, {"made", "path", "numbers"})


def change_all(held: Any) -> None:
    """Change each of them."""
    held["thing"].n, Thing.best = 2, 0.5
    held["thing"].inner["a"].append(2)
    held["f"].__defaults__[0].append(2)
    held["f"].__closure__[0].cell_contents = 3
    held["rows"].append((1, 2.0, np.ones(2)))
    for name in ("array", "tensor"):
        held[name] += 1
    held["dice"].random()
    held["net"].eval()
    held["net"].weight.data += 1
    held["texts"]["c"] = "d"
    held["odd"].add(3)
    held["buffer"].append(1)
    held["env"].count += 1
    held["queue"].append(2)
    held["order"].move_to_end("a")
    held["order"]["b"] = 2
    held["default"]["a"].append(1)


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a tree."""
    items = (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    )
    for key, one in items:
        yield (*path, key)
        yield from places(one, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a tree with another value at a place; without the place if the value is `...`."""
    if not path:
        return value
    key, *rest = path
    if value is ... and not rest:
        return (
            {k: v for k, v in tree.items() if k != key}
            if isinstance(tree, dict)
            else [*tree[:key], *tree[key + 1 :]]
        )
    if isinstance(tree, dict):
        return {**tree, key: replaced(tree[key], tuple(rest), value)}
    return type(tree)((*tree[:key], replaced(tree[key], tuple(rest), value), *tree[key + 1 :]))


HOSTILE = [
    ...,
    None,
    -1,
    1 << 70,
    "rm",
    "__class__",
    "__init__",
    [],
    {},
    (),
    {"entry": 10**9},
    {"entry": 0},
    {"entry": 3},
    {"atom": ["device", "x"]},
    [[]],
    [["a", 1]],
    np.array([1 << 40]),
    np.zeros(9),
    torch.ones(9),
    b"x",
    float("nan"),
    "class",
    "library",
    "object",
    "builtins:function",
    ["module:train", "print"],
]


@pytest.mark.parametrize(
    "entry",
    [
        {"kind": "list", "items": [], "maxlen": -1},
        {"kind": "buffer", "bytes": b"", "typecode": "bB"},
        {"kind": "buffer", "bytes": b"abc", "typecode": "d"},
        {"kind": "array", "items": [1, 2], "shape": [1 << 60]},
    ],
)
def test_what_could_not_be_made_is_refused_before_anything_is(entry: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not as a checkpoint stores them"):
        Putting({"namespaces": [], "entries": [{"class": "collections:deque", **entry}]})


@pytest.mark.parametrize(
    "more",
    [
        {"starts": []},
        {"starts": {"module:train": {"__class__": 1}}},
        {"starts": {"module:train": {"best": []}}},
        {"passes": []},
        {"passes": {1: []}},
        {"passes": {"loader": [{"kind": "list"}]}},
        {"shared": {}},
        {"shared": [["a"]]},
        {"shared": [["a", 1]]},
    ],
)
def test_what_a_look_says_of_loaders_and_optimizers_is_checked(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not as a checkpoint stores them"):
        Putting({"namespaces": [], "entries": [], **more})


@pytest.mark.parametrize("part", range(8))
@pytest.mark.quick(4)
def test_whatever_a_checkpoint_says_is_refused_or_harmless(
    part: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "is_own_class", lambda kind: kind in (Thing,))
    bound = {"made": [Thing(), (1, [2])], "path": Path("b"), "numbers": [3]}
    tree, lost = stored(rich(), change_all, bound)
    assert lost == []
    ways = [(path, value) for path in places(tree) for value in HOSTILE]
    dice, refused = chosen.dice(), 0

    for path, value in dice.sample(ways, min(len(ways), 400 * times)):
        later = rich()
        try:
            putting = Putting(replaced(tree, path, value))
        except ValueError:
            refused += 1
            continue
        putting.put([later], Owned())
        env = later.variables["env"]
        assert (env.name, env.call, env.kept.keys()) == ("ls", print, {"a"}), (path, value)
        assert type(env.count) in (int, float, type(None)), (path, value)
        assert isinstance(Thing, type), (path, value)
        assert Thing.__init__.__code__.co_filename == __file__, (path, value)
        assert type(later.variables["thing"]) is Thing, (path, value)
    assert refused > 50
