"""The copy of a run elsewhere: each checkpoint is complete there or it is not there, whatever ends a push."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import S3, Place, ProxiedS3, place_at

from resumable import Boundary, CheckpointDamaged, FormatTooNew, RemoteError
from resumable.files.large_files import Content
from resumable.remote.push import Sent, missing, push
from resumable.remote.run_copy import MARK, Remote
from resumable.remote.storage import Store
from resumable.run import checkpoint, manifest
from resumable.run.checkpoint import Checkpoint
from resumable.run.directory import Run
from resumable.run.manifest import Best, Goal, Manifest
from resumable.run.policy import Every, Keep

ALL = pytest.mark.parametrize("place", ["memory", "file", "s3", "sftp", "sshfs"], indirect=True)
GOAL = Goal("loss", maximize=False)


def about_of(number: int, *, step: int | None = None, best: int | None = None, **metrics: float) -> Manifest:
    """Return the facts of a checkpoint that has no files yet."""
    return Manifest(
        number=number,
        parent=None,
        run_id="a1b2",
        saved=f"2026-01-01T0{number % 10}:00:00+00:00",
        boundary=Boundary.STEP,
        epoch=0,
        batch=0,
        step=number * 10 if step is None else step,
        samples=0,
        metrics=metrics,
        best=None if best is None else Best(GOAL, 0.5, best),
        files={},
        parts={},
        built={},
        environment={},
    )


def commit(run: Run, number: int, contents: dict[str, bytes] | None = None, **about: Any) -> Checkpoint:
    """Save a checkpoint of some small files, or of these."""
    contents = contents or {
        "model.safetensors": b"weights %d" % number,
        "state.json": b"state %d" % number,
        "ranks/00000.json": b"rank %d" % number,
    }
    files = {name: Content(content) for name, content in contents.items()}
    return checkpoint.commit(run.folder, about_of(number, **about), files)[0]


def sealed(of: int, **changes: Any) -> bytes:
    """Return the text of a manifest in which something is not as it should be."""
    return manifest.seal({**manifest.unseal(manifest.to_json(about_of(of))), **changes})


def nowhere(size: int) -> None:
    """Take no note of what is moved."""


def contents_of(store: Store, found: Checkpoint) -> dict[str, bytes | None]:
    """Return what is there of a checkpoint, with what is too much."""
    folder = f"checkpoints/{found.path.name}"
    return {name: store.read(f"{folder}/{name}", 1 << 26) for name in store.sizes(folder)}


def whole(found: Checkpoint) -> dict[str, bytes | None]:
    """Return what has to be there of a checkpoint."""
    return {name: (found.path / name).read_bytes() for name in [*found.about.files, manifest.NAME]}


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    """A run with the checkpoints 1, 2 and 3, of which 2 is the best."""
    made = Run(run_dir)
    made.acquire()
    for number, loss in ((1, 0.9), (2, 0.1), (3, 0.5)):
        commit(made, number, best=min(number, 2), loss=loss)
    yield made
    made.release()


@pytest.fixture(scope="session", name="shelf")
def a_shelf(s3: S3) -> str:
    """One bucket for all: to make one, and the first file in it, takes a while."""
    return s3.bucket()


@pytest.fixture(name="place")
def a_place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A place of any kind, in memory if a test does not say which."""
    kind = getattr(request, "param", "memory")
    if kind == "s3":
        server, bucket = request.getfixturevalue("s3"), request.getfixturevalue("shelf")
        yield Place(kind, f"s3://{bucket}/{uuid.uuid4().hex}", server.options())
    else:
        yield from place_at(kind, request)


@pytest.fixture
def remote(place: Place) -> Remote:
    """An empty remote."""
    return Remote(Store(place.url, place.options()))


@pytest.fixture
def broken(proxied_s3: ProxiedS3, shelf: str) -> Remote:
    """An empty remote behind the proxy."""
    url = f"s3://{shelf}/{uuid.uuid4().hex}"
    return Remote(Store(url, proxied_s3.options()))


def behind(server: S3, broken: Remote) -> Remote:
    """Return the same remote without the proxy in between, with nothing remembered."""
    return Remote(Store(broken.store.url, {**server.options(), "endpoint_url": server.direct}))


@pytest.mark.quick(3)
@ALL
def test_what_is_pushed_is_there_and_nothing_else(run: Run, remote: Remote) -> None:
    told: list[int] = []
    for number in (1, 3):
        found = run.open(number)
        assert push(remote, found, told.append) == Sent(found.about.size, 0)
        assert contents_of(remote.store, found) == whole(found)
    assert sum(told) == run.open(1).about.size + run.open(3).about.size
    assert remote.numbers() == {1: "000001-step-00000010", 3: "000003-step-00000030"}
    assert remote.about("000003-step-00000030") == (found.about, (found.path / manifest.NAME).read_bytes())


@ALL
def test_what_is_complete_is_not_sent_again(run: Run, remote: Remote) -> None:
    found = run.open(1)
    assert missing(remote, found) == found.about.size
    push(remote, found, nowhere)
    told: list[int] = []
    assert push(remote, found, told.append) == Sent(0, 0)
    assert missing(remote, found) is None
    assert sum(told) == found.about.size


@pytest.mark.proves("local first")
@pytest.mark.heavy
def test_a_push_that_ends_anywhere_leaves_nothing_half_visible(
    run: Run, broken: Remote, proxied_s3: ProxiedS3
) -> None:
    files = {"model.safetensors": os.urandom(50_000), "state.json": b"state", "ranks/00000.json": b"rank"}
    sent, there = [], behind(proxied_s3, broken)
    for requests in range(100):
        found = commit(run, requests + 4, files)
        proxied_s3.rules.clear()
        proxied_s3.proxy.forget()
        proxied_s3.rules.add("status", status=403, after=requests)
        try:
            push(broken, found, nowhere)
        except RemoteError:
            is_whole = False
        else:
            is_whole = True
        complete = there.numbers()
        if found.about.number in complete:
            assert {**contents_of(there.store, found), MARK: b""} == {**whole(found), MARK: b""}
        lacking = missing(there, found)
        rest = push(there, found, nowhere).sent
        assert rest == (lacking or 0)
        assert contents_of(there.store, found).items() >= whole(found).items()
        sent.append(rest)
        if is_whole:
            break
    assert is_whole
    # Not less with each request: files are sent several at a time, in any order
    assert (sent[0], sent[-1]) == (found.about.size, 0)
    assert {0, found.about.size} < {*sent}


@pytest.mark.heavy
def test_a_push_over_another_content_leaves_one_of_them_or_none(
    run: Run, broken: Remote, proxied_s3: ProxiedS3, tmp_path: Path
) -> None:
    found, there = commit(run, 4, {"model.safetensors": b"new"}), behind(proxied_s3, broken)
    other = commit(Run(tmp_path / "other"), 4, {"model.safetensors": b"old"})
    is_whole = False
    for requests in range(100):
        push(there, other, nowhere)
        proxied_s3.rules.clear()
        proxied_s3.rules.add("status", status=403, after=requests)
        with contextlib.suppress(RemoteError):
            push(broken, found, nowhere)
            is_whole = True
        if there.numbers():
            assert {**contents_of(there.store, found), MARK: b""} in (
                {**whole(found), MARK: b""},
                {**whole(other), MARK: b""},
            )
        if is_whole:
            break
    assert is_whole


@pytest.mark.heavy
def test_the_next_push_sends_only_what_had_not_arrived(
    run: Run, broken: Remote, proxied_s3: ProxiedS3
) -> None:
    found = commit(run, 4, {"model.safetensors": os.urandom(200_000), "state.json": os.urandom(1000)})
    proxied_s3.rules.add("status", status=403, path="state.json")
    with pytest.raises(RemoteError, match=r"state\.json cannot be written"):
        push(broken, found, nowhere)
    proxied_s3.rules.clear()
    proxied_s3.proxy.forget()
    told: list[int] = []
    assert push(broken, found, told.append) == Sent(1000, 0)
    assert proxied_s3.proxy.seen.received < 20_000
    assert sum(told) == found.about.size
    assert contents_of(behind(proxied_s3, broken).store, found) == whole(found)


@ALL
@pytest.mark.quick(2)
def test_another_content_of_the_same_name_and_size_is_replaced(
    run: Run, remote: Remote, tmp_path: Path
) -> None:
    other = commit(Run(tmp_path / "other"), 1, {"model.safetensors": b"WEIGHTS 1", "loader.json": b"1"})
    push(remote, other, nowhere)
    found = run.open(1)
    assert push(remote, found, nowhere) == Sent(found.about.size, 0)
    assert contents_of(remote.store, found) == whole(found)


@ALL
@pytest.mark.quick(2)
def test_what_a_push_of_another_content_has_begun_is_replaced(
    run: Run, remote: Remote, tmp_path: Path
) -> None:
    folder = "checkpoints/000001-step-00000010"
    remote.store.write(f"{folder}/model.safetensors", b"WEIGHTS 1")
    remote.store.write(f"{folder}/{MARK}", sealed(1))
    assert push(remote, run.open(1), nowhere).sent == run.open(1).about.size
    assert contents_of(remote.store, run.open(1)) == whole(run.open(1))


def test_what_is_not_ours_in_a_checkpoints_folder_stays(run: Run, remote: Remote) -> None:
    mine = ["checkpoints/000001-step-00000010/notes.txt", "checkpoints/mine/file"]
    for name in mine:
        remote.store.write(name, b"mine")
    push(remote, run.open(1), nowhere)
    push(remote, run.open(2), nowhere)
    assert remote.prune(Keep(1), None, [2]) == [1]
    remote.prune(Keep(1), None, [2])
    assert [name for name in mine if remote.store.read(name, 9) != b"mine"] == []
    assert len(remote.store.sizes("checkpoints/000001-step-00000010")) == 1


def test_of_two_of_one_number_the_one_that_is_pushed_stays(run: Run, remote: Remote, tmp_path: Path) -> None:
    push(remote, commit(Run(tmp_path / "other"), 1, step=7), nowhere)
    push(remote, run.open(1), nowhere)
    assert remote.numbers() == {1: "000001-step-00000010"}
    assert "000001-step-00000007" not in str(remote.store.sizes())


@pytest.mark.quick(3)
@ALL
def test_what_has_not_changed_is_copied_there_where_that_can_be_done(
    run: Run, remote: Remote, place: Place
) -> None:
    frozen = os.urandom(2 << 20)
    for number in (4, 5):
        found = commit(
            run, number, {"model-frozen.safetensors": frozen, "state.json": b"%d" % number}, best=4
        )
        told: list[int] = []
        sent = push(remote, found, told.append)
        assert contents_of(remote.store, found) == whole(found)
        assert sum(told) == found.about.size
    assert sent == (Sent(1, len(frozen)) if place.kind == "s3" else Sent(len(frozen) + 1, 0))


def test_a_frozen_group_goes_over_the_line_once(run: Run, broken: Remote, proxied_s3: ProxiedS3) -> None:
    frozen = os.urandom(2 << 20)
    for number in (4, 5):
        push(broken, commit(run, number, {"model-frozen.safetensors": frozen}), nowhere)
    assert len(frozen) < proxied_s3.proxy.seen.received < 1.1 * len(frozen)


def test_a_copy_of_what_is_damaged_there_is_not_made(run: Run, remote: Remote, s3: S3, shelf: str) -> None:
    remote = Remote(Store(f"s3://{shelf}/{uuid.uuid4().hex}", s3.options()))
    contents = {"model-frozen.safetensors": os.urandom(2 << 20)}
    push(remote, commit(run, 4, contents), nowhere)
    remote.store.write("checkpoints/000004-step-00000040/model-frozen.safetensors", bytes(2 << 20))
    found = commit(run, 5, contents)
    assert push(remote, found, nowhere) == Sent(2 << 20, 0)
    assert contents_of(remote.store, found) == whole(found)


@pytest.mark.parametrize("what", ["manifest", "file"])
def test_what_cannot_be_copied_is_sent(run: Run, remote: Remote, what: str) -> None:
    contents = {"model-frozen.safetensors": os.urandom(2 << 20)}
    push(remote, commit(run, 4, contents), nowhere)
    folder = "checkpoints/000004-step-00000040"
    if what == "manifest":
        remote.store.write(f"{folder}/{manifest.NAME}", b"damaged")
    else:
        remote.store.remove(f"{folder}/model-frozen.safetensors")
    remote = Remote(remote.store)
    assert push(remote, commit(run, 5, contents), nowhere) == Sent(2 << 20, 0)
    changed = {"model-frozen.safetensors": os.urandom(2 << 20)}
    assert push(remote, commit(run, 6, changed), nowhere) == Sent(2 << 20, 0)


@pytest.mark.heavy
def test_what_cannot_be_written_is_known_before_the_first_push(broken: Remote, proxied_s3: ProxiedS3) -> None:
    broken.claim("mine")
    proxied_s3.rules.add("status", status=403, method="PUT")
    with pytest.raises(RemoteError, match="cannot be written"):
        broken.begin("mine")


def test_what_is_damaged_here_is_not_pushed(run: Run, remote: Remote) -> None:
    found = run.open(1)
    (found.path / "model.safetensors").write_bytes(b"WEIGHTS 1")
    with pytest.raises(CheckpointDamaged, match="has the digest"):
        push(remote, found, nowhere)
    assert remote.store.sizes() == {}


@pytest.mark.heavy
def test_large_files_go_one_after_the_other(run: Run, broken: Remote, proxied_s3: ProxiedS3) -> None:
    found = commit(run, 4, {"model.safetensors": os.urandom(17 << 20), "state.json": b"state"})
    there = behind(proxied_s3, broken)
    assert push(there, found, nowhere).sent == found.about.size
    assert contents_of(there.store, found) == whole(found)


# What a store may do behind our back: at the moment in which a file is told to have moved


def test_a_file_gone_before_the_end_keeps_a_push_from_completing(run: Run, remote: Remote) -> None:
    found = run.open(1)
    first, *_, last = found.about.files

    def delete(size: int) -> None:
        # Each that arrives is reported, and the last one comes last
        if remote.store.sizes(f"checkpoints/{found.path.name}").get(last):
            remote.store.remove(f"checkpoints/{found.path.name}/{first}")

    with pytest.raises(RemoteError, match="has no bytes after it was sent; it should have"):
        push(remote, found, delete)
    assert remote.numbers() == {}


@pytest.mark.heavy
def test_a_manifest_that_is_not_as_it_was_written_does_not_stay(
    run: Run, broken: Remote, proxied_s3: ProxiedS3
) -> None:
    name = f"{run.open(1).path.name}/manifest.json"
    proxied_s3.rules.add("flip-answer", method="GET", path=name)
    with pytest.raises(RemoteError, match=r"manifest\.json is not as it was written"):
        push(broken, run.open(1), nowhere)
    assert behind(proxied_s3, broken).numbers() == {}


# Whose it is.


@ALL
@pytest.mark.quick(2)
def test_a_remote_is_that_of_the_run_that_claims_it_first(remote: Remote) -> None:
    assert remote.run_id() is None
    remote.claim("a1b2")
    remote.claim("a1b2")
    assert remote.begin("a1b2") == {}
    assert remote.run_id() == "a1b2"
    with pytest.raises(RemoteError, match=r"holds another run \(a1b2\) than this one \(c3d4\)"):
        remote.claim("c3d4")
    assert remote.store.sizes().keys() == {"run.json"}


def test_a_remote_whose_name_is_lost_is_still_that_of_its_checkpoints(run: Run, remote: Remote) -> None:
    assert remote.whose() == (None, {})
    push(remote, run.open(1), nowhere)
    assert remote.whose() == ("a1b2", remote.numbers())
    with pytest.raises(RemoteError, match="holds another run"):
        remote.claim("c3d4")
    remote.store.write("checkpoints/000001-step-00000010/manifest.json", b"damaged")
    remote.claim("c3d4")


@pytest.mark.parametrize("text", [b"", b"notes", b'{"a": 1}', manifest.seal({"name": "x"})])
def test_a_remote_with_a_run_json_that_is_not_ours_is_left_as_it_is(remote: Remote, text: bytes) -> None:
    remote.store.write("run.json", text)
    with pytest.raises(RemoteError, match=r"run\.json was not written by resumable, or is damaged"):
        remote.claim("a1b2")
    assert remote.store.read("run.json", 100) == text


def test_a_remote_of_a_newer_version_is_named_as_that(remote: Remote) -> None:
    remote.store.write("run.json", manifest.strict_json.seal({"format": 99, "run_id": "a"}))
    with pytest.raises(FormatTooNew, match=r"run\.json cannot be read: it was written in format 99"):
        remote.run_id()
    remote.store.write(
        "checkpoints/000001-step-00000010/manifest.json", manifest.strict_json.seal({"format": 99})
    )
    with pytest.raises(FormatTooNew, match="000001-step-00000010 cannot be read: it was written in format"):
        remote.about("000001-step-00000010")


# What is there.


def test_only_what_has_a_manifest_and_a_name_of_ours_is_a_checkpoint(remote: Remote) -> None:
    for name in ("000002-step-00000020", "000001-step-00000010", "..", "notes", "000003-step-30"):
        remote.store.write(f"checkpoints/{name}x/manifest.json", b"1")
        if name[0] == "0":
            remote.store.write(f"checkpoints/{name}/manifest.json", b"1")
    remote.store.write("checkpoints/000004-step-00000040/model.safetensors", b"1")
    remote.store.write("checkpoints/manifest.json", b"1")
    assert [*remote.numbers().items()] == [(1, "000001-step-00000010"), (2, "000002-step-00000020")]


def test_the_best_is_what_the_newest_that_can_be_read_says(run: Run, remote: Remote) -> None:
    assert remote.best(remote.numbers()) is None
    for number in (1, 2, 3):
        push(remote, run.open(number), nowhere)
    remote.store.write("checkpoints/000003-step-00000030/manifest.json", b"damaged")
    remote = Remote(remote.store)
    assert remote.best(remote.numbers()) == 2
    push(remote, commit(run, 4), nowhere)
    assert remote.best(remote.numbers()) == 2
    assert remote.best({1: "000001-step-00000010"}) == 1


# What is kept.


@pytest.mark.quick(3)
@ALL
def test_only_what_is_kept_stays(run: Run, remote: Remote) -> None:
    for number in (1, 2, 3):
        push(remote, run.open(number), nowhere)
    assert remote.prune(None, None, []) == []
    assert remote.prune(Keep(1), None, [2, None]) == [1]
    assert [*remote.numbers()] == [2, 3]
    assert remote.prune(Keep(1), None, [3]) == [2]
    assert {name.split("/")[1] for name in remote.store.sizes()} == {"000003-step-00000030"}


def test_what_is_kept_by_time_is_known_by_the_manifests(run: Run, remote: Remote) -> None:
    for number in (1, 2, 3):
        push(remote, run.open(number), nowhere)
    push(remote, commit(run, 4), nowhere)
    bad = replace(about_of(2), saved="some day")
    remote.store.write("checkpoints/000002-step-00000020/manifest.json", manifest.to_json(bad))
    remote.store.write("checkpoints/000001-step-00000010/manifest.json", b"damaged")
    every = Keep(newest=1, every=Every(steps=20))
    assert Remote(remote.store).prune(every, None, []) == [1, 3]


@pytest.mark.parametrize("place", ["memory", "file", "s3"], indirect=True)
def test_what_killed_pushes_and_prunes_have_left_is_removed(run: Run, remote: Remote) -> None:
    push(remote, run.open(3), nowhere)
    for number in (1, 2, 4):
        folder = f"checkpoints/{checkpoint.name(number, number * 10)}"
        remote.store.write(f"{folder}/model.safetensors", b"1")
        remote.store.write(f"{folder}/ranks/.00000.json.part", b"1")
        if number != 2:
            remote.store.write(f"{folder}/{MARK}", b"{}")
    remote.store.write("checkpoints/000002-step-00000021/notes.txt", b"mine")
    remote.prune(None, None, [])
    left = {name.split("/")[1] for name in remote.store.sizes()}
    assert left == {"000002-step-00000021", "000003-step-00000030", "000004-step-00000040"}


@pytest.mark.heavy
def test_a_prune_that_ends_anywhere_leaves_nothing_half_visible(
    run: Run, broken: Remote, proxied_s3: ProxiedS3
) -> None:
    there = behind(proxied_s3, broken)
    push(there, run.open(3), nowhere)
    for requests in range(1, 20):
        push(there, run.open(1), nowhere)
        proxied_s3.rules.clear()
        proxied_s3.rules.add("status", status=403, method="DELETE", after=requests - 1)
        try:
            broken.prune(Keep(1), None, [])
        except RemoteError:
            assert there.numbers().get(1) is None or contents_of(there.store, run.open(1)) == whole(
                run.open(1)
            )
            there.prune(Keep(1), None, [])
            assert {name.split("/")[1] for name in there.store.sizes()} == {"000003-step-00000030"}
        else:
            break
    assert requests == 5


# For people.


def test_the_pointers_say_which_is_the_newest_and_which_the_best(remote: Remote) -> None:
    remote.point_at("000002-step-00000020", newest=2, best=1)
    remote.point_at("000001-step-00000010", newest=2, best=1)
    remote.point_at("000003-step-00000030", newest=4, best=None)
    for word, number, name in (("newest", 2, "000002-step-00000020"), ("best", 1, "000001-step-00000010")):
        text = remote.store.read(f"{word}.json", 1000)
        assert manifest.unseal(text or b"") == {"checkpoint": f"checkpoints/{name}", "number": number}


def test_a_pointer_is_written_only_when_it_has_changed(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[str]()
    monkeypatch.setattr(remote.store, "write", lambda path, text: written.append(path))
    for number in (1, 1, 2, 2, 1):
        remote.point("newest", checkpoint.name(number, 10))

    assert written == ["newest.json"] * 3
