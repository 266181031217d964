"""Preparation: every document has exactly one fate, and the split follows content and seed."""

import hashlib
import io
import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgpt.data.formats import WHEEL_MEMBERS
from sparkgpt.data.jsonl import read_documents
from sparkgpt.data.prepare import main
from sparkgpt.errors import UserError

FATES = ["duplicates", "empty", "over_long", "over_budget", "held_out_elsewhere", "train", "val"]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def prepare(source, out, *flags, kind="jsonl"):
    """Run the command; returns (manifest, training texts, held-out texts)."""
    main(["--source", str(source), "--format", kind, "--out", str(out), *map(str, flags)])
    texts = [
        [document.decode() for _, document in read_documents(out / name)]
        for name in ("train.jsonl", "val.jsonl")
    ]
    return json.loads((out / "manifest.json").read_text()), *texts


def numbered(count):
    return [
        f"document number {i}, of {i % 7 * 11} bytes more " + "x" * (i % 7 * 11)
        for i in range(count)
    ]


def reference_order(texts, seed):
    """Texts by sha256(seed || bytes), as the module's docstring defines the split."""
    salt = seed.to_bytes(8, "little", signed=True)
    return sorted(texts, key=lambda t: hashlib.sha256(salt + t.encode()).digest())


def test_each_rule_counts_its_documents(tmp_path):
    texts = ["long" * 30, "a", "", "b", "a", "", "ü" * 10, "long" * 30, "c"]
    source = write_jsonl(tmp_path / "s.jsonl", texts)
    manifest, train, val = prepare(
        source, tmp_path / "o", "--max-document-bytes", 19, "--val-bytes", 0
    )
    assert (train, val) == (["a", "b", "c"], [])
    assert manifest["documents"] == dict.fromkeys(FATES, 0) | {
        "read": 9,
        "train": 3,
        "duplicates": 3,  # the second "a", the second empty one, the second long one
        "empty": 1,
        "over_long": 2,  # ten letters "ü" are twenty bytes
    }


def test_the_limit_is_in_bytes_and_inclusive(tmp_path):
    source = write_jsonl(tmp_path / "s.jsonl", ["ü" * 5, "ü" * 5 + "x", "x" * 10])
    flags = ("--max-document-bytes", 10, "--val-bytes", 0)
    assert prepare(source, tmp_path / "o", *flags)[1] == ["ü" * 5, "x" * 10]


def test_no_limit(tmp_path):
    source = write_jsonl(tmp_path / "s.jsonl", ["x" * 100_000])
    flags = ("--max-document-bytes", 0, "--val-bytes", 0)
    assert prepare(source, tmp_path / "o", *flags)[0]["train"]["longest_bytes"] == 100_000


@pytest.mark.parametrize("seed", [0, 1, -3])
def test_the_first_by_seeded_hash_are_held_out_and_both_files_keep_the_order(tmp_path, seed):
    texts = numbered(200)
    source = write_jsonl(tmp_path / "s.jsonl", texts)
    _, train, val = prepare(source, tmp_path / "o", "--val-bytes", 1000, "--seed", seed)
    expected, size = set(), 0
    for text in reference_order(texts, seed):
        if size >= 1000:
            break
        expected.add(text)
        size += len(text)
    assert val == [t for t in texts if t in expected]
    assert train == [t for t in texts if t not in expected]


def test_the_budget_takes_the_next_by_hash_and_a_smaller_one_is_a_subset(tmp_path):
    texts = numbered(200)
    source = write_jsonl(tmp_path / "s.jsonl", texts)
    order = reference_order(texts, 5)
    chosen = {}
    for budget in (2000, 5000):
        flags = ("--val-bytes", 500, "--max-bytes", budget, "--seed", 5)
        manifest, train, val = prepare(source, tmp_path / "o", *flags)
        size = sum(map(len, train))
        following = order[len(val) + len(train)]
        assert size <= budget < size + len(following)
        assert set(order[: len(val) + len(train)]) == {*val, *train}
        assert manifest["documents"]["over_budget"] == 200 - len(val) - len(train)
        chosen[budget] = set(train)
    assert chosen[2000] < chosen[5000]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=30), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_every_document_has_one_fate_and_none_is_on_both_sides(tmp_path_factory, texts, val_bytes):
    folder = tmp_path_factory.mktemp("prepare")
    source = write_jsonl(folder / "s.jsonl", [*texts, "one document that is always there"])
    flags = ("--val-bytes", val_bytes, "--max-document-bytes", 33)
    try:
        manifest, train, val = prepare(source, folder / "o", *flags)
    except UserError as error:
        assert "no document is left to train on" in str(error)
        return
    counts = manifest["documents"]
    assert sum(counts[f] for f in FATES) == counts["read"] == len(texts) + 1
    assert not set(train) & set(val)
    assert len({*train, *val}) == len(train) + len(val) == counts["train"] + counts["val"]


def test_the_order_of_the_source_decides_nothing_but_the_order(tmp_path):
    texts = numbered(100)
    flags = ("--val-bytes", 800, "--max-bytes", 3000)
    _, train, val = prepare(write_jsonl(tmp_path / "s", texts), tmp_path / "o", *flags)
    _, back, val_back = prepare(write_jsonl(tmp_path / "s", texts[::-1]), tmp_path / "o", *flags)
    assert (back[::-1], val_back[::-1]) == (train, val)


def test_a_held_out_file_of_its_own(tmp_path):
    held_out = ["h one", "shared", "shared", "", "too long" * 9]
    val_source = write_jsonl(tmp_path / "v.jsonl", held_out)
    source = write_jsonl(tmp_path / "s.jsonl", ["t one", "shared", "too long" * 9, "t two"])
    flags = ("--val-source", val_source, "--max-document-bytes", 20)
    manifest, train, val = prepare(source, tmp_path / "o", *flags)
    assert (train, val) == (["t one", "t two"], ["h one", "shared"])
    assert (
        manifest["documents"] | {"held_out_elsewhere": 1, "over_long": 1} == manifest["documents"]
    )
    assert manifest["val_source"]["documents"]["duplicates"] == 1
    assert manifest["val"]["documents"] == 2


def test_the_manifest_describes_the_files(tmp_path, capsys):
    texts = ["Käse", "a\u2028b", 'quoted "text"\\', "🙂"]
    source = write_jsonl(tmp_path / "s.jsonl", texts)
    manifest, train, _ = prepare(source, tmp_path / "o", "--val-bytes", 0, "--json")
    assert json.loads(capsys.readouterr().out) == manifest
    assert train == texts
    for path, part in ((source, "source"), (tmp_path / "o" / "train.jsonl", "train")):
        content = path.read_bytes()
        assert manifest[part]["size"] == len(content)
        assert manifest[part]["sha256"] == hashlib.sha256(content).hexdigest()
    assert manifest["train"]["bytes"] == sum(len(t.encode()) for t in texts)
    assert "Käse" in (tmp_path / "o" / "train.jsonl").read_text(encoding="utf-8")
    first = (tmp_path / "o" / "manifest.json").read_bytes()
    prepare(source, tmp_path / "o", "--val-bytes", 0)
    assert (tmp_path / "o" / "manifest.json").read_bytes() == first


def wheel(path, kind, rows):
    """A wheel with `rows` of (title, text) in the CSV member of format `kind`."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        lines = [f'"{a}","{b}"' for a, b in [("title", "text"), *rows]]
        archive.writestr("Any.csv", "\r\n".join(lines).encode())
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(WHEEL_MEMBERS[kind], inner.getvalue())
    return path


@pytest.mark.parametrize("kind", WHEEL_MEMBERS)
def test_texts_in_a_wheel(tmp_path, kind):
    rows = [("t", "one, with\nline ends"), ("t", "Käse \ufffd\xa0"), ("t", "x" * 200_000)]
    source = wheel(tmp_path / "w.whl", kind, rows)
    flags = ("--val-bytes", 0, "--max-document-bytes", 0)
    assert prepare(source, tmp_path / "o", *flags, kind=kind)[1] == [text for _, text in rows]


def test_what_is_no_wheel_is_refused(tmp_path):
    text = write_jsonl(tmp_path / "t", ["a"])
    other = wheel(tmp_path / "o.whl", "parliament-de", [("t", "a")])
    for source, words in ((text, "not the expected wheel"), (other, "not the expected wheel")):
        with pytest.raises(UserError, match=f"{source} is {words}.*fetch it again"):
            prepare(source, tmp_path / "o", kind="news")
    with pytest.raises(UserError, match="cannot read .*missing"):
        prepare(tmp_path / "missing", tmp_path / "o", kind="news")


def test_a_failure_leaves_neither_files_nor_an_old_manifest_beside_new_files(tmp_path):
    good = write_jsonl(tmp_path / "g.jsonl", numbered(20))
    bad = tmp_path / "b.jsonl"
    bad.write_bytes(b'{"text": "a"}\n{"text": "\\ud800"}\n')
    with pytest.raises(UserError, match="b.jsonl, line 2"):
        prepare(bad, tmp_path / "o", "--val-bytes", 0)
    assert list((tmp_path / "o").iterdir()) == []
    prepare(good, tmp_path / "o", "--val-bytes", 100)
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "o").iterdir())
    with pytest.raises(UserError):
        prepare(bad, tmp_path / "o", "--val-bytes", 0)
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "o").iterdir()) == before


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--max-document-bytes", 2), "no document is left to train on"),
        (("--val-bytes", 10**6), "no document is left to train on"),
    ],
)
def test_nothing_left(tmp_path, flags, words):
    source = write_jsonl(tmp_path / "s.jsonl", numbered(5))
    with pytest.raises(UserError, match=words):
        prepare(source, tmp_path / "o", *flags)


@pytest.mark.parametrize("flags", [("--val-bytes", "-1"), ("--seed", str(2**64)), ("--form", "x")])
def test_impossible_flags_exit_2_with_one_line(tmp_path, flags, capsys):
    with pytest.raises(SystemExit) as caught:
        prepare(tmp_path / "s", tmp_path / "o", *flags)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("sparkgpt: error: ") and error.count("\n") == 1
