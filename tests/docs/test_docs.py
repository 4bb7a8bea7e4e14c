"""The documentation, run: every block of code, every doctest, every link, the two set-up commands."""

from __future__ import annotations

import contextlib
import doctest
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import built_site
import numpy as np
import pytest
import torch
from places import ROOT
from servers import S3
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from resumable import ResumableError, ResumableWarning, errors
from resumable.cli import app

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
GUIDE = "docs/guide/README.md"
"""Its code makes the parts that the other pages of the guide use."""
RECORDED = "docs/quickstart.md"
"""Its script takes its time, so that it can be killed; a test of its own does."""
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "resumable").rglob("*.py")
    if path.stem != "__main__" and "stilled" not in path.parts and ">>>" in path.read_text()
)
"""The modules with examples in docstrings."""


def blocks(page: str) -> list[str]:
    """Return the code of a page; one of the guide begins with the parts, if it says so."""
    text = (ROOT / page).read_text()
    own = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [*blocks(GUIDE), *own] if "](README.md#the-parts-in-the-examples)" in text else own


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(images).sum()
    loss.backward()
    optimizer.step()
    return loss


def readers_parts() -> dict[str, object]:
    """What the reader of a page is taken to have."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 30),
        "scaler": torch.amp.GradScaler("cpu"),
        "loader": DataLoader(TensorDataset(torch.randn(4, 2), torch.randn(4)), batch_size=2),
        "ema": AveragedModel(model),
        "numpy_generator": np.random.default_rng(0),
        "train": lambda images, labels: train(model, optimizer, images),
        "evaluate": lambda: torch.rand(()),
    }


@pytest.fixture
def _a_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store that a page means by s3://bucket, if it means one."""
    if "s3://bucket/" not in "".join(blocks(request.getfixturevalue("page"))):
        yield
        return
    server: S3 = request.getfixturevalue("s3")
    # A busy machine answers late, and is asked again
    with contextlib.suppress(server.admin.exceptions.BucketAlreadyOwnedByYou):
        server.admin.create_bucket(Bucket="bucket")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
    yield
    server.remove("bucket")


@pytest.mark.quick(15)
@pytest.mark.usefixtures("_a_bucket", "as_in_a_script")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page not in (GUIDE, RECORDED)])
def test_the_code_on_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESUMABLE_CACHE", str(tmp_path / "cache"))
    if "import gymnasium" in "".join(blocks(page)):
        pytest.importorskip("gymnasium")
    names = readers_parts()

    with warnings.catch_warnings():
        # The pages change a setting on purpose, to show how.
        warnings.filterwarnings("ignore", "(?s).* has changed since .*optimizer.lr", category=UserWarning)
        # A page shows what is lost.
        warnings.filterwarnings("ignore", "this loop draws from random generators", category=UserWarning)
        for block in blocks(page):
            exec(compile(block, page, "exec"), names)

    assert list(tmp_path.glob("runs/*/checkpoints/*/manifest.json"))


@pytest.mark.usefixtures("as_in_a_script")
@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_are_true(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # An example looks at the variables of those that run it.
    del monkeypatch
    found = import_module(module.removesuffix(".__init__"))

    assert doctest.testmod(found, extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", (ROOT / page).read_text())

    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_readme_has_exactly_two_set_up_commands_and_ci_runs_the_second() -> None:
    commands = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)

    assert [command.count("\n") for command in commands] == [1, 1]
    assert all(command.startswith("python3 -m venv .venv && ") for command in commands)
    assert commands[0].rstrip().endswith("&& .venv/bin/resumable demo")
    assert commands[1].rstrip().endswith("&& scripts/test")


def readers_training(sign: str) -> dict[str, torch.Tensor]:
    """Run the README's loop, with the lines that its diff adds (+) or removes (-); return the weights."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line[1:] for line in diff.splitlines() if line[0] in (" ", sign)]
    torch.manual_seed(0)
    names = readers_parts()
    names["criterion"] = lambda found, labels: (found.flatten() - labels).square().mean()
    names["evaluate"] = lambda model: model(torch.ones(2)).item()
    exec(compile("\n".join(lines).replace("90", "3"), "README.md", "exec"), {"torch": torch, **names})
    model = names["model"]
    assert isinstance(model, nn.Module)
    return model.state_dict()


@pytest.mark.usefixtures("as_in_a_script")
def test_the_change_in_the_readme_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    before, after = readers_training("-"), readers_training("+")

    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "runs/exp/newest/model.safetensors").exists()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_a_constraint_pins_every_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()

    assert all(line.startswith("#") or "==" in line for line in lines)
    assert "torch==2.13.0" in lines


@pytest.mark.heavy
def test_what_the_pages_say_of_the_code_is_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference", "--check"], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    commands = [sub for action in app.parser()._actions for sub in getattr(action, "choices", None) or ()]
    page = (ROOT / "docs" / "cli.md").read_text()

    assert [name for name in commands if f"resumable {name}" not in page.split("```text", 2)[2]] == []


def test_every_error_is_on_the_page_of_the_errors() -> None:
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)

    kinds = [*ResumableError.__subclasses__(), ResumableWarning]
    assert sorted(headings) == sorted(kind.__name__ for kind in kinds)


def test_every_numbered_warning_is_issued_tested_and_on_the_page() -> None:
    numbers = re.findall(r"^(R\d\d) \|", errors.__doc__ or "", re.MULTILINE)
    assert numbers == [f"R{number:02}" for number in range(1, len(numbers) + 1)]
    assert len(numbers) <= 30

    package, tests = (
        "".join(path.read_text(errors="replace") for path in (ROOT / folder).rglob("*.py"))
        for folder in ("resumable", "tests")
    )
    assert {*re.findall(r"\[(R\d\d)\]", package)} == {*numbers}
    assert {*re.findall(r"R\d\d(?!\d)", tests)} >= {*numbers}
    page = (ROOT / "docs" / "guide" / "inexact.md").read_text()
    assert re.findall(r'<a id="(r\d\d)"></a>', page) == [*map(str.lower, numbers)]


@pytest.mark.heavy
def test_the_quickstart_and_its_picture_show_what_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "record", "--check"], capture_output=True, text=True
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_navigation_of_the_site_has_every_page() -> None:
    site = (ROOT / "mkdocs.yml").read_text()

    assert [page for page in PAGES if f": {page}\n" not in site and f"- {page}\n" not in site] == []


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning_and_makes_no_request(tmp_path: Path) -> None:
    site = built_site.build(tmp_path / "site")

    asked = r'<(?:script|link|img|iframe|source)\b[^>]*?(?:src|srcset|href)="?(?!data:)(?:https?:)?//[^">]*'
    pages = [*site.rglob("*.html")]
    assert len(pages) > len(PAGES)
    assert [found for page in pages for found in re.findall(asked, page.read_text())] == []
