"""A real terminal for tests: a pane of tmux, whose screen is read as text."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from places import ROOT


class Pane:
    """A shell in a pane; its prompt is `$ `."""

    def __init__(self, folder: Path, columns: int, lines: int) -> None:
        self._name = f"resumable-{uuid.uuid4().hex}"
        self._prompts, self._seen = Path(tempfile.gettempdir()) / self._name, 0
        environment = {"PS1": "$ ", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
        count = f"PROMPT_COMMAND=echo >>{shlex.quote(str(self._prompts))}"
        shell = [
            *("env", "-u", "COLUMNS", "-u", "LINES", count),
            *(f"{name}={value}" for name, value in environment.items()),
            *("bash", "--norc", "--noprofile"),
        ]
        size = ["-x", str(columns), "-y", str(lines), "-c", str(folder)]
        self._call("-f", "/dev/null", "new-session", "-d", *size, shlex.join(shell))
        self.until(lambda screen: screen == ["$"])

    def _call(self, *arguments: str) -> str:
        # A server of the user's must not be found.
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        environment.pop("TMUX", None)
        command = ["tmux", "-u", "-L", self._name, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _count(self) -> int:
        return self._prompts.stat().st_size

    def type(self, text: str) -> None:
        self._seen = self._count()
        self._call("send-keys", "-l", text)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._call("resize-window", "-x", str(columns), "-y", str(lines))

    @property
    def screen(self) -> list[str]:
        """The lines on the screen, but for empty ones."""
        return [line.rstrip() for line in self._call("capture-pane", "-p").splitlines() if line.strip()]

    @property
    def written(self) -> list[str]:
        """All lines, those that have scrolled away too; a wrapped one is one line."""
        lines = self._call("capture-pane", "-p", "-J", "-S", "-").splitlines()
        return [line.rstrip() for line in lines if line.strip()]

    def until(self, is_there: Callable[[list[str]], object], seconds: float = 100) -> list[str]:
        """Wait until the screen is so, and return it."""
        end = time.monotonic() + seconds
        while not is_there(screen := self.screen):
            assert time.monotonic() < end, "\n".join(screen)
            time.sleep(0.05)
        return screen

    def until_prompt(self, seconds: float = 100) -> list[str]:
        """Wait for the prompt after the command that was typed last."""
        # Before what was typed is on the screen, the prompt there is the old one.
        return self.until(lambda screen: self._count() > self._seen and screen and screen[-1] == "$", seconds)

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self._call("kill-server")
        self._prompts.unlink(missing_ok=True)


@contextlib.contextmanager
def pane(folder: Path, columns: int = 80, lines: int = 24) -> Iterator[Pane]:
    """Open a pane for a while."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    found = Pane(folder, columns, lines)
    try:
        yield found
    finally:
        found.close()


def python(*arguments: str | Path) -> str:
    """Return the command of a Python program, for a shell."""
    return shlex.join([sys.executable, *map(str, arguments)])
