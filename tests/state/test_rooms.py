"""The rooms of the package: a module imports only from rooms further left, and only what they show."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import pytest
from places import ROOT

PACKAGE = ROOT / "resumable"

ORDER = (
    "errors messages rows terminal | boundary progress version | tracebacks files | run | groups intervals"
    " | options processes"
    " | loaders.generators | loaders.workers | loaders"
    " | position.script | position | parts | remote"
    " | views | interop | trace | training | saving | determinism | session | state"
    " | audit integrations | cli"
)
PLACE = {room: place for place, rooms in enumerate(ORDER.split(" | ")) for room in rooms.split()}
ROOMS = {name for name in PLACE if (PACKAGE / name.replace(".", "/")).is_dir()}

MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__") and "stilled" not in path.parts
)

WITHOUT_TORCH = sorted(
    module
    for module in MODULES
    if module.split(".")[0]
    in (
        "files",
        "run",
        "remote",
        "views",
        "cli",
        "errors",
        "boundary",
        "progress",
        "messages",
        "rows",
        "terminal",
        "tracebacks",
    )
    and module not in ("files.codec", "files.encoder", "files.decoder")
    and module
    not in (
        "files.fingerprint",
        "files.tensor_file",
        "files.sharded_tensor",
        "files.tensor_groups",
        "run.environment",
        "cli.demo",
    )
    and module not in ("views.comparison", "views.contents", "views.details", "views.magnitudes")
)
"""What `resumable ls` and its like need: they answer before torch could be imported."""


@functools.cache
def source(module: str) -> ast.Module:
    """Return the parsed source of a module of the package."""
    return ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())


def room_of(module: str) -> str:
    """Return the room that a module stands in, or its own name where it stands in none."""
    return max((name for name in PLACE if f"{module}.".startswith(f"{name}.")), key=len, default=module)


@functools.cache
def imports(module: str, *, also_in_functions: bool = True) -> set[str]:
    """Return what a module imports: ours as `.room.module.name`, the rest by their first name."""
    tree, found = source(module), set[str]()
    for node in ast.walk(tree) if also_in_functions else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ["", *module.split(".")][: -node.level] + (node.module or "").split(".") * bool(
                node.module
            )
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_rooms_further_left_show(module: str) -> None:
    own = room_of(module)
    for name in (name[1:] for name in imports(module) if name.startswith(".")):
        room = room_of(name)
        if room == own:
            continue
        assert PLACE[room] < PLACE[own], f"{module} imports {name}, which stands above it"
        parts = name.removeprefix(f"{room}.").split(".")
        assert not any(part.startswith("_") and part != "__version__" for part in parts), name
        assert room not in ROOMS or parts[0] in shown(room), f"{room} does not show {parts[0]} to {module}"


@functools.cache
def shown(room: str) -> list[str]:
    """Return the modules that a room shows to others."""
    face = source(f"{room}.__init__")
    names = [node.value for node in face.body if isinstance(node, ast.Assign)]
    return ast.literal_eval(names[0]) if names else []


def test_a_training_does_not_import_the_audit() -> None:
    code = "import sys, resumable.state; print([name for name in sys.modules if '.audit' in name])"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == "[]\n"


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_says_in_one_sentence_what_it_is_for_and_shows_modules_that_it_has(room: str) -> None:
    sentence = ast.get_docstring(source(f"{room}.__init__"))

    assert sentence
    assert sentence.endswith(".")
    assert {f"{room}.{name}" for name in shown(room)} <= set(MODULES)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_what_the_command_line_needs_imports_neither_torch_nor_numpy(module: str) -> None:
    assert not imports(module, also_in_functions=False) & {"torch", "numpy", "safetensors"}


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_pickle(module: str) -> None:
    forbidden = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}

    assert not imports(module) & forbidden


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_in_one_sentence_what_it_is_for(module: str) -> None:
    sentence = ast.get_docstring(source(module))

    assert sentence
    assert sentence.partition("\n")[0].endswith(".")


@pytest.mark.parametrize("module", MODULES)
def test_no_function_is_longer_than_sixty_lines(module: str) -> None:
    functions = [node for node in ast.walk(source(module)) if isinstance(node, ast.FunctionDef)]

    assert not [f"{node.name}: {length(node)}" for node in functions if length(node) > 60]


def length(function: ast.FunctionDef) -> int:
    """Return the lines of a function, without those of its documentation."""
    documentation = (ast.get_docstring(function, clean=False) or "").splitlines()
    return (function.end_lineno or 0) - function.lineno + 1 - len(documentation)
