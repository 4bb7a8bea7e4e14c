"""The architecture, held against the imports: a module imports only from lower layers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "resumable"

LAYERS = (
    (
        "errors",
        "boundary",
        "sealed",
        "signals",
        "threads",
        "request",
        "etag",
        "wrappers",
        "statements",
        "forkserver",
    ),
    ("line", "pin", "headers", "flow", "units", "counting"),
    ("carried", "meters"),
    ("scopes",),
    ("disk", "lock", "manifest", "tensorfile", "rng", "environment", "seeds", "prefetch", "memory", "means"),
    ("fence", "gradients", "late"),
    ("url", "filesystem", "refusal", "archive", "repeating"),
    ("progress", "torchfile", "operations"),
    ("pickled", "foreign"),
    ("blocks", "policy", "changes", "codec", "stamp", "transfers", "fingerprint", "shards", "ranks"),
    (
        "journal",
        "shares",
        "split",
        "arguments",
        "calls",
        "pace",
        "measuring",
        "tidying",
        "determinism",
    ),
    (
        "checkpoint",
        "image",
        "part",
        "worker",
        "autosave",
        "store",
        "tables",
        "markup",
        "figures",
        "digest",
        "traces",
        "unseen",
        "first_lines",
    ),
    ("listing", "loading", "order", "together", "remote", "sections", "pages", "contents", "aliases"),
    ("run", "comparing", "parting"),
    ("crew", "history", "spikes", "pulling", "details"),
    ("pusher", "overview", "writer"),
    ("copies", "copying", "report"),
    ("iterators",),
    ("iterating",),
    ("loaders",),
    ("sources", "outside"),
    ("loader_position",),
    ("accumulating",),
    ("streams",),
    ("position",),
    ("behind",),
    ("buckets",),
    ("modules",),
    ("optimizers", "weights"),
    ("parts", "unpacking", "adopting"),
    ("capture", "exporting"),
    ("saving", "importing", "tracing", "held"),
    ("remedies", "nameless"),
    ("inside",),
    ("unregistered",),
    ("survey",),
    ("auditing",),
    ("resuming",),
    ("state",),
    ("trials",),
    ("naming",),
    ("diagnosis",),
    ("experiments",),
    ("audit",),
    ("verdicts",),
    ("audit_page",),
    ("demo", "command"),
    ("cli_look", "cli_trust", "cli_move", "cli_tidy", "cli_try"),
    ("cli",),
)
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}

WITHOUT_TORCH = (
    "errors",
    "boundary",
    "sealed",
    "headers",
    "threads",
    "disk",
    "pin",
    "lock",
    "blocks",
    "shares",
    "manifest",
    "checkpoint",
    "listing",
    "policy",
    "progress",
    "run",
    "journal",
    "history",
    "request",
    "etag",
    "filesystem",
    "refusal",
    "url",
    "store",
    "remote",
    "pulling",
    "pusher",
    "copying",
    "tables",
    "traces",
    "parting",
    "markup",
    "figures",
    "sections",
    "pages",
    "overview",
    "report",
    "writer",
    "command",
    "cli_look",
    "cli_trust",
    "cli_move",
    "cli_tidy",
    "cli_try",
    "cli",
)
"""What `resumable ls` needs: it has to answer before torch could be imported."""

MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__"))


def imports(module: str, *, also_in_functions: bool) -> set[str]:
    """Return the modules that a module imports: ours with a leading dot, others by their first name."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    nodes = ast.walk(tree) if also_in_functions else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            found |= {f".{node.module}"} if node.module else {f".{alias.name}" for alias in node.names}
    return found


def test_every_module_has_a_place_in_the_table() -> None:
    assert set(MODULES) == set(LEVEL)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_lower_layers(module: str) -> None:
    ours = {name[1:] for name in imports(module, also_in_functions=True) if name.startswith(".")}

    above = {name for name in ours & set(LEVEL) if LEVEL[name] >= LEVEL[module]}

    assert not above, f"{module} imports {above}, which are not below it"


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_the_command_line_needs_imports_neither_torch_nor_numpy(module: str) -> None:
    assert not imports(module, also_in_functions=False) & {"torch", "numpy", "safetensors"}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_pickle(module: str) -> None:
    assert not imports(module, also_in_functions=True) & {
        "pickle",
        "_pickle",
        "cloudpickle",
        "dill",
        "marshal",
        "shelve",
    }


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_in_one_sentence_what_it_is_for(module: str) -> None:
    sentence = ast.get_docstring(ast.parse((PACKAGE / f"{module}.py").read_text()))

    assert sentence
    assert sentence.partition("\n")[0].endswith(".")


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_longer_than_sixty_lines(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())

    longest = [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno and node.end_lineno - node.lineno >= 60
    ]

    assert not longest
