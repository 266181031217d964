"""Attention over packed documents: kernels, operators, their fusion with norm and RoPE, model."""

import importlib

import pytest
import torch
from helpers.interpreted import assert_as_exact, device, interpreted
from helpers.models import pack, small
from helpers.switched import assert_equal_models, plain_and_switched, poison
from torch._dynamo.testing import CompileCounterWithBackend

from sparkgpt.errors import UserError
from sparkgpt.loss import cross_entropy_sum
from sparkgpt.ops import qk_rope_attention as fused_ops
from sparkgpt.ops import tuning, varlen
from sparkgpt.ops.attention import choose_backend, varlen_attention
from sparkgpt.ops.norm import rms_norm
from sparkgpt.ops.rope import apply_rope, rope_tables

family = interpreted("attention")
family_backward = family.attention_backward
attention_tiles = interpreted("attention_tiles")
norm_and_rope = interpreted("qk_rope")
tl = importlib.import_module("triton.language")
EPS = 1e-6
MIXED = [1, 2, 63, 64, 65, 130, 1]
# Lengths, query heads, key/value heads, head dimension.
CASES = {
    "gqa 1": (MIXED, 1, 1, 64),
    "gqa 2": (MIXED, 2, 1, 128),
    "gqa 4": ([200, 3], 4, 1, 64),
    "two groups": ([1, 70], 4, 2, 64),
    "one document": ([300], 1, 1, 64),
}
CHOSEN = f"queries:{family.CANDIDATES['queries', 64][1].text}"
# On CUDA the kernels take bfloat16 alone; the interpreter has no products of it.
DTYPES = [torch.float32, torch.float16] if device() == "cpu" else [torch.bfloat16]
NO_SMALL_HEADS = "on CUDA the kernels take heads of 64 or 128 in bfloat16, the models have 16"


def ends_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def inputs(case, dtype):
    """q, k, v and the output's gradient, and cu_seqlens."""
    lengths, heads, kv_heads, head_dim = CASES[case]
    torch.manual_seed(0)
    rows = (heads, kv_heads, kv_heads, heads)
    parts = (torch.randn(sum(lengths), n, head_dim).to(dtype) for n in rows)
    return *parts, ends_of(lengths)


def plain(q, k, v, dout, ends, dtype):
    """One document at a time by autograd in `dtype`: output and gradients of q, k, v."""
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = varlen_attention(*leaves, ends, 0, "sdpa-expanded")
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]


def by_kernels(q, k, v, dout, ends):
    out, lse = family.forward(q, k, v, ends)
    assert lse.isfinite().all()
    return out, *family_backward.backward(dout, q, k, v, out, lse, ends)


def by_reference(q, k, v, dout, ends):
    out, lse = varlen.reference(q, k, v, ends)
    return out, *varlen.reference_backward(dout, q, k, v, out, lse, ends)


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("found_by", [by_kernels, by_reference])
def test_error_is_at_most_twice_that_of_torch(found_by, case, dtype):
    values = inputs(case, dtype)
    found, same = found_by(*values), plain(*values, dtype)
    exact = plain(*values, torch.float64)
    for name, *three in zip(("out", "dq", "dk", "dv"), found, same, exact, strict=True):
        assert_as_exact(*three, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_document_of_one_position_is_its_value(dtype):
    values = (torch.randn(9, n, 64).to(dtype) for n in (2, 1, 1, 2))
    q, k, v, dout = values
    out, dq, dk, dv = by_kernels(q, k, v, dout, ends_of([1] * 9))
    assert torch.equal(out, v.expand(9, 2, 64))
    assert torch.allclose(dv, dout.sum(1, keepdim=True), rtol=0.002, atol=0.002)
    # Exactly zero; here the difference of two sums of the same 64 products in other orders.
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5


def test_strided_inputs_and_equal_bits_twice():
    q, k, v, dout, ends = inputs("gqa 4", DTYPES[0])
    turned = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
    first = by_kernels(q, k, v, dout, ends)
    _, k_part, v_part = torch.cat((q, k, v), 1).split((4, 1, 1), 1)
    for others in (
        (q, k, v, dout),
        (q, k_part, v_part, turned(dout)),
        map(turned, (q, k, v, dout)),
    ):
        assert all(map(torch.equal, first, by_kernels(*others, ends)))


def test_every_candidate_agrees():
    for (kernel, head_dim), configs in family.CANDIDATES.items():
        torch.manual_seed(0)
        q, k, v, dout = (torch.randn(150, n, head_dim).to(DTYPES[0]) for n in (2, 1, 1, 2))
        ends = ends_of([149, 1])
        out, lse = family.forward(q, k, v, ends)
        first = out, *family_backward.backward(dout, q, k, v, out, lse, ends)
        other = family.default_config("keys" if kernel == "queries" else "queries", head_dim)
        for config in configs[1:]:
            if kernel == "forward":
                found = family.forward(q, k, v, ends, config)[:1]
            else:
                pair = (config, other) if kernel == "queries" else (other, config)
                found = out, *family_backward.backward(dout, q, k, v, out, lse, ends, pair)
            for a, b in zip(found, first, strict=False):
                assert agree(a, b), (kernel, head_dim, config)


def agree(a, b):
    """Up to the order of sums; in bfloat16 by the rule of `autotune`."""
    return torch.allclose(a, b, atol=1e-5) if a.dtype == torch.float32 else tuning.close(a, b)


def fused_inputs(case, dtype, seed=0):
    """qkv, gains, tables, cu_seqlens, kv_heads, EPS; and the output's gradient."""
    lengths, heads, kv_heads, head_dim = CASES[case]
    torch.manual_seed(seed)
    qkv = torch.randn(sum(lengths), heads + 2 * kv_heads, head_dim)
    qkv[:, :-kv_heads] *= 3
    gains = 1 + 0.3 * torch.randn(2, head_dim)
    positions = torch.cat([torch.arange(n) for n in lengths])
    tables = rope_tables(positions, head_dim, 1e6, dtype)
    dout = torch.randn(sum(lengths), heads, head_dim).to(dtype)
    return (qkv.to(dtype), *gains, *tables, ends_of(lengths), kv_heads, EPS), dout


def normed_turned(x, gain, cos, sin):
    """RMSNorm and RoPE in float32 at least, rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed = rms_norm(x.to(wide), gain.to(wide), EPS)
    return apply_rope(normed, cos.to(wide), sin.to(wide)).to(x.dtype)


def fused_plain(values, dout, dtype):
    """By autograd in `dtype`: output, and gradients of qkv and both gains."""
    *tensors, ends, kv_heads, _ = values
    leaves = [x.to(dtype).requires_grad_() for x in tensors[:3]]
    tables = [x.to(dtype) for x in tensors[3:]]
    q, k, v = leaves[0].split((leaves[0].shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    q, k = (normed_turned(x, gain, *tables) for x, gain in ((q, leaves[1]), (k, leaves[2])))
    out = varlen_attention(q, k, v, ends, 0, "sdpa-expanded")
    return [x.detach() for x in (out, *torch.autograd.grad(out, leaves, dout.to(dtype)))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["gqa 2", "gqa 4", "two groups"])
def test_norm_and_rope_in_the_backward_s_epilogues(case, dtype):
    # A gain's gradient is 64 or 128 numbers, of which the largest error is luck: two draws.
    draws = [fused_inputs(case, dtype, seed) for seed in range(2)]
    found = [fused_by_kernels(*draw) for draw in draws]
    if dtype == DTYPES[0]:
        assert all(map(torch.equal, found[0], fused_by_kernels(*draws[0])))
    same, exact = ([fused_plain(*d, kind) for d in draws] for kind in (dtype, torch.float64))
    for index, name in enumerate(("out", "dqkv", "dq_gain", "dk_gain")):
        pooled = [torch.cat([one[index] for one in kind]) for kind in (found, same, exact)]
        assert_as_exact(*pooled, name)


def fused_by_kernels(values, dout):
    """As `fused_plain`."""
    qkv, *gains, cos, sin, ends, kv_heads, eps = values
    v = qkv[:, -kv_heads:]
    q, k = norm_and_rope.forward(qkv, *gains, cos, sin, kv_heads, eps)
    out, lse = family.forward(q, k, v, ends)
    saved = (qkv, q, k, out, lse, gains, (cos, sin), ends, eps)
    return out, *family_backward.fused_backward(dout, *saved)


def test_the_operators_keep_their_contracts():
    q, k, v, dout, ends = inputs("two groups", DTYPES[0])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(varlen.varlen_forward, (*leaves, ends, CHOSEN))
    with torch.no_grad():
        out, lse = varlen.varlen_forward(q, k, v, ends)
        torch.library.opcheck(varlen.varlen_backward, (dout, q, k, v, out, lse, ends, CHOSEN))
    (qkv, *gains, cos, sin, ends, kv_heads, eps), dout = fused_inputs("two groups", DTYPES[0])
    leaves = [x.requires_grad_() for x in (qkv, *gains)]
    values = (*leaves, cos, sin, ends, kv_heads, eps, CHOSEN)
    torch.library.opcheck(fused_ops.fused_forward, values)
    with torch.no_grad():
        saved = fused_ops.fused_forward(*leaves, cos, sin, ends, kv_heads, eps)
        torch.library.opcheck(
            fused_ops.fused_backward, (dout, *leaves, cos, sin, ends, *saved, eps, CHOSEN)
        )


@pytest.mark.cpu("float64 is for the formulas alone")
def test_gradients_equal_finite_differences():
    torch.manual_seed(0)
    qkv = torch.randn(5, 4, 6, dtype=torch.float64, requires_grad=True)
    gains = [torch.randn(6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    tables = rope_tables(torch.arange(5), 6, 1e4, torch.float64)
    run = lambda *x: fused_ops.qk_rope_attention(*x, *tables, ends_of([1, 4]), 1, EPS)
    assert torch.autograd.gradcheck(run, (qkv, *gains), check_undefined_grad=False)
    parts = [x.detach().requires_grad_() for x in qkv.split((2, 1, 1), 1)]
    run = lambda *x: varlen_attention(*x, ends_of([3, 2]), 3, "triton")
    assert torch.autograd.gradcheck(run, parts, check_undefined_grad=False)


def grid_of(ends, tile):
    """Each slot's segment and first position, by the formula of `locate`."""
    segments = len(ends) - 1
    slots = torch.arange(family.programs(int(ends[-1]), segments, tile, 1))
    firsts = ends[:-1] // tile + torch.arange(segments)
    segment = torch.searchsorted(firsts, slots, right=True) - 1
    return segment, (slots - firsts[segment]) * tile


@pytest.mark.parametrize("kind", ["short", "mixed", "one"])
@pytest.mark.parametrize("tile", [64, 128])
def test_the_grid_holds_each_tile_of_70_000_documents_once(kind, tile):
    torch.manual_seed(0)
    longest = {"short": 3, "mixed": 700, "one": 2}[kind]
    lengths = torch.randint(1, longest, (70_000,))
    lengths = torch.tensor([300_001]) if kind == "one" else lengths
    ends = torch.tensor([0, *lengths.cumsum(0)])
    segment, first = grid_of(ends, tile)
    taken = first < lengths[segment]
    assert (first >= 0).all()
    tiles = -(-lengths // tile)
    assert torch.equal(segment[taken].bincount(minlength=len(lengths)), tiles)
    found = segment[taken] * 2**32 + first[taken]
    assert len(found.unique()) == len(found) == tiles.sum()
    assert family.programs(49_152, 70_000, tile, 16) < 2**31


def test_programs_find_their_tile_among_70_000_documents():
    torch.manual_seed(0)
    lengths = torch.randint(1, 300, (70_000,))
    ends = torch.tensor([0, *lengths.cumsum(0)], dtype=torch.int32)
    segment, first = grid_of(ends.long(), 64)
    slots = torch.tensor([0, 1, 2, 999, len(segment) // 2, len(segment) - 2, len(segment) - 1])
    found = torch.empty(len(slots), 3, dtype=torch.int64)
    if device() == "cpu":
        probe = importlib.import_module("triton.runtime.interpreter").InterpretedFunction(_probe)
    else:
        probe = importlib.import_module("triton").jit(_probe)
    probe[(len(slots),)](ends, slots.int(), found, 70_000, attention_tiles.locate)
    at = segment[slots]
    assert torch.equal(found, torch.stack((ends[at].long(), lengths[at], first[slots]), 1))


def _probe(cu_S, slots, found, segments, locate: tl.constexpr):
    start, length, first = locate(cu_S, segments, tl.load(slots + tl.program_id(0)), 64)
    tl.store(found + tl.program_id(0) * 3, start)
    tl.store(found + tl.program_id(0) * 3 + 1, length)
    tl.store(found + tl.program_id(0) * 3 + 2, first)


@pytest.mark.cpu(NO_SMALL_HEADS)
def test_the_model_is_the_same_with_it(variant):
    for fused in (False, True):
        assert_equal_models(*plain_and_switched(variant, "triton", qk_rope=fused))


@pytest.mark.cpu(NO_SMALL_HEADS)
@pytest.mark.parametrize("fused", [False, True])
def test_one_graph_for_any_number_of_documents(fused):
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    _, model = plain_and_switched(small(model_layers=1), "triton", qk_rope=fused)
    loss = lambda *window: cross_entropy_sum(model(window[0], *window[2:])[0], window[1])
    compiled = torch.compile(loss, backend=counter, fullgraph=True)
    after = []
    for lengths in ([40], [10, 30], [1] * 40, [5, 5, 30], [39, 1]):
        tokens_T, targets_T, positions_T, ends = pack([bytes(n - 1) for n in lengths])
        nats = compiled(tokens_T, targets_T, positions_T, ends)
        nats.backward()
        assert nats.item() == pytest.approx(loss(tokens_T, targets_T, positions_T, ends).item())
        after.append(counter.frame_count)
    torch._dynamo.reset()
    assert after == [1, 2, 2, 2, 2]


def test_the_choice(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    there = {"triton"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in there else None)
    assert choose_backend("auto", cuda) == choose_backend("auto", cuda, 128) == "triton"
    assert choose_backend("auto", cuda, 96) == "varlen"
    assert choose_backend("auto", cuda, 128, triton=False) == "varlen"
    assert choose_backend("triton", cuda, 64, triton=False) == "triton"
    with pytest.raises(UserError, match="head dimension of 64 or 128 is needed, not 96"):
        choose_backend("triton", cuda, 96)
    there.add("flash_attn")
    assert choose_backend("auto", cuda, 96) == "flash-attn"
    there.remove("triton")
    assert choose_backend("auto", cuda, 128) == "flash-attn"
    with pytest.raises(UserError, match="triton is not installed"):
        choose_backend("triton", cuda, 64)
    with pytest.raises(UserError, match="triton needs a CUDA device"):
        choose_backend("triton", cpu, 64)
