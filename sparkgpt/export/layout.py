"""Where each of our fused tensors lies in a stock Qwen3 or Qwen3-MoE file, as one table.

Source of the names: transformers' Qwen3ForCausalLM and Qwen3MoeForCausalLM, experts one by one
(the packed form that newer versions keep in memory does not load in older ones, nor in mlx_lm).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparkgpt.config import ModelConfig
from sparkgpt.errors import UserError
from sparkgpt.vocab import VOCAB_SIZE

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Fused:
    """One of our tensors: its shape, and the index into it of every stock tensor it holds."""

    shape: tuple[int, ...]
    parts: dict[str, tuple]


def layout(config: ModelConfig) -> dict[str, Fused]:
    """Native name -> Fused, for every tensor of the model. The parts cover each tensor once."""
    width = config.model_dim
    table = {
        "embed_tokens.weight": _whole("model.embed_tokens.weight", VOCAB_SIZE, width),
        "norm.weight": _whole("model.norm.weight", width),
        "lm_head.weight": _whole("lm_head.weight", VOCAB_SIZE, width),
    }
    for layer in range(config.model_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        table |= _attention(config, ours, theirs)
        table |= (_moe if config.is_sparse(layer) else _mlp)(config, ours, theirs)
    return table


def _attention(config: ModelConfig, ours: str, theirs: str) -> dict[str, Fused]:
    width, head = config.model_dim, config.head_dim
    q, kv = config.attention_heads * head, config.kv_heads * head
    attention = theirs + "self_attn."
    rows = {
        attention + "q_proj.weight": (slice(0, q),),
        attention + "k_proj.weight": (slice(q, q + kv),),
        attention + "v_proj.weight": (slice(q + kv, q + 2 * kv),),
    }
    table = {
        ours + f"{norm}.weight": _whole(theirs + f"{norm}.weight", width)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    for norm in ("q_norm", "k_norm"):
        table[ours + f"attention.{norm}.weight"] = _whole(attention + f"{norm}.weight", head)
    table[ours + "attention.qkv.weight"] = Fused((q + 2 * kv, width), rows)
    table[ours + "attention.o.weight"] = _whole(attention + "o_proj.weight", width, q)
    return table


def _mlp(config: ModelConfig, ours: str, theirs: str) -> dict[str, Fused]:
    width, hidden = config.model_dim, config.intermediate_size
    rows = {
        theirs + "mlp.gate_proj.weight": (slice(0, hidden),),
        theirs + "mlp.up_proj.weight": (slice(hidden, 2 * hidden),),
    }
    return {
        ours + "mlp.gate_up.weight": Fused((2 * hidden, width), rows),
        ours + "mlp.down.weight": _whole(theirs + "mlp.down_proj.weight", width, hidden),
    }


def _moe(config: ModelConfig, ours: str, theirs: str) -> dict[str, Fused]:
    width, hidden, experts = config.model_dim, config.moe_intermediate_size, config.num_experts
    gate_up, down = {}, {}
    for expert in range(experts):
        name = theirs + f"mlp.experts.{expert}."
        gate_up[name + "gate_proj.weight"] = (expert, slice(0, hidden))
        gate_up[name + "up_proj.weight"] = (expert, slice(hidden, 2 * hidden))
        down[name + "down_proj.weight"] = (expert,)
    return {
        ours + "moe.router.weight": _whole(theirs + "mlp.gate.weight", experts, width),
        ours + "moe.gate_up": Fused((experts, 2 * hidden, width), gate_up),
        ours + "moe.down": Fused((experts, width, hidden), down),
    }


def _whole(name: str, *shape: int) -> Fused:
    return Fused(shape, {name: (...,)})


def split(state: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Stock name -> view of our tensors. UserError when `state` is not exactly the model's."""
    table = layout(config)
    _check_names("the model's weights", set(table), state)
    parts = {}
    for name, fused in table.items():
        _check_shape(name, fused.shape, state[name])
        parts |= {part: state[name][index] for part, index in fused.parts.items()}
    return parts


def join(parts: dict[str, Tensor], config: ModelConfig, where: Path | str) -> dict[str, Tensor]:
    """The inverse of `split`, bit for bit, in the dtype of `parts`.

    Raises UserError when a tensor of `where` is missing, unexpected or of another shape.
    """
    import torch

    table = layout(config)
    _check_names(where, {part for fused in table.values() for part in fused.parts}, parts)
    state = {}
    for name, fused in table.items():
        whole = torch.empty(fused.shape, dtype=parts[next(iter(fused.parts))].dtype)
        for part, index in fused.parts.items():
            _check_shape(f"{part} in {where}", whole[index].shape, parts[part])
            whole[index] = parts[part]
        state[name] = whole
    return state


def _check_names(where: Path | str, expected: set[str], found: dict) -> None:
    """UserError when `found` has not exactly the names of `expected`."""
    for problem, names in (("lacks", expected - found.keys()), ("has", found.keys() - expected)):
        if names := sorted(names):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{where} {problem} {', '.join(names[:3])}{more}: "
                "not the tensors that its config asks for; export it again"
            )


def _check_shape(name: str, expected: tuple[int, ...], tensor: Tensor) -> None:
    if tensor.shape != tuple(expected):
        raise UserError(
            f"{name} has shape {tuple(tensor.shape)}, the config asks for {tuple(expected)}"
        )
