"""What a model costs: parameters and floating-point operations, by formula."""

from sparkgpt.config import ModelConfig
from sparkgpt.vocab import VOCAB_SIZE


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Exact counts: `total`; `active` (k of E experts); `matmul_active`, the N of 6N: the active
    parameters of matrix products, so without the embedding table and the norm gains."""
    width, head = config.model_dim, config.head_dim
    queries = config.attention_heads * head
    attention = width * (queries + 2 * config.kv_heads * head) + queries * width
    expert = 3 * width * config.moe_intermediate_size
    sparse = len(config.sparse_layers)
    dense = config.model_layers - sparse
    router = width * config.num_experts
    matmul_dense = config.model_layers * attention + dense * 3 * width * config.intermediate_size
    matmul_dense += sparse * router + VOCAB_SIZE * width
    gains = config.model_layers * (2 * width + 2 * head) + width
    fixed = matmul_dense + gains + VOCAB_SIZE * width
    active_experts = sparse * config.num_experts_per_tok * expert
    return {
        "total": fixed + sparse * config.num_experts * expert,
        "active": fixed + active_experts,
        "matmul_active": matmul_dense + active_experts,
    }


def step_flops(config: ModelConfig, doc_lengths: list[int]) -> float:
    """Floating-point operations of forward and backward over documents of these lengths.

    Lengths in positions. 6 N per position (Kaplan et al. 2020, arXiv:2001.08361) plus causal
    attention, 12 x layers x heads x head_dim x length / 2 per position (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B, halved for the causal mask).
    """
    heads = config.model_layers * config.attention_heads * config.head_dim
    linear = 6 * parameter_counts(config)["matmul_active"] * sum(doc_lengths)
    return float(linear + 6 * heads * sum(n * n for n in doc_lengths))
