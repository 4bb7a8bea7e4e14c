"""Compiles the library and its tests once where several processes run them: each compiles a share."""

from __future__ import annotations

import compileall
import sys
from pathlib import Path

import chosen
import pytest
from _pytest.assertion import rewrite
from places import ROOT


def share(config: pytest.Config, number: int, of: int) -> None:
    """Compile every `of`-th file that was not: in a fresh clone each process would compile all of them."""
    folders = (ROOT / "resumable", ROOT / "tests")
    files = [one for folder in folders for one in folder.rglob("*.py") if "data" not in one.parts]
    if sys.dont_write_bytecode:
        return
    for file in sorted(files, key=lambda one: -one.stat().st_size)[number::of]:
        if not file.name.startswith("test_"):
            compileall.compile_file(file, quiet=2)
        elif not (config.option.markexpr == chosen.QUICK and chosen.is_slow(file)):
            _rewrite(file, config)


def _rewrite(file: Path, config: pytest.Config) -> None:
    """Compile a file of tests with the asserts that pytest makes of its own."""
    compiled = rewrite.get_cache_dir(file) / f"{file.stem}{rewrite.PYC_TAIL}"
    if compiled.exists() and compiled.stat().st_mtime > file.stat().st_mtime:
        return
    try:
        source, code = rewrite._rewrite_test(file, config)
        if rewrite.try_makedirs(compiled.parent):
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, compiled)
    except (AttributeError, TypeError, ValueError):
        # Another pytest has other inner functions: it compiles all in each process
        return
