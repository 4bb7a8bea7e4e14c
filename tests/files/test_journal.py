"""A file of JSON lines: no kill, full disk or stranger makes it lose a whole line, or have one twice."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from resumable.files import jsonl
from resumable.files.jsonl import Line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of two lines."""
    path = tmp_path / "lines.jsonl"
    jsonl.append(path, [{"n": 1}, {"n": 2}])
    return path


def numbers(path: Path) -> list[Any]:
    return [line["n"] for line in jsonl.read(path)]


def same(line: Line) -> Line:
    return line


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert jsonl.read(tmp_path / "lines.jsonl") == []


def test_each_line_is_strict_json_and_utf_8(path: Path) -> None:
    jsonl.append(path, [{"n": float("nan"), "argv": ("Müller\udcff",), "deep": {"x": [float("-inf"), 1.5]}}])

    text = path.read_bytes().splitlines()[-1].decode()
    found = json.loads(text, parse_constant=pytest.fail)
    assert found == {"n": "nan", "argv": ["Müller?"], "deep": {"x": ["-inf", 1.5]}}
    assert "ü" in text


@pytest.mark.parametrize("torn", [b'{"n": 3', b"\0\0\0\0", b"{\xff", b"3", b"[" * 100_000])
@pytest.mark.parametrize("change", ["append", "rewrite"])
def test_a_torn_last_line_is_dropped_and_no_other_is_lost(path: Path, torn: bytes, change: str) -> None:
    path.write_bytes(path.read_bytes() + torn)
    assert numbers(path) == [1, 2]

    if change == "append":
        jsonl.append(path, [{"n": 4}])
    else:
        jsonl.rewrite(path, same, [{"n": 4}])

    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 4}\n'


@pytest.mark.parametrize("change", ["append", "rewrite"])
def test_a_last_line_that_lacks_only_its_end_is_kept(path: Path, change: str) -> None:
    path.write_bytes(path.read_bytes().rstrip())

    if change == "append":
        jsonl.append(path, [{"n": 4}])
    else:
        jsonl.rewrite(path, same, [{"n": 4}])

    assert path.read_bytes() == b'{"n": 1}\n{"n": 2}\n{"n": 4}\n'


def test_a_damaged_line_in_the_middle_is_not_read_and_stays(path: Path) -> None:
    path.write_bytes(b'{"n": 0}\n{"n": \xff\n[1]\n' + path.read_bytes())

    jsonl.rewrite(path, lambda line: {"n": -line["n"]}, [])

    assert numbers(path) == [0, -1, -2]
    assert path.read_bytes().splitlines()[1:3] == [b'{"n": \xff', b"[1]"]


def test_a_rewrite_leaves_out_lines_and_no_byte_of_the_others(path: Path) -> None:
    path.write_bytes(b'{"n":   9}\n' + path.read_bytes())

    jsonl.rewrite(path, lambda line: None if line["n"] == 1 else line, [])

    assert path.read_bytes() == b'{"n":   9}\n{"n": 2}\n'
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("fails", ["write", "fdatasync"])
def test_a_failed_append_leaves_no_part(path: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = path.read_bytes(), os.write

    def half(fd: int, data: memoryview) -> int:
        if len(data) < 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    def full(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, half if fails == "write" else full)
        with pytest.raises(OSError, match=r"No space|Input/output"):
            jsonl.append(path, [{"n": 3}])

    assert path.read_bytes() == before


def test_a_line_and_a_new_files_name_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fdatasync", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, real=real, name=name: (calls.append(name), real(fd)))

    jsonl.append(tmp_path / "lines.jsonl", [{"n": 1}])
    jsonl.append(tmp_path / "lines.jsonl", [{"n": 2}])

    assert calls == ["fdatasync", "fsync", "fdatasync"]


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_not_a_file_is_neither_read_nor_written(tmp_path: Path, kind: str) -> None:
    path, elsewhere = tmp_path / "lines.jsonl", tmp_path / "elsewhere"
    elsewhere.write_bytes(b'{"n": 1}\n')
    {"folder": path.mkdir, "link": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path)}[
        kind
    ]()

    with pytest.raises(OSError, match=r"regular|directory|symbolic"):
        jsonl.read(path)
    with pytest.raises(OSError, match=r"regular|directory|symbolic"):
        jsonl.append(path, [{"n": 2}])
    assert elsewhere.read_bytes() == b'{"n": 1}\n'
