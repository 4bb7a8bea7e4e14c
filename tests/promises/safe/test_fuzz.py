"""The readers of manifests, trees and headers, fuzzed: a value that can be written again, or an error."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from counted import Tally
from hostile import build
from places import ROOT, SUPPORT

from resumable import Run

pytestmark = pytest.mark.proves("safe")

RUNS = {"manifest": 60_000, "state": 80_000, "header": 60_000}


def seeds(target: str, run_dir: Path) -> list[bytes]:
    """Return what the fuzzer begins with: files of a real checkpoint, and a tree of all kinds of values."""
    training, state = tiny.load(run_dir)
    with state:
        tiny.save_next(training, state, 1.0)
    found = Run(run_dir).open(1).path
    if target == "manifest":
        # What follows the checksum, which the target computes
        return [(found / "manifest.json").read_bytes().partition(b",")[2]]
    if target == "header":
        files = sorted(found.glob("**/*.safetensors"))
        return [path.read_bytes()[:4096] for path in files] + [
            data for data in build.HEADERS.values() if len(data) < 6_000
        ]
    texts = [path.read_bytes() for path in (found / "state.json", found / "ranks" / "00000.json")]
    return [*texts, *(json.dumps(tree).encode() for tree in KINDS)]


KINDS = [
    {"$tensor": "f"},
    {"$tensor": ["f", {"stride": [1, 2]}]},
    {"$tensor": ["h", {"dtype": "complex128"}]},
    {"$tensor": ["f", {"device": "cpu"}]},
    {"$ndarray": ["t8", "<f4", [2], "C"]},
    {"$ndarray": ["b", "|b1", [2, 2], "F"]},
    {"$numpy": ["<f4", "0000803f"]},
    {"$int": "0x20000000000001"},
    {"$str": "eda080"},
    {"$complex": [1.0, {"$float": "nan"}]},
    {"$tuple": [1, {"$set": [1, 2]}, {"$frozenset": []}]},
    {"$dict": [[1, 2], [{"$tuple": [1]}, 3]]},
    {"$OrderedDict": [["a", 1]], "a": 1},
    {"$defaultdict": ["int", [["a", 1]]]},
    {"$Counter": [["a", 1]]},
    {"$deque": [3, [1, 2]]},
    {"$bytes": "AAAA"},
    {"$numpy.str_": "a"},
    {"$torch.Size": [1, 2]},
    {"$torch.dtype": "float32"},
    {"$torch.device": "cuda:0"},
    {"$Boundary": "step"},
]


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.skipif(
    not importlib.util.find_spec("atheris"), reason="needs atheris, which has wheels for Linux on x86-64"
)
@pytest.mark.parametrize("target", RUNS)
def test_whatever_a_fuzzer_makes_is_a_value_or_an_explained_error(
    run_dir: Path, tmp_path: Path, tally: Tally, times: int, target: str
) -> None:
    corpus, runs = tmp_path / "corpus", RUNS[target] * times
    corpus.mkdir()
    for number, data in enumerate(seeds(target, run_dir)):
        (corpus / f"{number:03}").write_bytes(data)
    options = [f"-runs={runs}", "-seed=1", "-max_len=6000", "-rss_limit_mb=0", "-timeout=10"]

    done = subprocess.run(
        [sys.executable, str(SUPPORT / "fuzzing.py"), target, str(corpus), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )

    made = [f"{path.name}: {path.read_bytes()[:500]!r}" for path in sorted(tmp_path.glob("*-*"))]
    told = "\n".join([done.stdout[-3000:], done.stderr[-1500:], *made])
    counted = int(["0", *re.findall(r"#(\d+)", done.stderr)][-1])
    # It ends at the first input that is bad
    tally("fuzzed inputs", counted, [told] * (done.returncode != 0))
    begun, reached = (int(re.findall(r"cov: (\d+)", done.stderr)[at]) for at in (0, -1))
    # It is guided: it finds lines that what it began with does not reach.
    assert (counted >= runs, reached > begun) == (True, True)
