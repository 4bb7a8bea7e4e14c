"""Two processes read the stamps of many checkpoints, and one does where the other cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resumable.views import stamps
from resumable.views.stamps import Look

FILES = ("state.json", "ranks/00000.json")
COUNT = 200


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints, of which one has lost a file."""
    for number in range(COUNT):
        for file in ("manifest.json", *FILES):
            path = tmp_path / str(number) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{number}")
    (tmp_path / "7" / FILES[1]).unlink()
    return tmp_path


def checkpoints() -> dict[str, tuple[str, ...]]:
    return {str(number): FILES for number in range(COUNT)}


def looked(folder: Path, *before: str) -> str:
    """Return what a process of one thread prints of its look, after it has run some lines."""
    lines = (
        "import os, signal, sys, time; from pathlib import Path; from resumable.views import stamps",
        "stamps._FEW = 0",
        *before,
        f"look = stamps.Look(Path(sys.argv[1]), {checkpoints()!r})",
        "found = look.result()",
        "print(len(found), len({*found.values()} - {7}), sum(found.values()))",
        # Raises if a child is left.
        "try: os.waitpid(-1, os.WNOHANG); print('a child is left')",
        "except ChildProcessError: pass",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.strip()


def one_by_one(folder: Path) -> str:
    each = {name: stamps.of(f"{folder}/{name}", FILES) for name in checkpoints()}
    found = [one for one in each.values() if one != stamps.MISSING]
    return f"{len(found)} {len({*found})} {sum(found)}"


def test_two_processes_find_what_one_finds(folder: Path) -> None:
    assert one_by_one(folder).startswith(f"{COUNT - 1} {COUNT - 1} ")
    assert looked(folder) == one_by_one(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="one process elsewhere")
def test_both_processes_read_some(folder: Path) -> None:
    # Slow, or one process might have read all before the other begins.
    as_stamp = "stamps.of = lambda *_: time.sleep(0.001) or os.getpid()"

    assert looked(folder, as_stamp).startswith(f"{COUNT} 2 ")


@pytest.mark.parametrize(
    "trouble",
    [
        "def of(*a, of=stamps.of): return of(*a) if os.getpid() == parent else 1 / 0",
        "def of(*a, of=stamps.of): return of(*a) if os.getpid() == parent else os.kill(os.getpid(), 9)",
        "os.fork = lambda: 1 / 0",
        "os.fork = lambda: os.stat('none')",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        "import threading; threading.Thread(target=time.sleep, args=[0.5]).start()",
    ],
)
def test_one_process_reads_all_if_the_other_cannot(folder: Path, trouble: str) -> None:
    if "1 / 0" in trouble and "fork" in trouble:
        trouble += "; stamps._is_single = lambda: False"

    assert looked(folder, "parent = os.getpid()", trouble, "stamps.of = globals().get('of', stamps.of)") == (
        one_by_one(folder)
    )


@pytest.mark.parametrize("change", ["size", "inode", "mtime", "manifest"])
def test_a_changed_file_changes_the_stamp(folder: Path, change: str) -> None:
    other, file = folder / "4" / FILES[0], "manifest.json" if change == "manifest" else FILES[0]
    path = folder / "3" / file
    before, then = Look(folder, checkpoints()).result(), path.stat().st_mtime_ns
    if change == "size":
        os.truncate(path, 0)
    elif change == "inode":
        os.replace(other, path)
    elif change == "manifest":
        path.write_text("4")
    # As if nothing had happened, but for the change itself.
    os.utime(path, ns=(then, then + (change == "mtime")))

    after = Look(folder, checkpoints()).result()

    assert [name for name in after if after[name] != before[name]] == ["3"]
    assert before.keys() - after.keys() == ({"4"} if change == "inode" else set())
