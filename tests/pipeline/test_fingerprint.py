"""Staleness by value: what a stage's digest covers, and which stages an edit makes stale."""

import re
import shutil

import pytest

from sparkgpt.fingerprint import (
    ENTRIES,
    PACKAGE,
    ROOT,
    canonical,
    code_digest,
    fingerprint,
    imports_of,
    main,
    modules_of,
)


def table(heading, root=ROOT):
    """A table of docs/stages.md, written by hand: {each name in its first column: a set of words
    in its second}."""
    text = (root / "docs" / "stages.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| (.*) \|$", text, re.M)[2:]:
        names, stale = line.split(" | ")
        words = set() if stale.startswith("none") else set(stale.split(", "))
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, name
            found[names if names.startswith("a row") else name] = words
    return found


STALE = table("Modules")


def test_table_has_every_module():
    modules = {
        ".".join(path.relative_to(ROOT / PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / PACKAGE).rglob("*.py")
    }
    assert set(STALE) == modules
    assert set.union(*STALE.values()) == set(ENTRIES)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the package that a test may edit."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def digests(root):
    return {stage: code_digest(stage, root) for stage in ENTRIES}


@pytest.mark.parametrize("module", STALE)
def test_edit_makes_exactly_these_stages_stale(module, tree):
    before = digests(tree)
    path = tree / PACKAGE / (module.replace(".", "/") + ".py")
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    original = path.read_bytes()
    path.write_bytes(original + b"#")
    try:
        after = digests(tree)
    finally:
        path.write_bytes(original)
    assert {stage for stage in ENTRIES if before[stage] != after[stage]} == STALE[module]
    assert digests(tree) == before


def test_digest_is_of_content_not_of_place(tree):
    assert digests(tree) == digests(ROOT)


def test_entry_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        code_digest("cache", tmp_path)


def test_imports_are_found_wherever_they_stand(tmp_path):
    package = tmp_path / PACKAGE
    (package / "sub").mkdir(parents=True)
    for name in ("__init__", "a", "b", "c", "d", "e", "sub/__init__", "sub/x", "sub/y"):
        (package / f"{name}.py").write_text("")
    (package / "main.py").write_text(
        "import sparkgpt.a\n"
        "from sparkgpt import b\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from sparkgpt.e import only_for_types\n"
        "def f():\n    from sparkgpt.c import thing\n"
        "try:\n    from sparkgpt.sub.x import z\nexcept ImportError:\n    pass\n"
    )
    (package / "sub" / "x.py").write_text("from . import y\nfrom .. import d\nimport torch\n")
    names = {"a", "b", "c", "sub", "sub.x"}
    assert imports_of("sparkgpt.main", tmp_path) == {"sparkgpt"} | {f"sparkgpt.{n}" for n in names}
    found = imports_of("sparkgpt.sub.x", tmp_path)
    assert found == {"sparkgpt", "sparkgpt.sub", "sparkgpt.sub.y", "sparkgpt.d"}


def test_training_never_depends_on_what_reads_its_results():
    rooms = {name.split(".")[1] for name in modules_of("train")}
    assert not rooms & {"report", "export", "cli", "autotune", "generate"}


def test_canonical_is_plain_strings():
    value = canonical({"b": 1e-3, "a": [1, None, True], "c": "text", "d": {"y": 1, "x": (2,)}})
    assert value == {"a": "[1, null, true]", "b": "0.001", "c": "text", "d": '{"x": [2], "y": 1}'}
    assert list(value) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "value", [{1, 2}, float("nan"), float("inf"), ROOT, object(), b"bytes", [{3}], {"k": {4}}, 1j]
)
def test_unstable_values_are_refused(value):
    with pytest.raises(TypeError, match="lr"):
        canonical({"lr": value})


def test_names_must_be_strings():
    with pytest.raises(TypeError):
        canonical({1: "x"})


def test_fingerprint_knows_names_and_values_but_no_order():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1, "b": 2}) != fingerprint({"a": 2, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


def test_command_prints_digest_and_modules(capsys):
    assert main(["cache"]) == 0
    digest, *modules = capsys.readouterr().out.split()
    assert digest == code_digest("cache") and modules == modules_of("cache")
    assert main(["nothing"]) == 2
