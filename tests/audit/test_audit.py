"""Whether a script resumes exactly, or what does not: where it is stopped, and what is said of it."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import faked
import pytest
import torch
from faked import Script, Start
from forks import Forks

from resumable import RunState, UsageError
from resumable.audit import audit, trials, verdicts
from resumable.audit.audit import Verdict
from resumable.audit.trials import Trials
from resumable.cli import app
from resumable.trace.trace_file import At, Record

COMMAND = ["python", "train.py"]


def stops(script: Script, **options: object) -> list[tuple[str, int]]:
    """Return where an audit stops, for a script in which nothing is wrong."""
    found = audit.audit(COMMAND, start=script, **options)  # type: ignore[arg-type]
    assert found.is_exact, verdicts.headline(found)
    return [(at.kind, at.step) for at in found.stops]


def test_it_stops_in_mid_epoch_at_the_last_batch_at_two_ends_and_once_more() -> None:
    assert stops(Script(faked.boundaries(6, 5))) == [
        ("batch", 2),
        ("batch", 5),
        ("epoch", 5),
        ("epoch", 10),
        ("batch", 13),
    ]


def test_where_no_epoch_ends_it_says_so_and_stops_twice() -> None:
    found = audit.audit(COMMAND, start=Script(faked.boundaries(1, 90)))

    assert [at.step for at in found.stops] == [7, 13]
    assert found.notes == [
        "no epoch came to its end within 20 batches, so the last batch and the epoch's end were not stopped "
        "at: --steps goes further"
    ]


def test_a_loop_over_steps_is_stopped_twice_and_nothing_is_missed() -> None:
    found = audit.audit(COMMAND, start=Script(faked.steps(100)))

    assert [at.step for at in found.stops] == [7, 13]
    assert found.notes == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"at": [7]}, [7]),
        ({"at": [9, 3, 9]}, [3, 9]),
        ({"at": [7, 14]}, [7, 14]),
        ({"at": [2], "steps": 4}, [2]),
    ],
)
def test_it_stops_where_it_should(options: dict[str, object], expected: list[int]) -> None:
    assert [step for _, step in stops(Script(faked.boundaries(5, 5)), **options)] == expected


@pytest.mark.parametrize(("at", "steps"), [(0, 20), (20, 20), (25, 20), (1, 1)])
def test_a_stop_that_is_not_between_two_boundaries_is_refused(at: int, steps: int) -> None:
    script = Script(faked.boundaries(5, 5))

    with pytest.raises(UsageError, match=f"--at {at} is not between two of {steps}"):
        audit.audit(COMMAND, at=[3, at] if at > 3 else [at], steps=steps, start=script)

    assert script.starts == []


def test_a_stop_behind_the_end_of_a_short_training_is_reported() -> None:
    found = audit.audit(COMMAND, at=[2, 9], start=Script(faked.boundaries(1, 5)))

    assert [at.step for at in found.stops] == [2]
    assert found.notes == ["--at 9: not stopped there, since the training has ended after 5"]


def test_one_epoch_is_stopped_in_its_middle_and_at_its_last_batch() -> None:
    assert stops(Script(faked.boundaries(1, 5))) == [("batch", 2), ("batch", 5)]


@pytest.mark.parametrize("options", [{}, {"at": [9]}])
def test_a_training_that_was_not_stopped_does_not_pass_for_exact(options: dict[str, list[int]]) -> None:
    found = audit.audit(COMMAND, start=Script(faked.steps(1)), **options)  # type: ignore[arg-type]

    (finding,) = found.findings
    assert finding.text == "nothing could be stopped: the training has ended after step 1"


Tells = Callable[[Record, Start], "Record | None"]


def of(change: Tells, **options: object) -> Verdict:
    return audit.audit(COMMAND, start=Script(faked.boundaries(5, 5), change), **options)  # type: ignore[arg-type]


def test_a_script_that_fails_at_once_came_to_no_boundary() -> None:
    (finding,) = of(lambda record, start: None).findings

    assert (finding.kind, finding.at) == ("script", None)
    assert finding.text == (
        "the script came to no boundary: it ended with exit code 1: ValueError: it fails here"
    )


def test_a_script_that_fails_after_a_resume_is_reported_with_its_place() -> None:
    def fails(record: Record, start: Start) -> Record | None:
        return None if start.resumes and record.at.step == 4 else record

    (finding,) = of(fails).findings

    assert (finding.kind, finding.at) == ("script", At("batch", 0, 4, 4))
    assert (
        "after a resume the script did not come to step 4 (epoch 0, batch 4): it ended with exit"
        in finding.text
    )


@pytest.mark.parametrize("trials", [{0, 1, 2, 3}, {1}, {2}])
def test_a_script_that_fails_without_a_stop_does_not_pass_for_exact(trials: set[int]) -> None:
    found = of(lambda r, start: None if start.trial in trials and r.at.step == 3 else r)

    (finding,) = found.findings
    assert (finding.kind, finding.at) == ("script", At("batch", 0, 2, 2))
    assert len(found.attempts) == min(trials) + 1
    assert finding.text == (
        "without any stop the script failed after step 2 (epoch 0, batch 2): it ended with exit code 1: "
        "ValueError: it fails here"
    )


class Short(Script):
    """A script that is over early in one of its trainings, and has done the same so far."""

    short = 0

    def _records(self, done: Sequence[Record], plan: Mapping[str, Any]) -> Iterator[Record]:
        last = 9 if self.starts[-1].trial == self.short else 99
        return itertools.takewhile(lambda record: record.at.step < last, super()._records(done, plan))


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_script_that_ends_earlier_in_one_training_does_not_repeat_itself(short: int) -> None:
    script = Short(faked.boundaries(5, 5))
    script.short = short

    (finding,) = audit.audit(COMMAND, start=script).findings

    assert (finding.kind, finding.what) == ("repeat", "where the training ends")
    assert finding.at is not None
    assert finding.at.step in (8, 9)


def test_trainings_alike_by_chance_are_not_taken_for_unknown_numbers() -> None:
    def differs(record: Record, start: Start) -> Record:
        is_other = start.trial > 2 and record.at.step > 1
        return faked.other(record, "model", weight=faked.tensor(start.trial)) if is_other else record

    (finding,) = of(differs).findings

    assert (finding.kind, finding.what) == ("repeat", "model weight")


def test_a_script_that_saves_twice_at_a_step_gives_no_alarm() -> None:
    places = [at for at in faked.steps(16) for _ in range(1 + (at.step % 4 == 0))]

    class Twice(Script):
        def _records(self, done: Sequence[Record], plan: Mapping[str, Any]) -> Iterator[Record]:
            met = set()
            for record in super()._records(done, plan):
                is_second = record.at in met and record.why == "boundary"
                met.add(record.at)
                yield faked.other(record, "position", **{"metrics.acc": 1.0}) if is_second else record

    found = audit.audit(COMMAND, start=Twice(places))

    assert found.is_exact, verdicts.headline(found)


def test_what_is_only_shown_and_differs_each_time_is_a_note() -> None:
    def times(record: Record, start: Start) -> Record:
        seconds = {"seconds": start.trial + start.resumes / 10}
        return faked.other(
            faked.other(record, "vars", **seconds), "position", **{"metrics.time": start.trial}
        )

    found = of(times)

    assert found.is_exact, verdicts.headline(found)
    assert found.notes == ["position metrics.time, vars seconds: something else each time, but only told"]


def test_generators_that_are_not_seeded_and_not_used_are_a_note() -> None:
    found = of(lambda record, start: faked.other(record, "random", **{"numpy.state.key": id(start)}))

    assert found.is_exact, verdicts.headline(found)
    assert found.notes == ["NumPy's generator is not seeded; nothing that was trained depends on it"]


def test_the_same_thing_lost_by_each_resume_is_found_at_the_first() -> None:
    def loses(record: Record, start: Start) -> Record:
        lost = start.resumes and record.why == "boundary"
        return faked.other(record, "optimizer", **{"exp_avg.weight": faked.tensor("?")}) if lost else record

    found = of(loses)

    assert not found.is_exact
    assert (found.findings[0].at, found.findings[0].what) == (
        At("batch", 0, 3, 3),
        "optimizer exp_avg of weight",
    )


def test_a_script_that_begins_again_does_not_pass_for_exact() -> None:
    class Anew(Script):
        def _records(self, done: Sequence[Record], plan: Mapping[str, Any]) -> Iterator[Record]:
            return super()._records([], plan)

    (finding,) = audit.audit(COMMAND, start=Anew(faked.boundaries(5, 5))).findings

    assert (finding.kind, finding.at) == ("state", At("batch", 0, 2, 2))
    assert "did not resume: it started fresh" in finding.text
    assert "RunState.load" in finding.fix


def test_all_of_an_audit_is_thrown_away_also_when_it_is_interrupted() -> None:
    folders = []

    def interrupted(command: object, environment: Mapping[str, str], log: Path) -> int:
        folders.append(log.parents[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit.audit(COMMAND, start=interrupted)

    assert [folder.exists() for folder in folders] == [False]


@pytest.mark.parametrize("plan", ["nonsense", "7", "[]", "{}", '{"trace": "x"}'])
def test_a_plan_that_is_none_is_refused_with_what_sets_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setenv("RESUMABLE_AUDIT", plan)

    with pytest.raises(UsageError, match=r"RESUMABLE_AUDIT is .*, which is no plan of an audit") as caught:
        RunState.load(run_dir, model=torch.nn.Linear(1, 1))

    assert "unset RESUMABLE_AUDIT" in str(caught.value)


FAILS = [sys.executable, "-c", "print('so far'); raise SystemExit(3)"]


def test_the_command_prints_the_verdict_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["audit", "--", *FAILS]) == 1

    printed = capsys.readouterr()
    assert "the script came to no boundary: it ended with exit code 3" in printed.out
    assert "so far" in printed.out
    assert "exit code 3" not in printed.err


def test_the_command_prints_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["audit", "--json", "--steps", "5", "--", *FAILS]) == 1

    found = json.loads(capsys.readouterr().out)
    assert (found["exact"], found["command"], found["attempts"][0]["code"]) == (False, FAILS, 3)


@pytest.mark.parametrize(
    "given",
    [["audit"], ["audit", "--"], ["audit", "--at", "20", "--", "x"], ["audit", "--", "no-such-thing"]],
)
def test_a_command_that_says_nothing_to_start_exits_with_2(given: list[str]) -> None:
    assert app.main(given) == 2


# A training as people write them, into which tests put what is wrong.
SCRIPT = """
import os, random, sys, time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from resumable import Preempt, Remote, RunState

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(9, 2)), batch_size=3, shuffle=True)


def step(batch):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def main({options}):
    parts = dict(model=model, optimizer=optimizer, loader=loader)
    state = RunState.load({run_dir}, **{{**parts, **options}})
    for epoch in state.epochs(4):
        for (batch,) in state.batches():
            {batch}
            loss = step(batch)
            {stepped}
        {end}
    state.close()


{main}
"""
PIECES = {
    "run_dir": '"runs/exp"',
    "options": "**options",
    "main": "main()",
    "batch": "",
    "stepped": "",
    "end": "",
}


def audited(forks: Forks, folder: Path, script: str = "", **pieces: str) -> Verdict:
    """Audit a script that is made of these pieces, or another one that begins as it does."""
    path = folder / "train.py"
    begin = SCRIPT.partition("\ndef main")[0]
    path.write_text(begin + script if script else SCRIPT.format(**{**PIECES, **pieces}))
    return audit.audit([sys.executable, str(path)], steps=8, start=forks)


CORRECT: dict[str, dict[str, str]] = {
    "plain": {},
    "saves in the body": {"stepped": "state.save() if state.step % 2 else None"},
    "saves by itself": {"main": "main(every=1)"},
    "no signals": {"main": "main(preempt=Preempt(signals=()))"},
    "preemption is caught": {
        "main": "from resumable import Preempted\ntry: main(preempt=Preempt(on_preempt='raise'))\n"
        "except Preempted: pass"
    },
    "what ends it is caught": {
        "main": "for _ in range(3):\n    try: main(); break\n    except SystemExit: pass"
    },
    "nothing is to be resumed": {"main": "main(resume='never')"},
    "a local of the loop behind it": {"end": "state.save(loss=loss.item())"},
    "a name that only a first start assigns": {"batch": "scale = scale if state.resumed else 1.0"},
    "times in vars": {"stepped": "state.vars['seconds'] = time.time()"},
    "times as metrics": {"end": "state.save(seconds=time.time())"},
    "values that are no JSON": {
        "stepped": "state.vars['x'] = {3: float('nan'), 'a': (2**70, b'x')}; state.save(loss=float('inf'))"
    },
    "files beside it": {"stepped": "print(loss.item(), file=open('log.txt', 'a'))"},
    "workers": {"main": "main(loader=DataLoader(loader.dataset, 3, shuffle=True, num_workers=2))"},
    "seeds of samples": {"main": "main(sample_seeds=True)"},
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_gives_no_alarm(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)

    found = audited(forks, tmp_path, **CORRECT[name])

    assert found.is_exact, verdicts.headline(found)
    assert len(found.stops) == 5


OWN_LOOPS = {
    "steps": "state = RunState.load('runs/exp', model=model, optimizer=optimizer)\n"
    "for _ in state.steps(30): step(torch.randn(3, 2))\n",
    "save alone": "state = RunState.load('runs/exp', model=model, optimizer=optimizer)\n"
    "while state.vars.setdefault('done', 0) < 12:\n"
    "    step(torch.randn(3, 2))\n    state.vars['done'] += 1\n    state.save()\n",
    "epochs": "state = RunState.load('runs/exp', model=model, optimizer=optimizer)\n"
    "for _ in state.epochs(9):\n    for (batch,) in loader: step(batch)\n",
    "restored by itself": "given = {'model': model, 'optimizer': optimizer, 'loader': loader}\n"
    "state = RunState.load('runs/exp', **given)\n"
    "if state.run.checkpoints(): state.restore('newest')\n"
    "for _ in state.epochs(4):\n    for (batch,) in state.batches(): step(batch)\n",
    "two loaders": "more = DataLoader(TensorDataset(torch.randn(6, 2)), batch_size=3, shuffle=True)\n"
    "both = {'train': loader, 'val': more}\n"
    "state = RunState.load('runs/exp', model=model, optimizer=optimizer, loader=both)\n"
    "for _ in state.epochs(4):\n    for (batch,) in state.batches('train'): step(batch)\n"
    "    model.eval()\n"
    "    for (batch,) in state.batches('val'):\n"
    "        state.vars['sum'] = state.vars.get('sum', 0.0) + model(batch).sum().item()\n"
    "    model.train()\n"
    "    state.save()\n",
    "accumulation": "state = RunState.load('runs/exp', model=model, optimizer=optimizer, loader=loader)\n"
    "for _ in state.epochs(6):\n    for (batch,) in state.batches():\n"
    "        model(batch).square().mean().backward()\n"
    "        if state.batch % 2: optimizer.step(); optimizer.zero_grad()\n",
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", OWN_LOOPS)
def test_a_correct_loop_of_another_shape_gives_no_alarm(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)

    found = audited(forks, tmp_path, OWN_LOOPS[name])

    assert found.is_exact, verdicts.headline(found)
    assert len(found.stops) >= 2


@pytest.mark.heavy
def test_the_runs_and_the_remote_of_the_script_are_not_touched(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir, remote = tmp_path / "runs" / "exp", tmp_path / "remote"
    with RunState.load(run_dir, model=torch.nn.Linear(1, 1), remote=remote.as_uri()) as state:
        state.save()
    before = files_of(tmp_path)

    found = audited(
        forks,
        tmp_path,
        run_dir=repr(str(run_dir)),
        main=f"main(remote=Remote({remote.as_uri()!r}, push='all'), every=1, "
        f"trace={str(tmp_path / 'trace')!r})",
    )

    assert found.is_exact, verdicts.headline(found)
    assert {name: at for name, at in files_of(tmp_path).items() if name != "train.py"} == before


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    found = (path for path in folder.rglob("*") if not path.is_dir())
    return {str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in found}


BROKEN: dict[str, tuple[dict[str, str], str, str, str]] = {
    "draws that depend on the start": (
        {"batch": "state.resumed or torch.rand(1)"},
        "randomness",
        "torch's generator",
        "step 2",
    ),
    "an early end after a resume": (
        {"stepped": "if state.resumed and state.step == 4: sys.exit(0)"},
        "script",
        "the script",
        "exit code 0",
    ),
    "a second run": (
        {"main": "RunState.load('runs/first', model=model)\nmain()"},
        "script",
        "the script",
        "an audit follows one run, and the script has begun runs/first and now runs/exp",
    ),
    "no resume at all": (
        {"main": "RunState.load = RunState\nmain()"},
        "script",
        "the script",
        "a RunState is not made by its constructor",
    ),
}


@pytest.mark.heavy
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_script_is_reported_as_what_it_is(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pieces, kind, what, text = BROKEN[name]

    found = audited(forks, tmp_path, **pieces)

    (finding, *_) = found.findings
    assert (finding.kind, finding.what) == (kind, what), verdicts.headline(found)
    assert text in finding.text


@pytest.mark.nightly
def test_a_start_that_hangs_is_ended_and_its_place_is_reported(tmp_path: Path, forks: Forks) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(**{**PIECES, "batch": "time.sleep(60)"}))
    command = [sys.executable, str(path)]
    made = Trials(command, tmp_path, 8, start=forks, told=lambda _: None, deterministic=False)

    (attempt,) = made.straight("straight", plan={"limit": 2}).attempts

    assert attempt.has_hung
    assert re.search(r"train.py., line \d+ in main", attempt.log)
    assert re.search(r"it hung, and was ended after \d+ s", attempt.end)


UNSEEN = """
class Veiled:
    def __init__(self, batch):
        object.__setattr__(self, "batch", batch)

    def __getattribute__(self, name):
        if name == "__dict__":
            raise ValueError("behind a veil")
        return object.__getattribute__(self, name)
"""


@pytest.mark.heavy
def test_batches_that_cannot_be_told_apart_are_noted_with_the_verdict(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = f"""{UNSEEN}
def collate(rows):
    return Veiled(torch.stack([row[0] for row in rows]))

loader = DataLoader(loader.dataset, batch_size=3, shuffle=True, collate_fn=collate)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
for epoch in state.epochs(4):
    for veiled in state.batches():
        step(veiled.batch)
state.close()
"""

    found = audited(forks, tmp_path, script)

    assert found.is_exact, verdicts.headline(found)
    assert "the batches were not compared whole" in found.notes[0]
    assert "ValueError: behind a veil" in found.notes[0]


THREADED = """
import threading
goes_on = threading.Event()
threading.Thread(target=goes_on.wait).start()
main()
goes_on.set()
"""


@pytest.mark.heavy
def test_a_script_that_does_not_leave_is_ended_and_reported_as_such(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "LEAVES", 2.0)

    (finding,) = audited(forks, tmp_path, main=THREADED).findings

    assert (finding.kind, finding.what) == ("script", "the script")
    assert "it did not leave when it was told to, and was ended after" in finding.text
    assert "daemon threads" in finding.fix


OF_TWO = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
model = {wrapped}
noise = torch.Generator().manual_seed(dist.get_rank())
sampler = DistributedSampler(loader.dataset, seed=3)
loader = DataLoader(loader.dataset, batch_size=1, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader, {given})
for epoch in state.epochs(4):
    sampler.set_epoch(epoch)
    for (batch,) in state.batches():
        step(batch * (1 + torch.rand((), generator=noise)))
state.close()
dist.destroy_process_group()
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.nightly
@pytest.mark.parametrize("wrapped", ["DistributedDataParallel(model)", "fully_shard(model)"])
@pytest.mark.parametrize(("given", "is_exact"), [("", True), ("variables=False", False)])
def test_a_training_of_two_ranks_is_audited_as_torchrun_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks, given: str, is_exact: bool, wrapped: str
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = SCRIPT.partition("\ndef main")[0]
    (tmp_path / "train.py").write_text(begin + OF_TWO.replace("{given}", given).replace("{wrapped}", wrapped))
    found = audit.audit([*TORCHRUN, "--nproc-per-node=2", str(tmp_path / "train.py")], steps=6, start=forks)

    assert found.is_exact is is_exact, verdicts.headline(found)
    if not is_exact:
        assert found.findings[0].kind in ("randomness", "state")
        assert found.findings[0].names[0].startswith("noise (torch.Generator")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("resume", "restarts", "said"),
    [
        ("auto", 1, "exact"),
        ("never", 0, "FAILED: after a resume the script did not come to step 3 (epoch 0, batch 3)"),
    ],
)
def test_what_torchrun_starts_again_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, restarts: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ordered = f'import os\nos.environ["RESUMABLE_RESUME"] = "{resume}"\n'
    (tmp_path / "train.py").write_text(ordered + SCRIPT.format(**PIECES))

    found = audit.audit(
        [*TORCHRUN, f"--max-restarts={restarts}", str(tmp_path / "train.py")], steps=6, at=[2]
    )

    assert ": ".join(verdicts.headline(found)).startswith(said)
