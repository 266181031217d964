"""Faults of the data path: over-long documents, segments, odd JSONL, texts of special tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_tools import gradients_of_step, poisoned
from helpers.models import DOCUMENTS, VARIANTS, randomised
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgpt.data.cache import open_documents
from sparkgpt.data.prepare import main as prepare
from sparkgpt.data.store import ByteCache
from sparkgpt.data.stream import WindowStream, empty_window, make_window, validation_windows
from sparkgpt.errors import UserError

LIMIT = 63  # bytes, so that a document fills a window of 64 positions at most


def documents(contents):
    """A cache of these documents, in memory."""
    offsets = np.concatenate(([0], np.cumsum([len(c) for c in contents]))).astype(np.int64)
    content = np.frombuffer(b"".join(contents), np.uint8)
    return ByteCache(Path("memory"), content, offsets, {"digest": ""})


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_fault_01_over_long_documents_are_left_out_counted_and_in_no_window(tmp_path):
    texts = [chr(97 + i % 26) * n for i, n in enumerate([63, 64, 10, 5000, 1, 65, 63, 64, 30, 100])]
    source = write(tmp_path / "raw.jsonl", texts)
    with pytest.raises(UserError, match="document 3 fills 5001 positions"):  # at once: no clogging
        WindowStream(open_documents(source), window=64, buffer=4, seed=0)
    flags = ["--format", "jsonl", "--max-document-bytes", str(LIMIT), "--val-bytes", "0"]
    prepare(["--source", str(source), "--out", str(tmp_path / "out"), *flags])
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text())["documents"]
    assert (counts["read"], counts["train"], counts["over_long"]) == (10, 5, 5)
    cache = open_documents(tmp_path / "out" / "train.jsonl")
    stream = WindowStream(cache, window=64, buffer=4, seed=0)
    windows = [stream.window(i) for i in range(stream.windows_for((cache.lengths + 1).sum()))]
    kept = [cache.document(i).tobytes().decode() for window in windows for i in window.doc_ids]
    assert sorted(kept) == sorted(text for text in texts if len(text) <= LIMIT)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_fault_01_an_all_pad_batch_has_loss_zero_and_zero_gradients(name):
    loss, gradients = gradients_of_step(randomised(VARIANTS[name]), [empty_window(300)] * 2, 0)
    assert loss == 0.0
    assert gradients and all(torch.equal(g, torch.zeros_like(g)) for g in gradients.values())


PACKINGS = {
    "contents": st.lists(st.binary(max_size=40), min_size=1, max_size=30),
    "window": st.integers(41, 700),
    "seed": st.integers(0, 9),
}


def windows_of(contents, window, seed):
    """Windows of training, validation and of a rank without documents, all of one size."""
    cache = documents(contents)
    stream = WindowStream(cache, window=window, buffer=4, seed=seed)
    count = stream.windows_for(int((cache.lengths + 1).sum()))
    held_out = validation_windows(cache, window, 10**6)
    return [*map(stream.window, range(count)), *held_out, empty_window(window)]


@given(**PACKINGS)
@settings(max_examples=150, deadline=None)
def test_fault_03_segments_cover_every_row(contents, window, seed):
    for made in windows_of(contents, window, seed):
        assert made.cu_seqlens_S.dtype == torch.int32
        assert made.cu_seqlens_S[0] == 0 and made.cu_seqlens_S[-1] == window == len(made.tokens_T)
        assert made.positions_T[made.cu_seqlens_S[:-1].long()].eq(0).all()


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_fault_03_filler_gives_no_nan_and_changes_no_gradient(name):
    cache, ids = documents(DOCUMENTS), range(len(DOCUMENTS))
    real = sum(len(document) + 1 for document in DOCUMENTS)
    found = []
    for spare in (0, 1, 700):
        model = randomised(VARIANTS[name])
        with poisoned():
            found.append(gradients_of_step(model, [make_window(cache, ids, real + spare)], real))
    (loss, expected), *others = found
    for other, gradients in others:
        assert other == pytest.approx(loss, rel=1e-6)
        for key, gradient in gradients.items():
            assert torch.allclose(gradient, expected[key], rtol=1e-4, atol=1e-6), key


@given(**PACKINGS)
@settings(max_examples=150, deadline=None)
def test_fault_04_no_segment_is_empty(contents, window, seed):
    for made in windows_of([*contents, b"", b""], window, seed):
        assert made.cu_seqlens_S.diff().min() >= 1
        assert made.cu_seqlens_S.diff()[: len(made.doc_lengths)].tolist() == made.doc_lengths


@pytest.mark.parametrize("spare", [0, 256, 512])
def test_fault_04_an_empty_document_is_one_row_and_full_filler_leaves_no_rest(spare):
    made = make_window(documents([b"", b"a", b""]), [0, 1, 2], 4 + spare)
    assert made.cu_seqlens_S.tolist() == [0, 1, 3, 4, *range(260, 5 + spare, 256)]
    assert made.tokens_T[:4].tolist() == [256, 256, 97, 256]
    assert made.targets_T[:4].tolist() == [257, 97, 257, 257]


ODD = {
    "BOM": (b'\xef\xbb\xbf{"text": "a"}\n', [b"a"]),
    "U+2028": ('{"text": "a\u2028b\u2029c\x85d"}\n'.encode(), ["a\u2028b\u2029c\x85d".encode()]),
    "CRLF": (b'{"text": "a"}\r\n{"text": "b\\r\\n"}\r\n', [b"a", b"b\r\n"]),
    "raw 0xff": (b'{"text": "\xff"}\n', "line 1: the line is not UTF-8 (byte 0xff at position 11)"),
    "lone surrogate": (b'{"text": "\\ud800"}\n', "with the lone surrogate \\ud800"),
    "raw surrogate": (b'{"text": "\xed\xa0\x80"}\n', "is not UTF-8 (byte 0xed"),
    "no text": (b'{"text": "a"}\n{"body": "a"}\n', 'line 2: the line has no "text"'),
    "null": (b'{"text": "a"}\n{"text": null}\n', 'line 2: the line has a "text" that is null'),
}


@pytest.mark.parametrize("name", ODD)
def test_fault_11_odd_jsonl_is_read_exactly_or_refused_by_line(tmp_path, name):
    content, expected = ODD[name]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    if isinstance(expected, list):
        cache = open_documents(path)
        assert [cache.document(i).tobytes() for i in range(len(cache))] == expected
        return
    prepared = ["--source", str(path), "--format", "jsonl", "--out", str(tmp_path / "out")]
    for read in (lambda: open_documents(path), lambda: prepare(prepared)):
        with pytest.raises(UserError) as caught:
            read()
        assert f"{path}, " in str(caught.value) and expected in str(caught.value)
    left = [p.name for p in tmp_path.rglob("*") if p.is_file() and not p.name.endswith(".lock")]
    assert left == ["odd.jsonl"]


def test_fault_14_special_tokens_spelled_out_are_bytes_in_a_window(tmp_path):
    text = "a<|bos|><|eos|>b<|pad|>"
    cache = open_documents(write(tmp_path / "specials.jsonl", [text]))
    made = make_window(cache, [0], len(text) + 3)
    assert made.tokens_T.tolist() == [256, *text.encode(), 258, 258]
    assert made.targets_T.tolist() == [*text.encode(), 257, -100, -100]
