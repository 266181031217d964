"""The package has one direction: a module imports only from its own floor or from one below."""

import ast
import sys
from pathlib import Path

import pytest

from sparkgpt.fingerprint import ROOT, imports_of, module_path, modules_of

FLOORS = (
    ("config", "flags", "vocab", "fingerprint", "files", "image", "lock", "progress", "errors"),
    ("ops", "data"),
    ("model", "loss", "optim"),
    ("checkpoint", "devices", "distributed", "guard", "metrics", "provenance"),
    (
        "train",
        "evaluate",
        "generate",
        "autotune",
        "coordinates",
        "export",
        "doctor",
        "kernels",
        "bench",
    ),  # fmt: skip
    ("report",),
    ("pipeline",),
    ("cli", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "sparkgpt").rglob("*.py")
)


def room_of(module: str) -> str:
    """`sparkgpt.data.cache` -> `data`."""
    return module.split(".")[1]


def rooms_imported(module: str) -> set[str]:
    """Other rooms that a module imports from."""
    names = {room_of(name) for name in imports_of(module) if name != "sparkgpt"}
    return names - {room_of(module)}


@pytest.mark.parametrize("module", [name for name in MODULES if name != "sparkgpt"])
def test_imports_point_down(module):
    floor = FLOOR_OF[room_of(module)]
    above = {room for room in rooms_imported(module) if FLOOR_OF[room] > floor}
    assert not above, f"{module}, floor {floor}, imports from {above}"


def test_modules_have_no_cycle():
    packages = lambda name: {name.rsplit(".", end)[0] for end in range(1, name.count(".") + 1)}
    needs = {module: imports_of(module) - packages(module) for module in MODULES}
    while free := {module for module, others in needs.items() if not others & needs.keys()}:
        needs = {module: others for module, others in needs.items() if module not in free}
    assert not needs


@pytest.mark.parametrize("stage", ["compare", "tables", "plots", "fetch", "prepare", "cache"])
def test_stage_without_torch(stage):
    for module in modules_of(stage):
        assert "torch" not in libraries_of(module), module


@pytest.mark.parametrize("module", ["errors", "vocab", "config", "fingerprint", "files", "cli"])
def test_standard_library_only(module):
    assert libraries_of(f"sparkgpt.{module}") <= sys.stdlib_module_names | {"sparkgpt"}


def libraries_of(module: str) -> set[str]:
    """Top-level names of everything that a module's source imports."""
    tree = ast.parse(Path(module_path(module)).read_bytes())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split(".")[0])
    return names
