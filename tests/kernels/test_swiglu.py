"""The fused SwiGLU MLP: its formulas, its kernels in the interpreter, and the model with it on."""

import dataclasses

import pytest
import torch
from helpers.interpreted import assert_as_exact, interpreted, poisoned
from helpers.models import DOCUMENTS, VARIANTS, pack, randomised
from helpers.switched import assert_equal_models, of_formulas, plain_and_switched, poison
from torch._dynamo.testing import CompileCounterWithBackend

from sparkgpt.model import Transformer
from sparkgpt.model.mlp import swiglu
from sparkgpt.ops import attention
from sparkgpt.ops import swiglu as ops
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.experts import CPU_LOOPS
from sparkgpt.ops.kernels.specimen import Config

grouped = interpreted("grouped")
kernels = interpreted("swiglu")

# (D, F, rows of each expert)
CASES = {
    "one row": (48, 24, [1]),
    "dense, odd": (40, 24, [63]),
    "dense, long": (17, 9, [1000]),
    "empty experts": (24, 33, [0, 37, 0, 0, 5, 0]),
    "all to one": (33, 16, [0, 0, 50, 0]),
    "many": (8, 8, [1, 2, 3, 0, 1, 16, 17, 1, 0]),
    "no row": (16, 16, [0, 0]),
}
SHIPPED = (200, 136, [0, 131, 1, 0, 70])  # edges in tiles of 64 and 128


def tiny(candidates):
    """Tiles so small that every case has edges, and most more than one tile each way."""
    return Config(dict.fromkeys(candidates[0].tiles, 16))


def small(candidates):
    """For more rows: the interpreter takes a millisecond a tile."""
    return Config(dict.fromkeys(candidates[0].tiles, 64))


def inputs(case, dtype=torch.float64, seed=0):
    """x, gate_up, down, offsets, the output's gradient; in fp64 what `dtype` holds exactly."""
    width, hidden, counts = case
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    experts, rows = len(counts), sum(counts)
    x = draw(rows, width)
    gate_up = (draw(experts, 2 * hidden, width) * width**-0.5).to(dtype)
    down = (draw(experts, width, hidden) * hidden**-0.5).to(dtype)
    return x, gate_up, down, torch.tensor(counts).cumsum(0).to(torch.int32), draw(rows, width)


def with_gradients(function, x, gate_up, down, offsets, grad):
    """Output and the gradients of x, gate_up and down by autograd."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, gate_up, down)]
    out = function(*leaves, offsets)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def plain(x, gate_up, down, offsets):
    """As the model computes it without kernels on a CPU, on any device and in any dtype."""
    grouped_linear = CPU_LOOPS["grouped_linear"]
    return grouped_linear(swiglu(grouped_linear(x, gate_up, offsets)), down, offsets)


@pytest.mark.cpu("float64 is for the formulas alone")
@pytest.mark.parametrize("name", CASES)
def test_formulas_equal_autograd_of_the_plain_path(name):
    arguments = inputs(CASES[name])
    ours = with_gradients(ops.swiglu_mlp, *arguments)
    for a, b in zip(ours, with_gradients(plain, *arguments), strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)


def by_kernels(x, gate_up, down, offsets, grad, tiles):
    """Everything that the kernels compute, forward and backward, with a tiling function."""
    hidden, acts = kernels.swiglu_forward(x, gate_up, offsets, tiles(kernels.FORWARD))
    y = grouped.grouped_matmul(hidden, down, offsets, config=tiles(grouped.MATMUL))
    d_hidden = grouped.grouped_matmul(grad, down, offsets, True, tiles(grouped.MATMUL))
    d_down = grouped.grouped_outer(grad, hidden, offsets, tiles(grouped.OUTER))
    d_x = kernels.swiglu_dgrad(d_hidden, acts, gate_up, offsets, tiles(kernels.DGRAD))
    d_gate_up = kernels.swiglu_wgrad(d_hidden, acts, x, offsets, tiles(kernels.WGRAD))
    return y, d_x, d_gate_up, d_down


@pytest.fixture
def empty_is_nan(monkeypatch):
    """Every buffer that a launcher makes is full of NaN."""
    poison(monkeypatch)


def errors_of(case, dtype, seed, tiles):
    """Per result: ours, the plain path's in the same dtype, and in float64."""
    arguments = [t if t.dtype == torch.int32 else t.to(dtype) for t in inputs(case, dtype, seed)]
    wide = [t if t.dtype == torch.int32 else t.double() for t in arguments]
    ours = by_kernels(*arguments, tiles=tiles)
    return ours, with_gradients(plain, *arguments), with_gradients(plain, *wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_kernels_are_as_exact_as_the_plain_path(name, dtype, empty_is_nan):
    # Of a few numbers the largest error is luck, so the small cases are drawn more than once.
    rows = sum(CASES[name][2])
    tiles = small if rows > 100 else tiny
    drawn = [errors_of(CASES[name], dtype, seed, tiles) for seed in range(1 if rows > 40 else 4)]
    for index, output in enumerate(("y", "d_x", "d_gate_up", "d_down")):
        pooled = [torch.cat([found[kind][index].flatten() for found in drawn]) for kind in range(3)]
        assert_as_exact(*pooled, f"{name}: {output}")


def shipped(candidates):
    """What a launch takes by itself for 16-bit operands."""
    return candidates[0]


def test_shipped_tiles_on_odd_sizes(empty_is_nan):
    for index, (ours, same, fp64) in enumerate(
        zip(*errors_of(SHIPPED, torch.float16, 0, shipped), strict=True)
    ):
        assert_as_exact(ours, same, fp64, f"result {index}")


def test_each_candidate_gives_the_same(empty_is_nan):
    arguments = inputs(SHIPPED, torch.float16)
    first = by_kernels(*arguments, tiles=lambda candidates: candidates[0])
    second = by_kernels(*arguments, tiles=lambda candidates: candidates[1])
    for a, b in zip(first, second, strict=True):
        assert torch.allclose(a, b, atol=2**-8, rtol=2**-8)


def test_many_experts(empty_is_nan):
    counts = torch.randint(0, 4, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    for ours, same, fp64 in zip(*errors_of((8, 8, counts), torch.float16, 0, tiny), strict=True):
        assert_as_exact(ours, same, fp64)


def test_rows_beyond_the_last_offset_come_out_as_zeros(empty_is_nan):
    x, gate_up, down, offsets, grad = inputs(CASES["empty experts"], torch.float32)
    beyond = poisoned(37, x.shape[1])  # more than a tile of what must never be read
    both = [torch.cat((t, beyond)) for t in (x, grad)]
    long = by_kernels(both[0], gate_up, down, offsets, both[1], tiles=tiny)
    short = by_kernels(x, gate_up, down, offsets, grad, tiles=tiny)
    rows = len(x)
    for ours, expected in zip(long, short, strict=True):
        assert torch.equal(ours[:rows], expected)
    for ours in long[:2]:
        assert torch.equal(ours[rows:], torch.zeros(37, x.shape[1]))
    formulas = ops.swiglu_mlp(both[0], gate_up, down, offsets)
    assert torch.equal(formulas[rows:], torch.zeros(37, x.shape[1]))


def test_any_split_has_a_tile_for_each_row():
    generator = torch.Generator().manual_seed(0)
    for block in (1, 16, 128):
        for experts in (1, 3, 64):
            counts = torch.randint(0, 300, (experts,), generator=generator)
            counts *= torch.randint(0, 2, (experts,), generator=generator)
            ends = [0, *counts.cumsum(0).tolist(), int(counts.sum()) + 5]
            # Where each group's tiles begin, as in `row_tile`.
            first = [end // block + expert for expert, end in enumerate(ends)]
            for group, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
                assert first[group] + -(-(end - start) // block) <= first[group + 1]
            assert grouped.tiles_of(ends[-1], experts, block) == first[-1]


OPERATIONS = {
    "swiglu_hidden": lambda x, up, down, ends, grad: (x, up, ends),
    "swiglu_down": lambda x, up, down, ends, grad: (grad[:, : down.shape[2]], down, ends),
    "swiglu_hidden_backward": lambda x, up, down, ends, grad: (
        grad[:, : up.shape[1] // 2], grad[:, : up.shape[1]].unflatten(1, (2, -1)).movedim(1, 0),
        x, up, ends,
    ),
    "swiglu_down_backward": lambda x, up, down, ends, grad: (
        x, grad[:, : down.shape[2]], down, ends,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_what_torch_expects(name):
    x, gate_up, down, offsets, grad = inputs((16, 8, [5, 0, 2]), torch.float16)
    arguments = OPERATIONS[name](x, gate_up, down, offsets, grad)
    configs = f"swiglu_dgrad:{kernels.DGRAD[1].text}"
    backward = name.endswith("backward")
    copies = [t.clone().requires_grad_(t.is_floating_point() and not backward) for t in arguments]
    torch.library.opcheck(getattr(ops, name), (*copies, configs))


def fused(model):
    """The same weights with the kernels on."""
    ours = Transformer(model.config, model.compute_dtype, kernels=Kernels(swiglu=True))
    ours.load_state_dict(model.state_dict())
    return ours


def loss_and_gradients(model):
    tokens_T, targets_T, positions_T, cu_seqlens_S = pack(DOCUMENTS)
    logits_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
    loss = torch.nn.functional.cross_entropy(logits_TV, targets_T)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@of_formulas
def test_model_equals_the_plain_one(variant):
    assert_equal_models(*plain_and_switched(variant, swiglu=True))


def test_model_in_bf16_has_float32_gradients():
    model = randomised(VARIANTS["moe"]).float()
    model.compute_dtype = torch.bfloat16
    loss, _ = loss_and_gradients(model)
    fused_loss, gradients = loss_and_gradients(fused(model))
    assert fused_loss.item() == pytest.approx(loss.item(), rel=1e-2)
    assert {g.dtype for g in gradients.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_one_graph_serves_all_windows(kind, monkeypatch):
    # Attention as one operation of its lengths, as on a GPU; on a CPU it loops over documents.
    monkeypatch.setitem(
        attention.BACKENDS,
        "sdpa-expanded",
        lambda q, k, v, ends, _: (
            q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1) + len(ends)
        ),
    )
    model = fused(randomised(dataclasses.replace(VARIANTS[kind], model_layers=1)))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *window: model(*window), backend=counter, fullgraph=True)
    tokens_T, _, positions_T, _ = pack([bytes(40)])
    for ends in ([0, 41], [0, 7, 41], [0, 1, 2, 3, 41], [0, *range(10, 42)]):
        window = (tokens_T, positions_T, torch.tensor(ends, dtype=torch.int32))
        logits_TV, _ = compiled(*window)
        assert torch.allclose(logits_TV, model(*window)[0], atol=1e-5)
        logits_TV.sum().backward()
    torch._dynamo.reset()
    assert counter.frame_count == 2  # for the length that it sees first, then for any
