"""Sharded trainings on nodes that share no disk: each keeps what its processes need, the remote all."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gloo
import pytest
import sharded_training
import torch
from sharded_training import Net, differing, of_node, read_by_dcp, run, values

from resumable import CannotRead, RankLost, Ranks, Run, RunState, Unsupported, load_weights
from resumable.cli.app import main
from resumable.files import codec
from resumable.progress import Progress
from resumable.remote.background import Pusher
from resumable.remote.pull import pull
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import history, manifest
from resumable.run.checkpoint import Checkpoint
from resumable.run.history_writer import History

pytestmark = pytest.mark.skipif(not sharded_training.CAN_SHARD, reason=sharded_training.WHY_NOT)
_NODES = [
    ("fsdp-2", [0, 1]),
    ("hsdp", [0, 0, 1, 1]),
    ("fsdp-3", [0, 1, 1]),
    ("tp", [0, 1]),
    ("fsdp-tp", [0, 0, 1, 1]),
    ("hsdp", [0, 1, 2, 3]),
    ("fsdp-tp", [0, 1, 1, 0]),
    ("fsdp-tp-3", [0, 1, 2, 0, 1, 2]),
]
_CASES = [pytest.param(*one, marks=[] if one in _NODES[:2] else pytest.mark.heavy) for one in _NODES]


def newest(run_dir: Path) -> Checkpoint:
    """Return the newest checkpoint of a run."""
    run = Run(str(run_dir))
    return run.open(run.numbers()[-1])


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's newest checkpoint."""
    model = Net()
    load_weights(model, path)
    return model.state_dict()


def shards(folder: Path, node: int) -> set[str]:
    """Return the names of the newest checkpoint's files of boxes on a node."""
    about = newest(of_node(folder, node)).about
    return {file for file in about.files if codec.shard_of(file) is not None}


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize(("kind", "nodes"), _CASES)
def test_each_node_resumes_from_its_own_disk(tmp_path: Path, kind: str, nodes: list[int]) -> None:
    whole = values(run(kind, tmp_path / "whole", 7, tmp_path, nodes=nodes))

    for seed, step in enumerate((2, 5, 6)):
        run(kind, tmp_path / "exp", 7, tmp_path, nodes=nodes, seed=seed, dies=step)
    ended = values(run(kind, tmp_path / "exp", 7, tmp_path, nodes=nodes, seed=4))

    for now, then in zip(ended, whole, strict=True):
        assert differing(now["ended"], then["ended"]) == []
        assert differing(now["own"], then["own"]) == []
        assert now["drawn"].tobytes() == then["drawn"].tobytes()


@pytest.mark.heavy
def test_a_disk_has_what_its_processes_need_and_replicas_are_whole(tmp_path: Path) -> None:
    run("fsdp-2", tmp_path / "exp", 2, tmp_path, nodes=[0, 1])
    run("hsdp", tmp_path / "replicas", 2, tmp_path, nodes=[0, 0, 1, 1])
    run("hsdp", tmp_path / "pairs", 2, tmp_path, nodes=[0, 1, 2, 3])

    assert not shards(tmp_path / "exp", 0) & shards(tmp_path / "exp", 1)
    one, other = (weights(of_node(tmp_path / "replicas", node)) for node in (0, 1))
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    # Nodes 0 and 1 have one replica, nodes 2 and 3 the other.
    for node in range(4):
        about = newest(of_node(tmp_path / "pairs", node)).about
        assert {codec.shard_of(file) for file in about.elsewhere} == {node ^ 1}
        assert about.is_first_part is (node == 0)


@pytest.mark.heavy
def test_a_part_says_what_is_missing_until_all_is_copied_together(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = values(run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1]))
    runs = [of_node(tmp_path / "exp", node) for node in (0, 1)]

    for own in runs:
        assert main(["verify", str(own)]) == 0
        assert "3 files on other disks" in capfd.readouterr().out
        assert main(["ls", str(own)]) == 0
        assert "a part" in capfd.readouterr().out
        for command in (["show"], ["export", "-o", str(tmp_path / "x.safetensors")]):
            assert main([command[0], str(own), *command[1:]]) == 1
            assert "3 of its files (model/shard-000" in capfd.readouterr().err
        with pytest.raises(CannotRead, match="only a part of checkpoint"):
            weights(own)
        with pytest.raises(CannotRead, match="only a part of checkpoint"):
            newest(own).pin()
    (alone,) = run("plain", runs[0], 6, tmp_path)
    assert isinstance(alone.error, CannotRead)
    assert "resumable pull" in str(alone.error)

    there = newest(runs[1]).path
    shutil.copytree(there, newest(runs[0]).path, dirs_exist_ok=True, ignore=lambda *_: ["manifest.json"])
    assert main(["verify", str(runs[0])]) == 0
    assert "other disks" not in capfd.readouterr().out
    for one in values(run("fsdp-tp", runs[0], 4, tmp_path)):
        assert differing(one["begun"], saved[0]["ended"]) == []


@pytest.mark.heavy
def test_nodes_that_have_changed_their_places_are_told(tmp_path: Path) -> None:
    values(run("fsdp-2", tmp_path / "exp", 2, tmp_path, nodes=[0, 1]))

    for one in run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[1, 0]):
        assert isinstance(one.error, CannotRead)
        assert "only a part of checkpoint" in str(one.error)
    values(run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1]))


def _with_remote(folder: Path, push: str) -> dict[str, Any]:
    return {"load": {"remote": f"file://{folder / 'bucket'}", "push": push}}


@pytest.mark.proves("local first")
@pytest.mark.heavy
@pytest.mark.parametrize("push", ["newest", "all"])
def test_each_node_pushes_its_own_and_a_lost_node_is_replaced(tmp_path: Path, push: str) -> None:
    plan = {"nodes": [0, 1], **_with_remote(tmp_path, push)}
    whole = values(run("fsdp-2", tmp_path / "whole", 7, tmp_path))
    saved = values(run("fsdp-2", tmp_path / "exp", 4, tmp_path, **plan))

    there = tmp_path / "bucket" / "checkpoints"
    if push == "all":
        # One for each save, and one at the end.
        assert len([*there.iterdir()]) == 3
    assert main(["pull", str(tmp_path / "pulled"), f"file://{tmp_path / 'bucket'}"]) == 0
    assert main(["verify", str(tmp_path / "pulled")]) == 0
    for one in values(run("fsdp-tp", tmp_path / "pulled", 4, tmp_path)):
        assert differing(one["begun"], saved[0]["ended"]) == []

    shutil.rmtree(tmp_path / "node1")
    ended = values(run("fsdp-2", tmp_path / "exp", 7, tmp_path, seed=1, **plan))
    for now, then in zip(ended, whole, strict=True):
        assert differing(now["own"], then["own"]) == []


@pytest.mark.heavy
def test_torchs_own_reader_reads_what_was_pulled_from_two_nodes(tmp_path: Path) -> None:
    saved = values(
        run("fsdp-2", tmp_path / "exp", 2, tmp_path, nodes=[0, 1], **_with_remote(tmp_path, "all"))
    )
    assert main(["pull", str(tmp_path / "pulled"), f"file://{tmp_path / 'bucket'}"]) == 0

    folder = newest(tmp_path / "pulled").path / "model"
    for found in values(gloo.run(3, read_by_dcp, folder, folder=tmp_path)):
        for name, value in found.items():
            assert value.tobytes() == saved[0]["ended"][name].tobytes()


@pytest.mark.heavy
def test_what_a_kill_has_left_in_the_remote_is_complete_or_not_to_be_seen(tmp_path: Path) -> None:
    plan = {"nodes": [0, 1], "every": 1, **_with_remote(tmp_path, "all")}
    whole = values(run("fsdp-2", tmp_path / "whole", 9, tmp_path))

    for seed, step in enumerate((2, 4, 6, 8)):
        run("fsdp-2", tmp_path / "exp", 9, tmp_path, seed=seed, dies=step, **plan)
        there = Remote(Store(f"file://{tmp_path / 'bucket'}"))
        for number, name in there.numbers().items():
            pulled = Run(str(tmp_path / f"pulled{step}-{number}"))
            pulled.acquire()
            pull(there, name, pulled, lambda size: None).verify()
            assert weights(pulled.path)
            pulled.release()
    ended = values(run("fsdp-2", tmp_path / "exp", 9, tmp_path, seed=9, **plan))

    for now, then in zip(ended, whole, strict=True):
        assert differing(now["own"], then["own"]) == []
    assert max(there.numbers()) == newest(of_node(tmp_path / "exp", 0)).about.number


@pytest.mark.heavy
def test_what_other_nodes_have_not_pushed_is_told_at_the_end(tmp_path: Path) -> None:
    run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1])
    url = f"file://{tmp_path / 'bucket'}"

    assert main(["push", str(of_node(tmp_path / "exp", 1)), url]) == 6
    assert main(["push", str(of_node(tmp_path / "exp", 0)), url]) == 6
    assert Remote(Store(url)).numbers() == {}
    assert main(["push", str(of_node(tmp_path / "exp", 1)), url]) == 0
    assert Remote(Store(url)).numbers() == {}
    assert not (tmp_path / "bucket" / "newest.json").exists()
    assert main(["push", str(of_node(tmp_path / "exp", 0)), url]) == 0
    assert Remote(Store(url)).numbers() == {3: "000003-step-00000004"}


def _with_extra(rank: int, run_dir: Path, nodes: list[int], what: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, optimizer, _ = sharded_training.make("hsdp" if len(nodes) == 4 else "fsdp-2", 0)
    elements = torch.arange(1.0 if what == "small" else 64.0)
    mesh = init_device_mesh("cpu", (len(nodes),))
    table = {"t": distribute_tensor(torch.zeros_like(elements), mesh, [Shard(0)])}
    where = of_node(run_dir, nodes[rank])
    try:
        with RunState.load(
            where,
            model=model,
            optimizer=optimizer,
            extra={"table": table},
            ranks=Ranks(shared=False, timeout=10),
        ) as state:
            if not state.resumed:
                table["t"] += 7
            for _ in state.steps(state.step + 1):
                state.save().wait()
    except (Unsupported, RankLost) as exc:
        return str(exc)
    return str(sharded_training.gathered(table["t"]).tolist())


@pytest.mark.heavy
def test_a_tensor_of_which_a_node_has_nothing_is_resumed_there(tmp_path: Path) -> None:
    for _ in range(2):
        ended = values(gloo.run(2, _with_extra, tmp_path / "exp", [0, 1], "small", folder=tmp_path))
        assert ended == ["[7.0]"] * 2


@pytest.mark.heavy
def test_a_tensor_that_no_copy_would_have_as_a_whole_is_refused(tmp_path: Path) -> None:
    ended = values(gloo.run(4, _with_extra, tmp_path / "exp", [0, 0, 1, 1], "wide", folder=tmp_path))
    assert any("extra.table.t is sharded over more nodes than the model" in one for one in ended)
    assert all(Run(str(of_node(tmp_path / "exp", node))).numbers() == [] for node in (0, 1))


@pytest.mark.heavy
def test_the_commands_that_the_message_names_make_a_part_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = {"nodes": [0, 1], **_with_remote(tmp_path, "all")}
    run("fsdp-2", tmp_path / "exp", 4, tmp_path, **plan)
    own, url = of_node(tmp_path / "exp", 1), f"file://{tmp_path / 'bucket'}"

    assert main(["pull", str(own), url]) == 0
    assert main(["pull", str(own), url]) == 0
    assert "intact" in capfd.readouterr().out
    assert main(["verify", str(own)]) == 0
    assert weights(own)


@pytest.mark.heavy
def test_one_push_by_hand_from_each_node_and_one_more_are_enough(tmp_path: Path) -> None:
    run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1])
    url = f"file://{tmp_path / 'bucket'}"
    first, second = (str(of_node(tmp_path / "exp", node)) for node in (0, 1))

    assert main(["push", first, url, "--which", "all"]) == 6
    assert main(["push", second, url, "--which", "all"]) == 0
    assert main(["push", first, url, "--which", "all"]) == 0
    assert [*Remote(Store(url)).numbers()] == [1, 2, 3]


@pytest.mark.heavy
def test_nodes_of_another_replica_leave_what_is_in_the_remote_alone(tmp_path: Path) -> None:
    plan = {"nodes": [0, 1, 2, 3], **_with_remote(tmp_path, "newest")}
    run("hsdp", tmp_path / "exp", 2, tmp_path, **plan)
    url = f"file://{tmp_path / 'bucket'}"
    there = Remote(Store(url)).numbers()

    assert main(["push", str(of_node(tmp_path / "exp", 2)), url]) == 6
    assert Remote(Store(url)).numbers() == there != {}


@pytest.mark.heavy
def test_fewer_nodes_go_on_from_what_the_remote_has(tmp_path: Path) -> None:
    plan = {"nodes": [0, 1], **_with_remote(tmp_path, "all")}
    run("fsdp-2", tmp_path / "exp", 2, tmp_path, **plan)
    run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1])

    plain = _with_remote(tmp_path, "newest")
    (alone,) = values(run("plain", of_node(tmp_path / "exp", 0), 3, tmp_path, **plain))
    assert len(alone["seen"]) == 1, "it has not gone on behind step 2, which is what the remote has"


@pytest.mark.heavy
def test_each_push_is_completed_though_saves_follow_each_other_fast(tmp_path: Path) -> None:
    plan = {"nodes": [0, 1], "every": 1, **_with_remote(tmp_path, "newest"), "slow": 0.3}
    run("fsdp-2", tmp_path / "exp", 9, tmp_path, **plan)
    pushes = history.pushed(history.read(of_node(tmp_path / "exp", 0)))
    assert len(pushes[f"file://{tmp_path / 'bucket'}"]) > 1


@pytest.mark.heavy
def test_a_push_tells_what_it_sent_while_it_waited_for_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("fsdp-2", tmp_path / "exp", 4, tmp_path, nodes=[0, 1], **_with_remote(tmp_path, "newest"))
    sent = [line["sent"] for line in history.read(of_node(tmp_path / "exp", 0)) if line["event"] == "push"]
    assert all(sent)
    capfd.readouterr()
    assert main(["ls", str(of_node(tmp_path / "exp", 0))]) == 0
    assert "pushed" in capfd.readouterr().out
    assert main(["ls", str(of_node(tmp_path / "exp", 1))]) == 0
    assert "not pushed" not in capfd.readouterr().out


@pytest.mark.heavy
def test_another_checkpoint_of_that_number_there_keeps_no_node_waiting(tmp_path: Path) -> None:
    run("fsdp-2", tmp_path / "exp", 2, tmp_path, nodes=[0, 1])
    one = newest(of_node(tmp_path / "exp", 1))
    # Begun by hand, from a training that went on elsewhere.
    other = replace(one.about, run_id=one.about.run_id, files={"state.json": one.about.files["state.json"]})
    begun = tmp_path / "bucket" / "checkpoints" / one.path.name / "pushing.json"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(manifest.to_json(replace(other, elsewhere={})))

    started = Run(str(of_node(tmp_path / "exp", 1)))
    pusher = Pusher(
        started,
        Remote(Store(f"file://{tmp_path / 'bucket'}")),
        "newest",
        None,
        None,
        history=History(started),
        progress=Progress(False),
        tell=lambda *_: None,
        seen=lambda _: None,
        commits=False,
    )
    pusher.start(one.about.run_id, None)
    end = time.monotonic() + 20
    while not pusher._given_up and time.monotonic() < end:
        # The pusher has a thread of its own.
        time.sleep(0.01)
    pusher.hand_over()
    assert pusher._given_up == {one.about.number}
    assert [path.name for path in begun.parent.iterdir()] == ["pushing.json"]
