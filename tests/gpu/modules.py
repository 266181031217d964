"""The cases' modules, with equal weights and inputs, and the bare library calls beside them."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from gpu.cases import DOCUMENT, POSITIONS, SHAPES, Case, one_layer

from sparkgpt.config import ModelConfig
from sparkgpt.data.stream import _lay_out
from sparkgpt.model import Transformer
from sparkgpt.model.attention import Attention
from sparkgpt.model.cost import matrices
from sparkgpt.model.mlp import MLP
from sparkgpt.model.moe import MoE
from sparkgpt.ops.attention import varlen_attention
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.rope import rope_tables
from sparkgpt.optim.muon import Muon, orthogonalize
from sparkgpt.train.step import window_loss

MOMENTUM = 0.95


def build(case: Case, device, dtype, positions: int = POSITIONS) -> Callable:
    """A function that runs forward and backward once and returns outputs and gradients.

    Equal weights and inputs for equal parts and shapes, whatever is fused; compiled, as in
    training, unless in float64.
    """
    makers = {"mlp": _mlp, "attention": _attention, "moe": _moe, "head": _head, "muon": _muon}
    torch.manual_seed(0)
    return makers[case.part](case, SHAPES[case.shape], device, dtype, positions)


def _kernels(case: Case):
    return Kernels(**{name: True for name in case.fused if name != "attention"})


def _filled(module, device):
    """On the device, in float32 (float64 stays to `dtype`), each weight random."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.04 * noise)
    return module.to(device)


def _stepped(function: Callable, leaves: list, dtype) -> Callable:
    grad: list = []
    run = function if dtype == torch.float64 else torch.compile(function)

    def step():
        out = run()
        if not grad:
            generator = torch.Generator(device="cpu").manual_seed(1)
            grad.append(torch.randn(out.shape, generator=generator).to(out))
        return (out.detach(), *torch.autograd.grad(out, leaves, grad[0]))

    return step


def _input(model: ModelConfig, device, dtype, positions: int):
    return torch.randn(positions, model.model_dim).to(device, dtype).requires_grad_()


def _module_step(module, call: Callable, model: ModelConfig, device, dtype, positions: int):
    x_TD = _input(model, device, dtype, positions)
    module = _filled(module, device)
    if dtype == torch.float64:
        module = module.double()
    return _stepped(lambda: call(module, x_TD), [x_TD, *module.parameters()], dtype)


def _mlp(case, model, device, dtype, positions):
    return _module_step(
        MLP(model, _kernels(case)), lambda m, x: m(x), model, device, dtype, positions
    )


def _moe(case, model, device, dtype, positions):
    """With drawn choices instead of the router's: in another precision it would choose others."""
    module = MoE(model, _kernels(case))
    probs_TE = torch.rand(positions, model.num_experts).softmax(-1)
    weight_Tk, expert_Tk = (t.to(device) for t in probs_TE.topk(model.num_experts_per_tok))
    probs_TE, weight_Tk = probs_TE.to(device), weight_Tk.to(dtype)
    module.route = lambda x_TD: (probs_TE, weight_Tk, expert_Tk)
    del module.router
    call = lambda m, x: m(x, None)[0]
    return _module_step(module, call, model, device, dtype, positions)


def segments(positions: int, device):
    """cu_seqlens of documents of DOCUMENT positions, and positions within them."""
    ends = [*range(0, positions, DOCUMENT), positions]
    starts = torch.arange(positions) // DOCUMENT * DOCUMENT
    return torch.tensor(ends, dtype=torch.int32, device=device), (
        torch.arange(positions) - starts
    ).to(device)


def _attention(case, model, device, dtype, positions):
    ends_S, positions_T = segments(positions, device)
    tables = rope_tables(positions_T, model.head_dim, model.rope_theta, dtype)
    backend = "sdpa-expanded" if dtype != torch.bfloat16 else case.backend
    call = lambda m, x: m(x, *tables, ends_S, model.max_position_embeddings, backend)
    return _module_step(Attention(model, _kernels(case)), call, model, device, dtype, positions)


def _head(case, model, device, dtype, positions):
    """The loss of a window on a model of one layer: head and cross-entropy have no module."""
    backend = "sdpa-expanded" if dtype != torch.bfloat16 else case.backend
    network = _filled(Transformer(one_layer(model), dtype, backend, _kernels(case)), device)
    if dtype == torch.float64:
        network = network.double()
    draws = np.random.default_rng(0)
    count, longest = -(-positions // DOCUMENT), min(DOCUMENT, positions)
    documents = [draws.integers(0, 256, longest - 1, dtype=np.uint8) for _ in range(count)]
    window = _lay_out(documents, range(count), count * longest).to(device)
    call = lambda: window_loss(network, window)[0] / positions
    return _stepped(call, list(network.parameters()), dtype)


def _muon(case, model, device, dtype, positions):
    """The first update of every matrix of the model, at rate 1; for fewer positions than a window,
    of one matrix of each shape. In float64 by the formula, on the CPU."""
    parameters = [
        torch.zeros(rows, columns, device=device, requires_grad=True)
        for count, rows, columns in matrices(model)
        for _ in range(count if positions >= POSITIONS else 1)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(device)
    if dtype == torch.float64:
        return lambda: tuple(
            _first_update(parameter.grad.double().cpu()) for parameter in parameters
        )
    optimizer = Muon(parameters, 1.0, MOMENTUM, "muon" in case.fused)

    def step():
        with torch.no_grad():
            for tensor in (*parameters, *(s["momentum"] for s in optimizer.state.values())):
                tensor.zero_()
        optimizer.step()
        return tuple(parameter.detach() for parameter in parameters)

    return step


def _first_update(gradient_MN):
    look_MN = gradient_MN.lerp((1 - MOMENTUM) * gradient_MN, MOMENTUM)
    rows, columns = gradient_MN.shape
    return -(max(1.0, rows / columns) ** 0.5) * orthogonalize(look_MN[None])[0]


def library(case: Case, device, positions: int = POSITIONS) -> Callable | None:
    """The bare library calls that a case's module can't do without, in bfloat16: cuBLAS or
    grouped_mm for its products, varlen_attn; None where there is none of the kind."""
    model = SHAPES[case.shape]
    makers = {"mlp": _bare_products, "moe": _bare_grouped, "attention": _bare_attention}
    maker = makers.get(case.part)
    return maker(model, device, positions) if maker else None


def _normal(device, *shapes):
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def _bare_products(model: ModelConfig, device, positions: int):
    width, hidden = model.model_dim, model.intermediate_size
    x, gate_up, h, down, y, pair = _normal(
        device, (positions, width), (2 * hidden, width), (positions, hidden), (width, hidden),
        (positions, width), (positions, 2 * hidden),
    )  # fmt: skip
    return lambda: (x @ gate_up.T, h @ down.T, y @ down, y.T @ h, pair @ gate_up, pair.T @ x)


def _bare_grouped(model: ModelConfig, device, positions: int):
    width, hidden, experts = model.model_dim, model.moe_intermediate_size, model.num_experts
    rows = positions * model.num_experts_per_tok
    x, gate_up, h, down, y, pair = _normal(
        device, (rows, width), (experts, 2 * hidden, width), (rows, hidden),
        (experts, width, hidden), (rows, width), (rows, 2 * hidden),
    )  # fmt: skip
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * (rows // experts)
    ends[-1] = rows
    return lambda: (
        F.grouped_mm(x, gate_up.mT, offs=ends), F.grouped_mm(h, down.mT, offs=ends),
        F.grouped_mm(y, down, offs=ends), F.grouped_mm(y.mT, h, offs=ends),
        F.grouped_mm(pair, gate_up, offs=ends), F.grouped_mm(pair.mT, x, offs=ends),
    )  # fmt: skip


def _bare_attention(model: ModelConfig, device, positions: int):
    heads, keys = model.attention_heads, model.kv_heads
    q, k, v, grad = _normal(
        device, *((positions, n, model.head_dim) for n in (heads, keys, keys, heads))
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    ends_S, _ = segments(positions, device)
    attend = lambda: varlen_attention(*leaves, ends_S, model.max_position_embeddings, "varlen")
    return lambda: torch.autograd.grad(attend(), leaves, grad)
