"""The byte cache: what went in comes out, a damaged one is refused, a JSONL is cached once."""

import hashlib
import json
import multiprocessing
import os
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgpt.config import TrainConfig
from sparkgpt.data import cache as cache_module
from sparkgpt.data import store
from sparkgpt.data.cache import build_cache, main, open_documents, statistics
from sparkgpt.data.store import ByteCache
from sparkgpt.data.verification import Verification
from sparkgpt.errors import UserError

TEXTS = ["first", "", "Käse 奶酪 🙂", "a\u2028b", "x" * 3000]


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write_jsonl(tmp_path / "documents.jsonl", TEXTS)


def contents(cache: ByteCache) -> list[str]:
    return [cache.document(i).tobytes().decode() for i in range(len(cache))]


def test_documents_come_back_byte_for_byte(jsonl, tmp_path):
    build_cache(jsonl, tmp_path / "c")
    cache = ByteCache.open(tmp_path / "c")
    assert contents(cache) == TEXTS
    assert cache.lengths.tolist() == [len(t.encode()) for t in TEXTS]
    assert isinstance(cache.bytes, np.memmap) and cache.bytes.dtype == np.uint8
    assert cache.offsets.dtype == np.int64 and cache.lengths.dtype == np.int64
    cache.verify()


def test_the_digest_is_that_of_lengths_and_bytes_alone(jsonl, tmp_path):
    encoded = [t.encode() for t in TEXTS]
    lengths = hashlib.sha256(b"".join(struct.pack("<q", len(d)) for d in encoded)).digest()
    expected = hashlib.sha256(lengths + hashlib.sha256(b"".join(encoded)).digest()).hexdigest()
    other = tmp_path / "other.jsonl"
    lines = [json.dumps({"id": i, "text": t}, ensure_ascii=False) for i, t in enumerate(TEXTS)]
    other.write_text("\r\n\r\n".join(lines), encoding="utf-8", newline="")
    assert open_documents(jsonl).digest == open_documents(other).digest == expected


@given(st.lists(st.text(max_size=8), min_size=2, max_size=6))
@settings(max_examples=15, deadline=None)
def test_other_content_or_order_or_borders_give_another_digest(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("digests")
    joined = ["".join(texts[:2]), *texts[2:]]
    variants = {tuple(v) for v in (texts, texts[::-1], texts[1:], joined)}
    digests = {
        open_documents(write_jsonl(folder / f"{i}", v)).digest for i, v in enumerate(variants)
    }
    assert len(digests) == len(variants)


def test_documents_that_are_all_empty(tmp_path):
    cache = open_documents(write_jsonl(tmp_path / "e.jsonl", ["", ""]))
    assert contents(cache) == ["", ""]
    cache.verify()


@pytest.mark.parametrize("name", ["bytes.bin", "offsets.bin"])
@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b + b"\0", None])
def test_a_file_of_the_wrong_size_is_named(jsonl, tmp_path, name, damage):
    build_cache(jsonl, tmp_path / "c")
    path = tmp_path / "c" / name
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(UserError, match=f"{name}.*remove the folder and make it again"):
        ByteCache.open(tmp_path / "c")


def test_verify_finds_a_changed_byte_that_open_cannot_see(jsonl, tmp_path):
    build_cache(jsonl, tmp_path / "c")
    path = tmp_path / "c" / "bytes.bin"
    path.write_bytes(b"F" + path.read_bytes()[1:])
    with pytest.raises(UserError, match="holds other bytes than its manifest"):
        ByteCache.open(tmp_path / "c").verify()


def test_verification_goes_on_beside_other_work(jsonl, tmp_path, monkeypatch):
    build_cache(jsonl, tmp_path / "good")
    build_cache(jsonl, tmp_path / "bad")
    path = tmp_path / "bad" / "bytes.bin"
    path.write_bytes(b"F" + path.read_bytes()[1:])
    good, bad = ByteCache.open(tmp_path / "good"), ByteCache.open(tmp_path / "bad")
    real, may_go_on = ByteCache.verify, threading.Event()
    monkeypatch.setattr(ByteCache, "verify", lambda cache: may_go_on.wait(60) and real(cache))
    passing, failing = Verification([good]), Verification([good, bad])
    failing.wait(0.01)  # not known yet
    may_go_on.set()
    passing.wait()
    for seconds in (None, 0):
        with pytest.raises(UserError, match="bad holds other bytes than its manifest"):
            failing.wait(seconds)


def resident(mapped: np.memmap) -> int:
    """Bytes of a mapped file that count as this process's memory."""
    name, lines = str(mapped.filename), open("/proc/self/smaps").read().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.endswith(name)]
    return 1024 * int(next(x for x in lines[at:] if x.startswith("Rss:")).split()[1])


def test_a_corpus_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", 2**12)
    (tmp_path / "c").mkdir()
    store.write_cache(tmp_path / "c", [bytes(2**16)] * 256 + [b""] * 2**16, {})
    cache = ByteCache.open(tmp_path / "c")
    cache.verify()
    assert resident(cache.bytes) + resident(cache.offsets) < 2**19
    assert sum(int(cache.document(i).sum()) for i in range(256)) == 0
    assert resident(cache.bytes) > 2**23
    cache.release()
    assert resident(cache.bytes) + resident(cache.offsets) < 2**19


def test_lengths_in_blocks_are_the_lengths(jsonl, monkeypatch):
    cache = open_documents(jsonl)
    for block in (1, 2, 5, 100):
        monkeypatch.setattr(store, "BLOCK", block)
        firsts, parts = zip(*cache.length_blocks(), strict=True)
        assert list(firsts) == list(range(0, len(cache), block))
        assert np.concatenate(parts).tolist() == cache.lengths.tolist()


def test_offsets_that_fall_are_refused(jsonl, tmp_path):
    build_cache(jsonl, tmp_path / "c")
    offsets = np.fromfile(tmp_path / "c" / "offsets.bin", "<i8")
    offsets[2] = -1
    offsets.tofile(tmp_path / "c" / "offsets.bin")
    with pytest.raises(UserError, match="does not fit bytes.bin"):
        ByteCache.open(tmp_path / "c")


@pytest.mark.parametrize("manifest", [None, {"format": 99}])
def test_not_a_cache(tmp_path, manifest):
    if manifest:
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not a byte cache of format 1"):
        open_documents(tmp_path)


def test_a_jsonl_is_cached_once_and_again_when_it_changes(jsonl):
    assert contents(open_documents(jsonl)) == TEXTS
    beside = jsonl.with_name("documents.jsonl.cache")
    first = (beside / "manifest.json").stat().st_ino
    open_documents(jsonl)
    assert (beside / "manifest.json").stat().st_ino == first
    write_jsonl(jsonl, ["changed"])
    assert contents(open_documents(jsonl)) == ["changed"]
    (beside / "manifest.json").write_text('{"format": 0}')
    assert contents(open_documents(jsonl)) == ["changed"]


def test_an_open_cache_survives_its_replacement(jsonl):
    old = open_documents(jsonl)
    write_jsonl(jsonl, ["changed"])
    open_documents(jsonl)
    assert contents(old) == TEXTS


def _open_and_report(path, barrier, results):
    barrier.wait()
    results.put(open_documents(path).digest)


def test_processes_that_need_the_same_cache_at_once(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [f"document {i}" * 50 for i in range(3000)])
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    workers = [
        context.Process(target=_open_and_report, args=(path, barrier, results)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    digests = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert digests == {open_documents(path).digest}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".d.jsonl.cache.lock",
        "d.jsonl",
        "d.jsonl.cache",
    ]


def test_a_failure_leaves_no_cache_behind(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": null}\n')
    with pytest.raises(UserError, match="line 2"):
        build_cache(path, tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == ["bad.jsonl"]
    path.write_bytes(b"\n")
    with pytest.raises(UserError, match="holds no documents"):
        build_cache(path, tmp_path / "c")


def test_a_folder_that_may_not_be_written_says_what_to_do(jsonl, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache_module, "exclusive", refuse)
    with pytest.raises(UserError, match="Permission denied; make it elsewhere .*sparkgpt cache"):
        open_documents(jsonl)


@pytest.mark.parametrize("taken", ["file", "folder"])
def test_nothing_else_is_overwritten(jsonl, tmp_path, taken):
    out = tmp_path / "precious"
    if taken == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    with pytest.raises(UserError, match="exists and is not a byte cache"):
        build_cache(jsonl, out)
    assert out.exists()


@pytest.mark.parametrize("left", [[], ["offsets.bin"], ["offsets.bin", "bytes.bin"]])
def test_what_is_left_of_a_cache_is_replaced(jsonl, tmp_path, left):
    """Snakemake makes an output's folder beforehand, and removes declared files one by one."""
    (tmp_path / "c").mkdir()
    for name in left:
        (tmp_path / "c" / name).write_bytes(b"old")
    build_cache(jsonl, tmp_path / "c")
    assert contents(ByteCache.open(tmp_path / "c")) == TEXTS


def test_a_path_below_a_file_and_a_missing_file(jsonl, tmp_path):
    with pytest.raises(UserError, match="cannot make the folder"):
        main([str(jsonl), "--out", str(jsonl / "below" / "c")])
    with pytest.raises(UserError, match="cannot read .*missing"):
        main([str(tmp_path / "missing.jsonl"), "--out", str(tmp_path / "c")])
    with pytest.raises(UserError, match="no documents at"):
        main([str(tmp_path / "missing.jsonl")])


def test_statistics_are_of_the_packing_that_training_does(tmp_path, capsys):
    path = write_jsonl(tmp_path / "s.jsonl", ["a"])
    main([str(path), "--stats", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["window"], found["buffer"]) == (
        TrainConfig.tokens_per_batch, TrainConfig.pack_buffer,
    )  # fmt: skip


def test_statistics(tmp_path, capsys):
    path = write_jsonl(tmp_path / "s.jsonl", ["a" * 9] * 7)
    main([str(path), "--out", str(tmp_path / "c")])
    capsys.readouterr()
    main(
        [str(tmp_path / "c"), "--stats", "--window", "32", "--buffer", "4", "--seed", "1", "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    # Three documents of 10 positions in each full window, one in the last.
    assert found | {"digest": "", "path": ""} == {
        "documents": 7,
        "bytes": 63,
        "real_tokens": 70,
        "longest_bytes": 9,
        "median_bytes": 9.0,
        "window": 32,
        "buffer": 4,
        "seed": 1,
        "windows": 3,
        "packing_utilization": 70 / 96,
        "packing_utilization_full": 30 / 32,
        "digest": "",
        "path": "",
    }


def test_statistics_name_a_document_longer_than_the_window(jsonl):
    with pytest.raises(UserError, match="document 4 fills 3001 positions"):
        statistics(open_documents(jsonl), 2048, 16, 0)


def test_the_command_verifies(jsonl, tmp_path, capsys):
    main([str(jsonl), "--out", str(tmp_path / "c"), "--verify"])
    assert "digest" in capsys.readouterr().out
    os.truncate(tmp_path / "c" / "bytes.bin", 3)
    with pytest.raises(UserError, match="bytes.bin has 3 bytes"):
        main([str(tmp_path / "c"), "--verify"])
