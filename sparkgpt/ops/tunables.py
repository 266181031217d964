"""Which of our kernels have configurations to choose from, and what each is measured on.

SwiGLU's and attention's: their products can be tiled in several ways that fit. The other families
have one configuration each, which follows from the shape; in Muon's it must, so that ranks agree.

Shapes: T packed positions, R rows sorted by expert, E experts (1 for a dense layer), D model width,
F hidden width, G = 2F, N query heads, K key/value heads, A = N + 2K, H head dimension, C = H / 2,
S = documents + 1, P programs. Tensors are seeded; bfloat16, but on a CPU float32: Triton's
interpreter has no products of bfloat16. Needs triton.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparkgpt.config import ModelConfig
from sparkgpt.ops.choices import shape_text
from sparkgpt.ops.kernels import attention, grouped, qk_rope, swiglu
from sparkgpt.ops.kernels.attention_backward import Normed, Saved, launch_keys, launch_queries
from sparkgpt.ops.kernels.attention_tiles import CANDIDATES
from sparkgpt.ops.kernels.specimen import Config, Tunable


def of_model(model: ModelConfig, positions: int, device: torch.device) -> list[Tunable]:
    """Every kernel with a choice, of windows of `positions`; all are launched on `device`."""
    return _swiglu(model, positions, device) + _attention(model, positions, device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _normal(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": _dtype(device)}
    return [torch.randn(shape, **options) for shape in shapes]


_by_rows = functools.partial(grouped.grouped_matmul, by_rows=True)
# Per kernel, as `sparkgpt.ops.swiglu` names it: its candidates, its launcher, and what it reads.
SWIGLU = {
    "swiglu_forward": (swiglu.FORWARD, swiglu.swiglu_forward, "x_RD", "gate_up_EGD"),
    "swiglu_dgrad": (swiglu.DGRAD, swiglu.swiglu_dgrad, "grad_RF", "acts_RG", "gate_up_EGD"),
    "swiglu_wgrad": (swiglu.WGRAD, swiglu.swiglu_wgrad, "grad_RF", "acts_RG", "x_RD"),
    "grouped_matmul": (grouped.MATMUL, grouped.grouped_matmul, "hidden_RF", "down_EDF"),
    "grouped_matmul_by_rows": (grouped.MATMUL, _by_rows, "grad_RD", "down_EDF"),
    "grouped_outer": (grouped.OUTER, grouped.grouped_outer, "grad_RD", "hidden_RF"),
}


def _swiglu(model: ModelConfig, positions: int, device: torch.device) -> list[Tunable]:
    """Of the model's dense layers and of its sparse ones."""
    sizes = []
    if len(model.sparse_layers) < model.model_layers:
        sizes.append((positions, model.model_dim, 1, model.intermediate_size, device))
    if model.sparse_layers:
        rows, experts = positions * model.num_experts_per_tok, model.num_experts
        sizes.append((rows, model.model_dim, experts, model.moe_intermediate_size, device))
    return [_swiglu_tunable(name, *one) for one in sizes for name in SWIGLU]


def _swiglu_tunable(name: str, rows: int, width: int, experts: int, hidden: int, device) -> Tunable:
    candidates, launch, *reads = SWIGLU[name]

    def run(config: Config) -> tuple[Tensor, ...]:
        inputs = _swiglu_inputs(rows, width, experts, hidden, device)
        out = launch(*(inputs[tensor] for tensor in (*reads, "offsets_E")), config=config)
        return out if isinstance(out, tuple) else (out,)

    key = swiglu.FAMILY, shape_text(D=width, E=experts, F=hidden), name
    return Tunable(*key, grouped.default_config(candidates, _dtype(device)), candidates, run)


@functools.lru_cache(maxsize=1)  # the kernels of a shape share them, and the next shape frees them
def _swiglu_inputs(rows: int, width: int, experts: int, hidden: int, device) -> dict[str, Tensor]:
    shapes = {"x_RD": (rows, width), "grad_RD": (rows, width)}
    shapes |= {"hidden_RF": (rows, hidden), "grad_RF": (rows, hidden)}
    shapes |= {"acts_RG": (rows, 2 * hidden), "gate_up_EGD": (experts, 2 * hidden, width)}
    shapes["down_EDF"] = experts, width, hidden
    found = dict(zip(shapes, _normal(device, *shapes.values()), strict=True))
    found["gate_up_EGD"] *= width**-0.5
    found["down_EDF"] *= hidden**-0.5
    return {**found, "offsets_E": expert_ends(rows, experts, device)}


def expert_ends(rows: int, num_experts: int, device: torch.device) -> Tensor:
    """Offsets (E,) int32 of rows spread over experts as an untrained router does: unevenly."""
    generator = torch.Generator("cpu").manual_seed(0)
    weight_E = torch.randn(num_experts, generator=generator, device="cpu").mul(0.5).exp()
    ends_E = (weight_E.cumsum(0) / weight_E.sum() * rows).round()
    ends_E[-1] = rows
    return ends_E.to(device, torch.int32)


class _Attended(NamedTuple):
    """What attention's kernels read, k and v in the memory that training has them in."""

    saved: Saved
    normed: Normed
    qkv_TAH: Tensor
    delta_NT: Tensor

    def split(self, x_TAH: Tensor) -> tuple[Tensor, ...]:
        """Views of queries, keys and values."""
        heads, kv_heads = self.saved.q_TNH.shape[1], self.saved.k_TKH.shape[1]
        return x_TAH.split((heads, kv_heads, kv_heads), 1)


def _forward(x: _Attended, config: Config) -> tuple[Tensor, ...]:
    return attention.forward(x.saved.q_TNH, x.saved.k_TKH, x.saved.v_TKH, x.saved.cu_S, config)


def _queries(x: _Attended, config: Config) -> tuple[Tensor, ...]:
    dq_TNH = torch.empty_like(x.saved.q_TNH)
    return dq_TNH, launch_queries(x.saved, dq_TNH, None, config)[0]


def _keys(x: _Attended, config: Config) -> tuple[Tensor, ...]:
    dk_TKH, dv_TKH = torch.empty_like(x.saved.k_TKH), torch.empty_like(x.saved.k_TKH)
    launch_keys(x.saved, x.delta_NT, dk_TKH, dv_TKH, None, config)
    return dk_TKH, dv_TKH


# A gain's gradient is compared as exactly as what it is summed from: products of rounded weights.
def _fused_queries(x: _Attended, config: Config) -> tuple[Tensor, ...]:
    dq_TNH = x.split(torch.empty_like(x.qkv_TAH))[0]
    delta_NT, shares_PH = launch_queries(x.saved, dq_TNH, x.normed, config)
    return dq_TNH, delta_NT, shares_PH.sum(0).to(dq_TNH.dtype)


def _fused_keys(x: _Attended, config: Config) -> tuple[Tensor, ...]:
    _, dk_TKH, dv_TKH = x.split(torch.empty_like(x.qkv_TAH))
    shares_PH = launch_keys(x.saved, x.delta_NT, dk_TKH, dv_TKH, x.normed, config)
    return dk_TKH, dv_TKH, shares_PH.sum(0).to(dk_TKH.dtype)


# Per kernel, as the operators name it: that of its candidates, and what it does in a layer.
ATTENTION = {
    "forward": ("forward", _forward),
    "queries": ("queries", _queries),
    "keys": ("keys", _keys),
    "fused_queries": ("queries", _fused_queries),
    "fused_keys": ("keys", _fused_keys),
}


def _attention(model: ModelConfig, positions: int, device: torch.device) -> list[Tunable]:
    """At the model's heads, the backward's plain and fused with norm and RoPE."""
    shape = model.attention_heads, model.kv_heads, model.head_dim
    if ("forward", model.head_dim) not in CANDIDATES:
        return []
    sizes = shape, positions, model.max_position_embeddings, model.rms_norm_eps, device
    found = []
    for name, (kind, launch) in ATTENTION.items():
        candidates = CANDIDATES[kind, model.head_dim]
        run = lambda config, launch=launch: launch(_attention_inputs(*sizes), config)
        key = attention.FAMILY, shape_text(N=shape[0], K=shape[1], H=shape[2]), name
        found.append(Tunable(*key, candidates[0], candidates, run))
    return found


@functools.lru_cache(maxsize=1)  # as SwiGLU's
def _attention_inputs(
    shape: tuple[int, int, int], positions: int, longest: int, eps: float, device
) -> _Attended:
    heads, kv_heads, head_dim = shape
    split = heads, kv_heads, kv_heads
    shapes = (sum(split), head_dim), (heads, head_dim), (head_dim // 2,)
    qkv_TAH, dout_TNH, angle_TC = _normal(device, *((positions, *rest) for rest in shapes))
    tables = angle_TC.cos().repeat(1, 2), angle_TC.sin().repeat(1, 2)
    gain_H = torch.ones(head_dim, device=device)
    raw_q_TNH, raw_k_TKH, v_TKH = qkv_TAH.split(split, 1)
    qk = qk_rope.forward(qkv_TAH, gain_H, gain_H, *tables, kv_heads, eps)
    cu_S = document_ends(positions, longest, device)
    saved = Saved(dout_TNH, *qk, v_TKH, *attention.forward(*qk, v_TKH, cu_S), cu_S)
    delta_NT, _ = launch_queries(saved, torch.empty_like(qk[0]), None)
    normed = Normed(raw_q_TNH, raw_k_TKH, gain_H, gain_H, *tables, eps)
    return _Attended(saved, normed, qkv_TAH, delta_NT)


def document_ends(positions: int, longest: int, device: torch.device) -> Tensor:
    """cu_seqlens (S,) int32 of documents that fill a window: most short, and most of the positions
    in long ones. Their lengths' logarithms are uniform from sqrt(longest) to longest."""
    generator = torch.Generator("cpu").manual_seed(0)
    ends = [0]
    while ends[-1] < positions:
        share = torch.rand((), generator=generator, device="cpu").item()
        ends.append(min(positions, ends[-1] + round(longest ** (0.5 + 0.5 * share))))
    return torch.tensor(ends, dtype=torch.int32, device=device)
