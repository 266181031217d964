"""Small configurations, randomised models, packed windows of synthetic documents."""

import torch

from sparkgpt.config import ModelConfig
from sparkgpt.model import Transformer

DENSE = ModelConfig(
    model_layers=3,
    model_dim=48,
    attention_heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=256,
)


def small(**changes) -> ModelConfig:
    """DENSE with changes; head_dim x heads differs from the width on purpose."""
    return ModelConfig(**(vars(DENSE) | changes))


VARIANTS = {
    "dense": small(),
    "moe": small(num_experts=4, moe_intermediate_size=32),
    "moe-raw-topk": small(num_experts=4, moe_intermediate_size=32, norm_topk_prob=False),
    "moe-sparse-step": small(num_experts=4, moe_intermediate_size=32, decoder_sparse_step=2),
    "moe-mlp-only": small(num_experts=4, moe_intermediate_size=32, mlp_only_layers=(0, 2)),
    "moe-top3": small(num_experts=8, moe_intermediate_size=16, num_experts_per_tok=3),
}


def randomised(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A model with every weight random, head and gains included.

    A fresh model would prove nothing: its head is zero and its gains are all one.
    """
    model = Transformer(config, compute_dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model.to(dtype)


DOCUMENTS = [
    b"Whole documents, never cut.",
    "Müller aß Käse – schön & 好的 🙂".encode(),
    bytes(range(256))[:200],
    b"\xff\xfe\x80 not UTF-8 \xc3",
    b"x",
    b"",
]


def pack(documents: list[bytes]):
    """(tokens, targets, positions, cu_seqlens) of whole documents, written out longhand."""
    tokens, targets, positions, ends = [], [], [], [0]
    for document in documents:
        tokens += [256, *document]
        targets += [*document, 257]
        positions += range(len(document) + 1)
        ends.append(len(tokens))
    as_ids = [torch.tensor(ids, dtype=torch.int64) for ids in (tokens, targets, positions)]
    return *as_ids, torch.tensor(ends, dtype=torch.int32)
