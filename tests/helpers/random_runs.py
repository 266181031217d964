"""Tiny models with random weights, head and gains included, and run folders made of them."""

import dataclasses
from pathlib import Path

import torch

from sparkgpt.checkpoint import save_final
from sparkgpt.config import ModelConfig
from sparkgpt.files import write_json
from sparkgpt.model import Transformer

# head_dim is not model_dim / attention_heads; widths are multiples of 4, as transformers 5 needs.
SHAPE = {
    "model_layers": 3,
    "model_dim": 32,
    "attention_heads": 4,
    "kv_heads": 2,
    "head_dim": 12,
    "intermediate_size": 40,
    "max_position_embeddings": 320,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

VARIANTS = {
    "dense": {},
    "moe": EXPERTS,
    "sparse-step": {**EXPERTS, "decoder_sparse_step": 2},
    "mlp-only": {**EXPERTS, "mlp_only_layers": (0, 2)},
    "no-norm-topk": {**EXPERTS, "norm_topk_prob": False},
    # All three at once, for the checks that are too slow to repeat.
    "mixed": {**EXPERTS, "mlp_only_layers": (2,), "norm_topk_prob": False},
}


def random_model(variant: str, seed: int = 0, **shape: int) -> Transformer:
    """A model whose matrices have std 0.3 and whose gains scatter around 1: nothing hides."""
    model = Transformer(ModelConfig(**(SHAPE | VARIANTS[variant] | shape)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.3 * noise)
    return model.eval()


def write_run(folder: Path, model: Transformer, **arguments: object) -> Path:
    """A run folder with what a reader of weights needs."""
    save_final(folder, model)
    values = {"model": dataclasses.asdict(model.config), "arguments": arguments}
    write_json(folder / "config.json", values)
    return folder


def logits(model: Transformer, tokens: list[int]) -> torch.Tensor:
    """Float32 logits (T, 259) of one document by the ordinary forward pass."""
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    with torch.no_grad():
        return model(torch.tensor(tokens), torch.arange(len(tokens)), ends)[0]
