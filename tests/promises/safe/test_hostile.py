"""Checkpoints that somebody made to do harm: refused by name, in bounded memory and time."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import injection
import pytest
import tiny
from counted import Tally
from hostile import build
from hostile.build import CALM, START, Case
from injection import Line, needs_strace  # noqa: F401 (a fixture)
from places import ROOT, SUPPORT

from resumable import CannotStore, CheckpointDamaged, Run, errors
from resumable.files import codec, disk, jsonl, lock, safetensors_header, strict_json, tensor_file

pytestmark = pytest.mark.proves("safe")

MEMORY = 512 << 20
"""So much more than before may a process take for any of them (it is the limit that it runs under)."""
SECONDS = 20
"""So long may a processor work on any of them."""
SHARDS = 2


@pytest.fixture
def template(run_dir: Path) -> Path:
    """Return a run with two checkpoints, of step 1 and of step 2."""
    training, state = tiny.load(run_dir, keep=5, minimize=None)
    with state:
        tiny.save_next(training, state, 1.0)
        tiny.save_next(training, state, 2.0)
    return run_dir


def built(template: Path, folder: Path, cases: dict[str, Case]) -> None:
    """Make the runs, and an intact one."""
    for number, case in enumerate(cases.values()):
        build.build(template, folder / f"{number}", case)
    shutil.copytree(template, folder / "warm" / "exp", symlinks=True)
    (folder / "cases.json").write_text(
        json.dumps([(name, case.saves, case.skips) for name, case in cases.items()])
    )


def attacked(folder: Path, traced: bool) -> dict[str, dict[str, Any]]:
    """Load all runs in a process of its own, and return what happened with each."""
    results, log = folder / "results", folder / "strace"
    strace = [
        "strace",
        "-f",
        "-qq",
        "-y",
        "-s",
        "4096",
        "--seccomp-bpf",
        "-o",
        str(log),
        "-e",
        f"trace={CALLS}",
    ]
    program = [sys.executable, str(SUPPORT / "hostile" / "attack.py"), str(folder), str(results), str(MEMORY)]
    path = os.pathsep.join([str(ROOT), str(SUPPORT)])
    done = subprocess.run(
        [*(strace if traced else []), *program],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder / "warm",
        capture_output=True,
        text=True,
        timeout=600,
    )
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert done.returncode == 0, f"{rows[-1][1]}: {ended(done.returncode)}\n{done.stderr[-2000:]}"
    return {row[1]: row[2] for row in rows if row[0] == "end"}


def ended(code: int) -> str:
    """Say how a process ended."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


CALLS = (
    "open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,link,linkat,symlink,symlinkat"
)
CALLS += ",truncate,chmod,fchmodat,execve,connect,rmdir"


def looks_bad(case: Case, found: dict[str, Any]) -> list[str]:
    """Return what is not as it has to be with one run."""
    newer, auto = found["newer"], found["auto"]
    bad = [f"ran {one}" for one in found["ran"]]
    bad += [f"took {found['memory'] >> 20} MB"] * (found["memory"] > MEMORY)
    bad += [f"took {found['seconds']} s"] * (found["seconds"] > SECONDS)
    for way in (newer, auto):
        bad += [
            f"not ours: {error}" for error in (way["error"], way.get("end")) if error and error[2] != "ours"
        ]
        bad += ["changed the objects"] * (way.get("is_as_it_was") is False)
        told = [*way["warnings"], way.get("out", ""), *(error[1] for error in (way["error"],) if error)]
        bad += [f"obeyed by a terminal: {text!a}" for text in told if not is_plain(text)]
    for name in ("ls", "json", "verify", "show", "diff"):
        shown = found.get(name, {"code": 0, "out": "", "err": ""})
        bad += [f"{name}: {shown['code']}"] * (type(shown["code"]) is not int)
        bad += [f"{name} is obeyed by a terminal"] * (not is_plain(shown["out"] + shown["err"]))
    return bad + (misjudged(case, newer, auto) if case.names != START else [])


def misjudged(case: Case, newer: dict[str, Any], auto: dict[str, Any]) -> list[str]:
    """Return where harm was not refused by name, or what is harmless was refused."""
    if case.names == CALM:
        return [] if newer.get("is_right") and newer["step"] == 2 else [f"refused: {newer['error']}"]
    kind, text, _ = newer["error"] or ("nothing", "", "")
    if kind not in ("CheckpointDamaged", "FormatTooNew"):
        return [f"met with {kind}: {text}"]
    bad = [f"does not name {case.names}: {text}"] * (case.names not in text.partition("\nFix:")[0])
    if kind == "CheckpointDamaged":
        is_well = auto.get("is_right") and auto["step"] == 1 and any("skipped" in w for w in auto["warnings"])
        bad += [] if is_well else [f"the older one was not used: {auto}"]
    return bad


def is_plain(text: str) -> bool:
    """Whether a terminal only shows a text."""
    return all(one.isprintable() or one == "\n" for one in text)


def outside(folder: Path) -> list[str]:
    """Return the calls with which the process reached for something that an intact run does not need."""
    # A call that another thread has interrupted is one line here
    lines = injection.lines(folder / "strace")
    begin = next(number for number, line in enumerate(lines) if '"/BEGIN"' in line.text)
    known = {path for line in lines[:begin] for path in touched(line)}
    own = re.compile(rf"{re.escape(str(folder))}/[^/]+(/exp(/|$)|$)|/proc/(?!.*/mem$)|/dev/null")
    return [
        line.text
        for line in lines[begin:]
        for path in touched(line)
        if not own.match(path)
        and path not in known
        and "/.git" not in path
        and path != str(folder / "results")
    ]


def touched(line: Line) -> list[str]:
    """Return the paths that a call has opened or changed, if it did not fail."""
    call = re.match(r"\w+\((.*)\) += (\d+)(?:<(.*)>)?$", line.text)
    if not call:
        return []
    if call[3]:
        return [call[3]]
    return [path for path in re.findall(r'"([^"]*)"', call[1]) if path.startswith("/")]


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc, RLIMIT_AS, pipes and devices")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_malicious_checkpoint_is_refused_and_nothing_is_touched(
    template: Path, tmp_path: Path, tally: Tally, times: int, shard: int
) -> None:
    cases = dict(itertools.islice(build.cases(is_all=times > 1).items(), shard, None, SHARDS))
    folder = tmp_path / "hostile"
    built(template, folder, cases)

    why_not = injection.why_not()
    found = attacked(folder, traced=not why_not)

    bad = [f"{name}: {text}" for name, case in cases.items() for text in looks_bad(case, found[name])]
    bad += outside(folder) if not why_not else []
    secrets = [*folder.glob("*/outside/secret")]
    bad += [f"{path} was changed" for path in secrets if path.read_bytes() != b"secret"]
    bad += [f"{path} was made" for path in folder.glob("*/outside/new")]
    assert len(secrets) == len(cases)
    tally("hostile checkpoints", len(cases), bad)
    if why_not:
        pytest.skip(f"all is well but for the calls, which nobody has looked at: {why_not}")


@pytest.mark.heavy
@pytest.mark.usefixtures("needs_strace")
def test_a_process_that_reaches_outside_is_seen_to_do_so(template: Path, tmp_path: Path) -> None:
    (tmp_path / "0" / "outside").mkdir(parents=True)
    (tmp_path / "0" / "outside" / "secret").write_text("secret")
    program = (
        "import contextlib, os\n"
        f"for path in ('/BEGIN', '{tmp_path}/0/outside/secret', '{tmp_path}/gone'):\n"
        "    with contextlib.suppress(OSError): os.open(path, os.O_RDONLY)"
    )
    log = str(tmp_path / "strace")
    subprocess.run(
        ["strace", "-f", "-qq", "-y", "-o", log, "-e", f"trace={CALLS}", sys.executable, "-c", program],
        check=True,
    )

    assert [line.rpartition("<")[2] for line in outside(tmp_path)] == [f"{tmp_path}/0/outside/secret>"]


# The bounds, each by itself.


NESTED = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[]", 1),
        ('{"a": [], "b": {}}', 5),
        ('"[[[[[:{"', 0),
        ('["[", ":", "{", "\\"[", "\\\\", []]', 2),
        ('["\\\\\\"[", "\\\\"]', 1),
        ("[" * 50 + '"' + "[:" * 50, 50),
        ('"' + "\\" * 8 + '",[' + '"' + "\\" * 7 + '"[', 1),
        ("[[[[", 4),
    ],
)
@pytest.mark.parametrize("part", [1, 2, 3, 7, 1 << 18])
def test_lists_objects_and_keys_are_counted_wherever_a_part_ends(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int, part: int
) -> None:
    monkeypatch.setattr(strict_json, "_PART", part)
    assert [strict_json.is_more_than(most, text) for most in (count, count - 1)] == [False, True]


def test_a_text_of_too_many_pieces_is_refused_before_it_takes_memory() -> None:
    text = b"[" + b"[]," * 2_000_000 + b"1]"
    with pytest.raises(ValueError, match="more than 1,000,000 lists, objects and keys"):
        strict_json.unseal(b'{"checksum": "' + strict_json._first_line(text)[14:46] + b'",' + text)


@pytest.mark.parametrize("limit", ["MOST", "LONGEST"])
def test_what_no_load_would_read_is_not_saved(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    trees = {"extra": codec.encode({"a": [[], [], [], []]}), "rank": codec.encode({})}
    codec.to_texts(trees)
    monkeypatch.setattr(codec, limit, 5)

    with pytest.raises(CannotStore, match=r"at most .* can be read again"):
        codec.to_texts(trees)


@pytest.mark.parametrize("limit", ["MOST", "LONGEST"])
def test_a_header_that_no_load_would_read_is_not_saved(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    tensors = codec.encode({"a": tiny.torch.zeros(2)}).tensors
    content = tensor_file.to_safetensors(tensors, {})
    monkeypatch.setattr(tensor_file if limit == "MOST" else safetensors_header, limit, 5)

    with pytest.raises(CannotStore, match="1 tensors are more than one file can describe"):
        tensor_file.layout(tensors, {})
    monkeypatch.setattr(safetensors_header, "LONGEST", 20)
    with pytest.raises(ValueError, match=r"the header has .* bytes; at most 20 are read"):
        tensor_file.from_safetensors(memoryview(content))


def test_a_tree_is_read_as_deep_as_it_can_be_saved_and_not_deeper() -> None:
    deepest = build.nested(64)
    assert codec.decode(codec.encode(deepest).json, {}) == deepest
    for wrap in (lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: {"$tuple": [inner]}):
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            codec.decode(build.nested(70, wrap), {})


def test_the_names_of_tensors_are_found_however_deep() -> None:
    assert [*codec.tensor_names(build.nested(50_000, lambda inner: [inner]))] == []


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path), lambda path: os.symlink("new", path)],
)
def test_what_is_no_file_is_not_taken_for_a_lock(tmp_path: Path, make: Any) -> None:
    make(tmp_path / ".lock")

    with pytest.raises(OSError, match=r"regular file|symbolic links|directory"):
        lock.Lock(tmp_path / ".lock")

    assert not (tmp_path / "new").exists()


def test_a_lock_that_is_another_programs_file_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("a thesis")
    os.link(tmp_path / "theirs", tmp_path / ".lock")

    held = lock.Lock(tmp_path / ".lock")

    assert held.is_held()
    held.release()
    assert (tmp_path / "theirs").read_text() == "a thesis"


def test_a_history_that_is_another_file_too_is_put_in_place_again(tmp_path: Path) -> None:
    (tmp_path / "backup").write_bytes(b'{"a": 1}\ntorn')
    os.link(tmp_path / "backup", tmp_path / "history")

    jsonl.append(tmp_path / "history", [{"a": 2}])

    assert (tmp_path / "backup").read_bytes() == b'{"a": 1}\ntorn'
    assert jsonl.read(tmp_path / "history") == [{"a": 1}, {"a": 2}]


def test_a_history_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "history").touch()
    os.truncate(tmp_path / "history", 1 << 40)
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        jsonl.read(tmp_path / "history")


def test_an_error_that_quotes_a_file_cannot_move_the_cursor() -> None:
    error = CheckpointDamaged("the metric \x1b[2J\u202e is none.\nAnd more.", fix="look \r at it")
    assert str(error) == "the metric \\x1b[2J\\u202e is none.\nAnd more.\nFix: look \\r at it"
    assert errors.printable(error.problem) == error.problem


# A folder that is exchanged between two looks at it.


@pytest.mark.parametrize("what", ["ranks", "."])
def test_a_folder_that_becomes_a_link_after_it_was_looked_at_leads_nowhere(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    found = Run(template).open(2)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(Run(template).open(1).path, elsewhere)
    real = os.path.islink

    def exchanged(path: Any) -> bool:
        was = real(path)
        folder = found.path / what
        if not real(folder):
            folder.rename(tmp_path / "moved")
            folder.symlink_to(elsewhere / what)
        return was

    monkeypatch.setattr(disk.os.path, "islink", exchanged)
    monkeypatch.setattr(Path, "is_symlink", exchanged)
    with pytest.raises(CheckpointDamaged, match=r"cannot be read: Not a directory|is a symbolic link"):
        tiny.load(template, resume=2)
