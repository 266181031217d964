"""Attention on a CPU by tiles: values, gradients, bits, threads."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from helpers.interpreted import assert_as_exact
from helpers.switched import plain_and_switched, poison, values_and_gradients, window
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparkgpt.errors import UserError
from sparkgpt.model.transformer import Transformer
from sparkgpt.ops import cpu_tiles
from sparkgpt.ops.attention import choose_backend, varlen_attention
from sparkgpt.ops.workers import share_out

pytestmark = pytest.mark.cpu
DTYPES = (torch.float32, torch.float64)
MIXED = [1, 700, 2, 128, 129, 310]


def ends_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def inputs(lengths, heads, kv_heads, head_dim, gain=1.0):
    """q, k, v, and the output's gradient."""
    torch.manual_seed(0)
    rows = (heads, kv_heads, kv_heads, heads)
    q, k, v, dout = (torch.randn(sum(lengths), n, head_dim) for n in rows)
    return gain * q, k, v, dout


def by_tiles(values, lengths):
    leaves = [x.detach().requires_grad_() for x in values[:3]]
    out = varlen_attention(*leaves, ends_of(lengths), max(lengths), "tiles")
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, values[3]))]


def by_torch(values, lengths, dtype):
    """One document at a time, with weights written out."""
    q, k, v = leaves = [x.to(dtype).requires_grad_() for x in values[:3]]
    outs = []
    for q_n, k_n, v_n in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_n, v_n = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k_n, v_n))
        scores = torch.einsum("tnh,snh->nts", q_n, k_n) * q.shape[2] ** -0.5
        later = torch.ones(len(q_n), len(q_n), dtype=bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outs.append(torch.einsum("nts,snh->tnh", weights, v_n))
    out = torch.cat(outs)
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, values[3].to(dtype)))]


def sums_of_absolute_values(values, lengths):
    """Of out, dq, dk and dv: their sums with every term positive, to which rounding is relative."""
    scale, groups, parts = values[0].shape[2] ** -0.5, (values[1].shape[1], -1), []
    of_kv_head = lambda x: x.unflatten(1, groups).sum(2)
    for q, k, v, dout in zip(*(x.double().split(lengths) for x in values), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        later = torch.ones(len(q), len(q), dtype=bool).triu(1)
        scores = scale * torch.einsum("tnh,snh->nts", q, k)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        q, k, v, dout = (x.abs() for x in (q, k, v, dout))
        dweights = torch.einsum("tnh,snh->nts", dout, v)
        dscores = scale * weights * (dweights + (weights * dweights).sum(-1, keepdim=True))
        by_query, by_key = "nts,snh->tnh", "nts,tnh->snh"
        out, dq = torch.einsum(by_query, weights, v), torch.einsum(by_query, dscores, k)
        dk, dv = torch.einsum(by_key, dscores, q), torch.einsum(by_key, weights, dout)
        parts.append((out, dq, of_kv_head(dk), of_kv_head(dv)))
    return [torch.cat(x) for x in zip(*parts, strict=True)]


@pytest.fixture
def fine_cut(monkeypatch):
    """Many strips, and several ranges of keys for a tile, in short documents."""
    monkeypatch.setattr(cpu_tiles, "STRIP", 150)
    monkeypatch.setattr(cpu_tiles, "KEYS", 128)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 700), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 2), (3, 1)]),
    st.sampled_from([32, 64, 128]),
)
@example([1], (2, 1), 64)
@example([1, 1, 1, 700], (4, 2), 128)
@example([1, 87, 1, 634], (4, 1), 128)
def test_values_and_gradients(lengths, heads, head_dim):
    values = inputs(lengths, *heads, head_dim)
    exact = by_torch(values, lengths, torch.float64)
    three = (by_tiles(values, lengths), exact, sums_of_absolute_values(values, lengths))
    roundings = {"out": 32, "dq": 8, "dk": 8, "dv": 32}
    for (name, n), found, expected, size in zip(roundings.items(), *three, strict=True):
        assert ((found - expected).abs() <= n * torch.finfo(found.dtype).eps * size).all(), name


@pytest.mark.parametrize("gain", [1, 30, 1000])  # scores of up to 5, 150, and 5,000
def test_they_are_as_exact_as_torch_s_for_scores_of_any_size(fine_cut, gain):
    values = inputs(MIXED, 2, 1, 64, gain)
    three = (by_tiles(values, MIXED), *(by_torch(values, MIXED, d) for d in DTYPES))
    for name, *one in zip(("out", "dq", "dk", "dv"), *three, strict=True):
        assert_as_exact(*one, name)


@pytest.mark.parametrize("cut", ["usual", "fine"])
def test_the_same_bits_on_any_number_of_threads(cut, request, monkeypatch):
    if cut == "fine":
        request.getfixturevalue("fine_cut")
    poison(monkeypatch)
    usual, values, found = torch.get_num_threads(), inputs(MIXED, 4, 2, 64), []
    try:
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            found.append(by_tiles(values, MIXED))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(usual)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_document_has_the_same_bits_beside_any_others():
    values = inputs(MIXED, 2, 1, 64)
    alone = by_tiles([x[1:701] for x in values], [700])
    for among_others, document in zip(by_tiles(values, MIXED), alone, strict=True):
        assert torch.equal(among_others[1:701], document)


def test_strided_inputs():
    q, k, v, dout = values = inputs([70, 200], 4, 2, 32)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in values]
    parts = [*torch.cat((q, k, v), 1).split((4, 2, 2), 1), dout]
    expected = by_tiles(values, [70, 200])
    constant = by_tiles((q, k, v, torch.ones(()).expand(dout.shape)), [70, 200])
    filled = by_tiles((q, k, v, torch.ones(dout.shape)), [70, 200])
    assert all(map(torch.equal, expected, by_tiles(parts, [70, 200])))
    assert all(map(torch.equal, constant, filled))
    for found, one in zip(by_tiles(turned, [70, 200]), expected, strict=True):
        assert torch.allclose(found, one, atol=4e-6)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_gradient_of_one_alone(which):
    values = inputs([130, 40], 2, 1, 64)
    leaves = [x.requires_grad_(i == which) for i, x in enumerate(values[:3])]
    out = varlen_attention(*leaves, ends_of([130, 40]), 130, "tiles")
    (found,) = torch.autograd.grad(out, leaves[which], values[3])
    assert torch.equal(found, by_tiles(values, [130, 40])[1 + which])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_kept(mode):
    values = inputs(MIXED, 2, 1, 64)
    expected = by_tiles(values, MIXED)[0]
    with mode():
        leaves = [x.clone() for x in values[:3]]
        out = varlen_attention(*leaves, ends_of(MIXED), 700, "tiles")
    assert out.grad_fn is None and torch.equal(out, expected)


def test_other_dtypes(fine_cut):
    values = inputs(MIXED, 2, 1, 64)
    exact = by_torch(values, MIXED, torch.float64)
    for one, expected in zip(by_tiles([x.double() for x in values], MIXED), exact, strict=True):
        assert (one - expected).abs().max() <= 1e-12
    half = [x.bfloat16() for x in values]
    exact = by_torch(half, MIXED, torch.float64)
    for one, expected in zip(by_tiles(half, MIXED), exact, strict=True):
        assert one.dtype == torch.bfloat16  # the result's rounding alone: 8 bits
        assert ((one - expected).abs() <= expected.abs() / 256 + 8e-6).all()


def test_strips_hold_each_query_once_and_little_more_than_their_share():
    for lengths in ([8192], [1025, 1, 2047, 300], [1], [100_000]):
        cut = cpu_tiles.Cut(torch.empty(0, 4, 8), 2, lengths)
        tiles = [tile for strip in cut.strips for tile in cut.tiles(strip)]
        for head in (0, 1):
            spans = sorted((t.first, t.end) for t in tiles if t.head == head)
            assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]
            assert spans[-1][1] == sum(lengths)
        for tile in tiles:
            *before, last = cut.key_ranges(tile)
            assert all(end <= tile.first for _, end in before) and last[0] <= tile.first
            assert all(end - first <= 2048 for first, end in (*before, last))
        largest = max(strip.scores for strip in cut.strips)
        assert largest <= max(lengths) * 1024 * 0.75


def test_a_document_s_strips_are_taken_in_turn():
    """Or gradients of keys, each as long as the document, would wait for the first strip's."""
    cut = cpu_tiles.Cut(torch.empty(0, 2, 8), 1, [300, 49_152, 5000, 49_152, 2])
    for start in {strip.start for strip in cut.strips}:
        turns = [strip.turn for strip in cut.strips if strip.start == start]
        assert turns == list(range(len(turns)))
    assert len(cut.strips) == 2 * 48 + 5 + 2
    places = [strip.start for strip in cut.strips]
    assert places == sorted(places, key=places.index)  # one document after the other


def test_a_thread_starts_no_threads_of_its_own():
    """As on a machine of more cores than this may have: a library's default there is its number."""
    program = """
import torch
from sparkgpt.ops.cpu_attention import tiled_attention
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(20, 80, (160,), generator=generator)
ends = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
leaves = [torch.randn(ends[-1], 4, 64, generator=generator, requires_grad=True) for _ in range(3)]
found = []
for threads in (1, 4, 3, 4, 3):
    torch.set_num_threads(threads)
    out = tiled_attention(*leaves, ends)
    found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0]))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)


def test_an_exception_of_another_thread_is_raised_and_the_threads_are_as_before():
    usual, caller = torch.get_num_threads(), threading.current_thread()
    seen, both = set(), threading.Barrier(2, timeout=60)

    def work(items):
        both.wait()
        seen.update((torch.get_num_threads(), next(items)))
        if threading.current_thread() is not caller:
            raise RuntimeError("of a thread")

    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="of a thread"):
            share_out(work, [10, 20], 2)
        assert seen == {1, 10, 20} and torch.get_num_threads() == 2
        assert threading.active_count() == len(threading.enumerate())
        assert not any("ThreadPool" in thread.name for thread in threading.enumerate())
    finally:
        torch.set_num_threads(usual)


def test_a_missing_gradient_of_the_second_order_is_said():
    values = inputs([5], 2, 1, 8)
    leaves = [x.requires_grad_() for x in values[:3]]
    out = varlen_attention(*leaves, ends_of([5]), 5, "tiles")
    (dq,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_a_model_s_values_and_gradients(variant):
    plain, tiled = plain_and_switched(variant, "tiles")
    exact = Transformer(variant, compute_dtype=torch.float64).double()
    exact.load_state_dict(plain.state_dict())
    found, torchs, expected = (
        values_and_gradients(model, window(6)) for model in (tiled, plain, exact)
    )
    error = lambda values: max(
        ((values[name] - expected[name]).abs().max() / expected[name].abs().max()).item()
        for name in expected
    )
    assert error(found) <= 2 * error(torchs) <= 1e-5


def test_the_choice():
    assert choose_backend("auto", torch.device("cpu")) == "tiles"
    with pytest.raises(UserError, match="tiles is for a CPU"):
        choose_backend("tiles", torch.device("cuda"))
