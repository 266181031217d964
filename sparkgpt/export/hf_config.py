"""config.json and generation_config.json of a stock Qwen3 or Qwen3-MoE directory, both ways.

Libraries disagree on spellings: transformers 5 reads `rope_parameters`, `num_local_experts` and
`dtype`; transformers 4 and mlx_lm read `rope_theta`, `num_experts` and `torch_dtype`, and fall back
to a default without a word. Both are written, with equal values, and either is read.
"""

from pathlib import Path
from typing import Any

from sparkgpt.config import ModelConfig
from sparkgpt.errors import UserError
from sparkgpt.vocab import BOS, EOS, PAD, VOCAB_SIZE

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

# What our models never vary. A directory that says otherwise is another model.
FIXED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}

SPECIALS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}

# Stock name -> ours, where a value is only renamed.
SHAPE = {
    "hidden_size": "model_dim",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "model_layers",
    "num_attention_heads": "attention_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "decoder_sparse_step": "decoder_sparse_step",
    "mlp_only_layers": "mlp_only_layers",
    "norm_topk_prob": "norm_topk_prob",
}
# transformers' own defaults for keys that a file may leave out.
DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}


def to_hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Content of config.json; `dtype` is that of the weights, as `float32`."""
    model_type = "qwen3_moe" if config.num_experts else "qwen3"
    theta = float(config.rope_theta)
    values = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        **{theirs: getattr(config, ours) for theirs, ours in SHAPE.items()},
        **FIXED,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
        **SPECIALS,
    }
    if config.num_experts:
        values |= {theirs: getattr(config, ours) for theirs, ours in EXPERTS.items()}
        values |= {
            "num_local_experts": config.num_experts,
            "mlp_only_layers": list(config.mlp_only_layers),
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        }
    return values


def generation_config() -> dict[str, Any]:
    """Content of generation_config.json."""
    return dict(SPECIALS)


def from_hf_config(values: dict[str, Any], where: Path | str) -> ModelConfig:
    """The ModelConfig that a config.json describes.

    Raises UserError when it is another kind of model, lacks a value, or contradicts itself.
    """
    if values.get("model_type") not in ARCHITECTURES:
        raise UserError(
            f"{where} has model_type {values.get('model_type')!r}; "
            f"sparkgpt reads {' and '.join(ARCHITECTURES)}"
        )
    for name, expected in FIXED.items():
        if values.get(name, expected) != expected:
            raise UserError(f"{where} has {name} {values[name]!r}; sparkgpt needs {expected!r}")
    fields = {ours: _value(values, where, theirs) for theirs, ours in SHAPE.items()}
    fields["rope_theta"] = _rope_theta(values, where)
    if values["model_type"] == "qwen3_moe":
        values = DEFAULTS | values
        values["num_experts"] = _agreed(
            where, {name: values.get(name) for name in ("num_experts", "num_local_experts")}
        )
        fields |= {ours: _value(values, where, theirs) for theirs, ours in EXPERTS.items()}
        fields["mlp_only_layers"] = tuple(fields["mlp_only_layers"])
    return ModelConfig(**fields)


def _rope_theta(values: dict[str, Any], where: Path | str) -> float:
    rope = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling") or rope
    if scaling.get("rope_type", "default") != "default":
        raise UserError(f"{where} scales RoPE ({scaling['rope_type']}); sparkgpt does not")
    theta = {
        "rope_theta": values.get("rope_theta"),
        "rope_parameters.rope_theta": rope.get("rope_theta"),
    }
    return float(_agreed(where, theta))


def _agreed(where: Path | str, spellings: dict[str, Any]) -> Any:
    """The one value that the present spellings have."""
    present = {name: value for name, value in spellings.items() if value is not None}
    if not present:
        raise UserError(f"{where} has none of {', '.join(spellings)}; export the model again")
    first, *others = present.values()
    if any(other != first for other in others):
        said = ", ".join(f"{name} {value}" for name, value in present.items())
        raise UserError(f"{where} contradicts itself: {said}; make them equal")
    return first


def _value(values: dict[str, Any], where: Path | str, name: str) -> Any:
    if name not in values:
        raise UserError(f"{where} has no {name}; export the model again")
    return values[name]
