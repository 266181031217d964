"""Windows: every byte and its target in place, and the same stream from whatever step."""

import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgpt.data.cache import open_documents
from sparkgpt.data.store import ByteCache, write_cache
from sparkgpt.data.stream import (
    WindowStream,
    check_lengths,
    empty_window,
    make_window,
    prefetch,
    validation_windows,
)
from sparkgpt.errors import UserError

DOCUMENTS = [
    b"plain",
    "Müller aß Käse, 奶酪, 🙂".encode(),
    b"",
    bytes(range(256)),
    b"<|bos|><|eos|><|pad|>",
    b"x",
]


def cache_of(folder, documents) -> ByteCache:
    folder.mkdir(exist_ok=True)
    write_cache(folder, documents, {})
    return ByteCache.open(folder)


@pytest.fixture
def cache(tmp_path):
    return cache_of(tmp_path / "c", DOCUMENTS)


@pytest.fixture
def corpus(tmp_path):
    """200 documents of 0 to 60 bytes, each with bytes of its own."""
    sizes = np.random.default_rng(0).integers(0, 61, 200)
    return cache_of(tmp_path / "corpus", [bytes([i]) * n for i, n in enumerate(sizes.tolist())])


def reference(documents, ids, size):
    """A window written out one position at a time, from the definition."""
    tokens, targets, positions, borders = [], [], [], [0]
    for index in ids:
        tokens += [256, *documents[index]]
        targets += [*documents[index], 257]
        positions += range(len(documents[index]) + 1)
        borders.append(len(tokens))
    while len(tokens) < size:
        filler = min(256, size - len(tokens))
        tokens += [258] * filler
        targets += [-100] * filler
        positions += range(filler)
        borders.append(len(tokens))
    return tokens, targets, positions, borders


@pytest.mark.parametrize("ids", [[0], [2], [0, 1, 2], [5, 4, 3, 2, 1, 0], [3, 2], []])
@pytest.mark.parametrize("spare", [0, 1, 255, 256, 257, 700])
def test_a_window_is_laid_out_as_defined(cache, ids, spare):
    real = sum(len(DOCUMENTS[i]) + 1 for i in ids)
    size = real + spare
    if not size:
        return
    window = make_window(cache, ids, size)
    expected = reference(DOCUMENTS, ids, size)
    found = (window.tokens_T, window.targets_T, window.positions_T, window.cu_seqlens_S)
    assert [t.tolist() for t in found] == [list(e) for e in expected]
    assert [t.dtype for t in found] == [torch.int64] * 3 + [torch.int32]
    assert window.real_tokens == real == int((window.targets_T != -100).sum())
    assert window.doc_lengths == [len(DOCUMENTS[i]) + 1 for i in ids]
    assert window.doc_ids == ids
    segments = window.cu_seqlens_S.diff()
    assert segments.min() > 0, "a segment without positions"


def test_an_empty_window_is_all_filler():
    window = empty_window(600)
    assert window.cu_seqlens_S.tolist() == [0, 256, 512, 600]
    assert (window.tokens_T == 258).all() and (window.targets_T == -100).all()
    assert (window.real_tokens, window.doc_lengths, window.doc_ids) == (0, [], [])


def stream_of(cache, size=128, buffer=16, seed=0):
    return WindowStream(cache, window=size, buffer=buffer, seed=seed)


def same(a, b) -> bool:
    return (
        a.doc_ids == b.doc_ids
        and torch.equal(a.tokens_T, b.tokens_T)
        and torch.equal(a.cu_seqlens_S, b.cu_seqlens_S)
    )


def test_each_epoch_holds_every_document_once_in_another_order(corpus):
    stream = stream_of(corpus)
    index, orders = 0, []
    for _ in range(4):
        order = []
        while len(order) < len(corpus):
            order += stream.window(index).doc_ids
            index += 1
        assert sorted(order) == list(range(len(corpus)))
        orders.append(order)
    assert len({tuple(order) for order in orders}) == 4


def test_rejoining_at_any_window_equals_reading_from_the_start(corpus):
    straight = stream_of(corpus)
    windows = [straight.window(i) for i in range(180)]
    epochs = sum(len(w.doc_ids) for w in windows) / len(corpus)
    assert epochs > 3, "the test must cross epochs"
    for index in (179, 0, 77, 76, 149, 31):
        assert same(stream_of(corpus).window(index), windows[index])
        assert same(straight.window(index), windows[index])


def test_only_the_plans_of_neighbouring_epochs_are_kept(corpus):
    stream = stream_of(corpus)
    for index in range(400):
        stream.window(index)
    assert len(stream._epochs._plans) <= 2


def test_windows_for_a_target_counts_real_tokens(corpus):
    stream = stream_of(corpus)
    sums = np.cumsum([stream.window(i).real_tokens for i in range(150)])
    epoch = int((corpus.lengths + 1).sum())
    for target in (1, 2, 127, sums[0], sums[0] + 1, epoch, epoch + 1, 2 * epoch, int(sums[-1])):
        expected = int(np.searchsorted(sums, target)) + 1
        assert stream_of(corpus).windows_for(float(target)) == expected, target
    assert stream.windows_for(0.5) == 1


def test_the_digest_tells_all_that_fixes_the_order(corpus, cache):
    streams = [
        stream_of(corpus),
        stream_of(corpus, size=129),
        stream_of(corpus, buffer=17),
        stream_of(corpus, seed=1),
        stream_of(cache, size=300),
        stream_of(cache, size=300, seed=1),
    ]
    assert len({s.digest for s in streams}) == len(streams)
    assert stream_of(corpus).digest == streams[0].digest


def test_a_jsonl_file_becomes_the_same_stream(tmp_path):
    texts = ["Käse", "", "a\u2028b"]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    direct = cache_of(tmp_path / "c", [t.encode() for t in texts])
    assert stream_of(open_documents(path)).digest == stream_of(direct).digest


def test_a_document_longer_than_the_window_is_an_error(cache):
    with pytest.raises(UserError, match="document 3 fills 257 positions .* window of 256"):
        stream_of(cache, size=256)


def test_validation_keeps_file_order_and_its_limit(corpus):
    positions = (corpus.lengths + 1).tolist()
    for limit in (sum(positions), sum(positions[:50]), sum(positions[:50]) + 1, 10**9):
        windows = validation_windows(corpus, 128, limit)
        order = sum((w.doc_ids for w in windows), [])
        assert order == list(range(len(order)))
        real = sum(w.real_tokens for w in windows)
        assert real == sum(positions[: len(order)]) <= limit
        assert len(order) == len(positions) or real + positions[len(order)] > limit
        # Next fit: a window's first document would not have fitted into the one before.
        for one, following in zip(windows, windows[1:], strict=False):
            assert one.real_tokens + following.doc_lengths[0] > 128


def test_validation_that_would_be_empty_is_an_error(cache):
    with pytest.raises(UserError, match="--val-tokens 5 holds not even the first document"):
        validation_windows(cache, 512, 5)


def test_lengths_are_checked_against_the_smallest_limit(cache):
    check_lengths(cache, {"--tokens-per-batch": 257, "--max-position-embeddings": 4096})
    words = "document 3 .from 0. of .* fills 257 positions .* --max-position-embeddings 256.* 255`"
    with pytest.raises(UserError, match=words):
        check_lengths(cache, {"--tokens-per-batch": 512, "--max-position-embeddings": 256})


def test_a_window_is_made_in_a_millisecond_or_so(tmp_path):
    """One copy a document: 49,152 positions of 20 documents; the bound is for slow machines."""
    large = cache_of(tmp_path / "c", [bytes([i]) * 2456 for i in range(20)])
    make_window(large, range(20), 49_152)
    started = time.process_time()
    for _ in range(20):
        make_window(large, range(20), 49_152)
    assert (time.process_time() - started) / 20 < 0.01


@given(st.lists(st.integers(), max_size=20), st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_prefetch_yields_all_in_order(items, depth):
    assert list(prefetch(iter(items), depth)) == items


def threads():
    return [t for t in threading.enumerate() if t.name == "prefetch"]


def test_prefetch_passes_an_exception_on_in_its_place():
    def items():
        yield 1
        raise UserError("document 7 is damaged")

    ahead = prefetch(items(), 2)
    assert next(ahead) == 1
    with pytest.raises(UserError, match="document 7"):
        next(ahead)
    assert not threads()


def test_prefetch_runs_ahead_by_its_depth_and_stops_when_closed():
    made = []

    def items():
        for i in range(1000):
            made.append(i)
            yield i

    ahead = prefetch(items(), 3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(made) == 5  # one taken, three ready, one in hand
    ahead.close()
    assert not threads()
