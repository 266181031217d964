"""Values that say whether a result is stale: digests of code, of files, and of parameters.

A stage's code is every module of this package that it can import, found by reading the sources
(`ast`), never by importing them. Standard library only: the Snakefile computes these at each start,
and the trainer before it imports torch.
"""

import ast
import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "sparkgpt"
ROOT = Path(__file__).resolve().parents[1]

# Modules that no result depends on: they hold the version, choose a subcommand, compute these
# digests, or show progress. An edit to one of them must not cost a training run.
WITHOUT_RESULT = frozenset(
    PACKAGE + name for name in ("", ".__main__", ".cli", ".fingerprint", ".progress")
)

# Stage -> the modules it starts from. Everything they import follows by itself.
ENTRIES = {
    "fetch": ("sparkgpt.data.sources",),
    "prepare": ("sparkgpt.data.prepare",),
    "cache": ("sparkgpt.data.cache",),
    "autotune": ("sparkgpt.autotune",),
    "train": ("sparkgpt.train.__main__",),
    "coordinates": ("sparkgpt.coordinates",),
    "compare": ("sparkgpt.report.compare",),
    "export": ("sparkgpt.export.hf",),
    "check": ("sparkgpt.export.check",),
    "tables": ("sparkgpt.report.tables",),
    "plots": ("sparkgpt.report.plots",),
    "graph": ("sparkgpt.report.graph",),
    "report": ("sparkgpt.report.page",),
}

# Stage -> packages that its sources name but its rule never imports, each for the reason given.
NEVER_IMPORTED = {
    "train": ("sparkgpt.export",),  # the rule trains with --no-hf-export; export is a rule itself
    "compare": ("sparkgpt.report.revisions",),  # the rule compares runs of one tree
}


def modules_of(stage: str, root: Path = ROOT) -> list[str]:
    """Sorted names of the modules whose code the results of `stage` depend on.

    KeyError for an unknown stage; FileNotFoundError when an entry module is missing.
    """
    never = NEVER_IMPORTED.get(stage, ())
    found: set[str] = set()
    waiting = list(ENTRIES[stage])
    while waiting:
        name = waiting.pop()
        if name in found or any(name == p or name.startswith(p + ".") for p in never):
            continue
        found.add(name)
        waiting += imports_of(name, root)
    return sorted(found - WITHOUT_RESULT)


def code_digest(stage: str, root: Path = ROOT) -> str:
    """Hex sha256 over the path and the bytes of each module of a stage, sorted by name."""
    digest = hashlib.sha256()
    for name in modules_of(stage, root):
        path = module_path(name, root)
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def libraries_of(stage: str, root: Path = ROOT) -> frozenset[str]:
    """Names of the libraries, not of the standard one, that the modules of a stage import."""
    found = set()
    for name in modules_of(stage, root):
        for level, module, _ in _import_statements(module_path(name, root).read_bytes()):
            if module and not level:
                found.add(module.split(".")[0])
    return frozenset(found - sys.stdlib_module_names - {PACKAGE})


def imports_of(name: str, root: Path = ROOT) -> set[str]:
    """Modules of this package that a module's source imports anywhere, with their packages.

    FileNotFoundError when there is no such module.
    """
    path = module_path(name, root)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = {name}
    for level, module, names in _import_statements(path.read_bytes()):
        base = ".".join(filter(None, (_base(package, level), module)))
        found.add(base)
        found.update(f"{base}.{imported}" for imported in names)
    names = {parent for item in found for parent in _with_parents(item)}
    return {item for item in names if _is_module(item, root)} - {name}


def module_path(name: str, root: Path = ROOT) -> Path:
    """File of a module or package. FileNotFoundError when neither exists."""
    base = root.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"no module {name} in {root}")


def canonical(params: Mapping[str, object]) -> dict[str, str]:
    """The same parameters as plain strings, sorted by name.

    Values may be None, bool, int, finite float, str, and lists, tuples or string-keyed dicts of
    them. TypeError for anything else: it would not be written alike in each process.
    """
    for name, value in params.items():
        _check_stable(name, value)
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in sorted(params.items())
    }


def fingerprint(params: Mapping[str, object]) -> str:
    """Hex sha256 of parameters, whatever their order. TypeError as in `canonical`."""
    text = json.dumps(canonical(params), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def main(argv: list[str]) -> int:
    """Print the digest and the modules of a stage."""
    if len(argv) != 1 or argv[0] not in ENTRIES:
        print(f"usage: python -m sparkgpt.fingerprint {{{','.join(ENTRIES)}}}", file=sys.stderr)
        return 2
    print(code_digest(argv[0]), *modules_of(argv[0]), sep="\n")
    return 0


@functools.cache
def _import_statements(source: bytes) -> tuple[tuple[int, str | None, tuple[str, ...]], ...]:
    """(leading dots, module, names imported from it) of each import statement of a source."""
    found = []
    for node in _runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module, tuple(alias.name for alias in node.names)))
    return tuple(found)


def _runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below `node`, without what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.expr):
            continue
        yield child
        yield from _runtime_nodes(child)


def _base(package: str, level: int) -> str:
    """The package that `level` leading dots of a relative import mean inside `package`."""
    return ".".join(package.split(".")[: 1 - level or None]) if level else ""


def _with_parents(name: str) -> list[str]:
    """`a.b.c` -> a, a.b, a.b.c: importing a module runs each package above it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _is_module(name: str, root: Path) -> bool:
    if name.split(".")[0] != PACKAGE:
        return False
    try:
        module_path(name, root)
    except FileNotFoundError:
        return False
    return True


def _check_stable(name: object, value: object) -> None:
    kind = type(value)
    if type(name) is not str:
        raise TypeError(f"parameter name {name!r} is not a string")
    if kind in (list, tuple):
        for item in value:
            _check_stable(name, item)
    elif kind is dict:
        for key, item in value.items():
            _check_stable(f"{name}.{key}" if type(key) is str else key, item)
    elif kind not in (type(None), bool, int, float, str):
        raise TypeError(f"parameter {name}: {kind.__name__} has no stable text")
    elif kind is float and not math.isfinite(value):
        raise TypeError(f"parameter {name}: {value} has no stable text")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
