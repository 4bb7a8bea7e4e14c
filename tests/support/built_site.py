"""The site of the documentation, built by one test process at a time: all build it in the same folder."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from places import ROOT


def build(folder: Path) -> Path:
    """Build the site, and return a copy of it in a folder that does not exist yet."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, ROOT / "scripts" / "docs"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return Path(shutil.copytree(ROOT / "site", folder))
