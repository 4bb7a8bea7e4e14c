"""The rooms of the package: a module imports only from rooms further left, and only what they show."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys

import house
import pytest
from house import HOUSE, ROOT

PACKAGE = ROOT / "resumable"
LAYERS = " | ".join(HOUSE["order"]).split(" | ")
PLACE = {room: place for place, layer in enumerate(LAYERS) for room in layer.split()}
ROOMS = [room for room in PLACE if (PACKAGE / room.replace(".", "/")).is_dir()]
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__") and "stilled" not in path.parts
)

PICKLES = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
TENSORS = {"torch", "numpy", "safetensors"}


def test_a_module_imports_only_what_rooms_further_left_show() -> None:
    wrong = [f"{module} imports {name}: {why}" for module in MODULES for name, why in strays(module)]

    assert not wrong, "\n".join([*wrong, "The order of the rooms is in tests/house/house.json."])


def test_a_room_is_described_and_has_what_it_shows() -> None:
    faces = {room: source(f"{room}.__init__") for room in ROOMS}
    shows = {f"{room}.{name}" for room in ROOMS for name in shown(room)}

    assert not [room for room, face in faces.items() if not (ast.get_docstring(face) or "").endswith(".")]
    assert shows <= set(MODULES)


def test_a_module_is_described_in_one_sentence() -> None:
    first = {module: (ast.get_docstring(source(module)) or "").partition("\n")[0] for module in MODULES}

    assert not [module for module, sentence in first.items() if not sentence.endswith(".")]


def test_no_function_is_longer_than_sixty_lines() -> None:
    inside = {module: house.statements(source(module)) for module in MODULES}
    functions = [(it, node) for it in MODULES for node in inside[it] if isinstance(node, ast.FunctionDef)]

    assert not [f"{module}.{function.name}" for module, function in functions if length(function) > 60]


def test_no_module_imports_pickle_or_the_package_by_its_name() -> None:
    assert not [module for module in MODULES if imports(module) & (PICKLES | {"resumable"})]


def test_what_the_command_line_needs_imports_no_torch() -> None:
    rooms, but = HOUSE["without torch"].split(), HOUSE["with torch within"].split()
    needed = [module for module in MODULES if module.split(".")[0] in rooms and module not in but]

    assert not [module for module in needed if imports(module, in_functions=False) & TENSORS]


@pytest.mark.heavy
def test_a_training_does_not_import_the_audit() -> None:
    code = "import sys, resumable.state; print([name for name in sys.modules if '.audit' in name])"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said == "[]\n"


def strays(module: str) -> list[tuple[str, str]]:
    """Return the imports of a module that it may not have, each with the reason."""
    own, found = room_of(module), []
    for name in (name[1:] for name in imports(module) if name.startswith(".")):
        room = room_of(name)
        parts = name.removeprefix(f"{room}.").split(".")
        if room == own:
            continue
        if PLACE.get(room, len(PLACE)) >= PLACE.get(own, -1):
            found.append((name, f"{room} is not further left than {own}"))
        if any(part.startswith("_") and part != "__version__" for part in parts):
            found.append((name, "it is private"))
        if room in ROOMS and parts[0] not in shown(room):
            found.append((name, f"{room} does not show it"))
    return found


def room_of(module: str) -> str:
    """Return the room that a module stands in, or its own name if it stands in none."""
    return max((room for room in PLACE if f"{module}.".startswith(f"{room}.")), key=len, default=module)


@functools.cache
def imports(module: str, *, in_functions: bool = True) -> set[str]:
    """Return what a module imports: ours as `.room.module.name`, the rest by their first name."""
    found = set[str]()
    for node in house.statements(source(module)) if in_functions else source(module).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ["", *module.split(".")][: -node.level] + ([node.module] if node.module else [])
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def source(module: str) -> ast.Module:
    """Return the parsed source of a module."""
    return house.parsed(PACKAGE / f"{module.replace('.', '/')}.py")[1]


@functools.cache
def shown(room: str) -> list[str]:
    """Return the modules that a room shows to others."""
    names = [node.value for node in source(f"{room}.__init__").body if isinstance(node, ast.Assign)]
    return ast.literal_eval(names[0]) if names else []


def length(function: ast.FunctionDef) -> int:
    """Return the lines of a function, without those of its documentation."""
    documentation = (ast.get_docstring(function, clean=False) or "").splitlines()
    return (function.end_lineno or 0) - function.lineno + 1 - len(documentation)
