"""What a model costs: parameters and floating-point operations, by formula."""

from sparkgpt.config import ModelConfig
from sparkgpt.optim.muon import ITERATIONS
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


def matrices(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(count, rows, columns) of the hidden matrices, those that Muon orthogonalises."""
    width, layers = config.model_dim, config.model_layers
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    sparse = len(config.sparse_layers)
    dense, experts = layers - sparse, sparse * config.num_experts
    shapes = [
        (layers, queries + 2 * keys, width),
        (layers, width, queries),
        (dense, 2 * config.intermediate_size, width),
        (dense, width, config.intermediate_size),
        (experts, 2 * config.moe_intermediate_size, width),
        (experts, width, config.moe_intermediate_size),
    ]
    return [shape for shape in shapes if shape[0]]


def hidden_parameters(config: ModelConfig) -> int:
    """How many parameters Muon orthogonalises."""
    return sum(count * rows * columns for count, rows, columns in matrices(config))


def newton_schulz_flops(config: ModelConfig) -> int:
    """Floating-point operations of orthogonalising each hidden matrix once.

    With M rows <= N columns when transposed, an iteration is a Gram matrix 2 M^2 N, its square
    2 M^3 and a product 2 M^2 N (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    Kernels that compute half of what is symmetric leave out up to M^2 N + M^3 of them.
    """
    flops = 0
    for count, rows, columns in matrices(config):
        m, n = sorted((rows, columns))
        flops += count * (4 * m * m * n + 2 * m**3)
    return ITERATIONS * flops
