"""What a run needs, by formula from its configuration: bytes of memory and of disk.

Symbols: T positions in a window, L layers, D width, Q = query heads x head dim, K = key/value heads
x head dim, F hidden width, E experts, k experts per position, P parameters, V vocabulary.
"""

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.vocab import VOCAB_SIZE

MIB = 2**20
# Beside the tensors of a trainer. The CPU's follows from measured ones (torch 2.13), the
# CUDA context's is an estimate.
PROGRAM = {"cpu": 430 * MIB, "cuda": 1536 * MIB}
# Of what comes and goes in a step, for gaps in the allocator's memory; from those trainers.
SLACK = {"cpu": 1.25, "cuda": 1.0}
HOST_WITH_CUDA = 4096 * MIB  # host memory of a trainer on a device with memory of its own; estimate
CHECK = 800 * MIB  # one check-export and the library that it starts, measured; plus the weights
FLOOR = 1024 * MIB  # left to the system and to Snakemake
UNIFIED_FLOOR = 8192 * MIB  # unified memory hangs the host when it runs out, instead of raising
DATA_FLOOR = 64 * MIB  # a corpus smaller than this isn't worth a formula


def saved_elements(model: ModelConfig, compiled: bool) -> float:
    """Elements per position that the forward keeps for the backward.

    A layer keeps 4D + 3Q + 3K and 3F (dense) or 3kF + 2kD + 8k + E (sparse), counted with torch's
    saved-tensor hooks on a CPU as it trains by default. Compiled, norms are taken to be computed
    again: 3D, and no 8k + E; that is an estimate. The head keeps 2D + 2H, and 3V in passing.
    """
    width, k = model.model_dim, model.num_experts_per_tok
    heads = model.attention_heads + model.kv_heads
    sparse = len(model.sparse_layers)
    dense = model.model_layers - sparse
    routed = 3 * k * model.moe_intermediate_size + 2 * k * width
    if not compiled:
        routed += 8 * k + model.num_experts
    layers = model.model_layers * ((3 if compiled else 4) * width + 3 * heads * model.head_dim)
    layers += dense * 3 * model.intermediate_size + sparse * routed
    return layers + 2 * width + 2 * model.head_dim + 3 * VOCAB_SIZE


def memory_need(model: ModelConfig, train: TrainConfig, total: int, device: str) -> int:
    """Peak bytes of a trainer of `total` parameters on 'cpu' or 'cuda'.

    Weights and gradients 8P, optimizer state 4 (Muon) or 8 (AdamW) per parameter, bfloat16 copies
    2P on CUDA, and the larger of what the backward needs (all that is saved, as much again as one
    layer saves, for its gradients, and SLACK) and what the update holds for a moment.
    """
    from sparkgpt.model.cost import hidden_parameters

    cuda = device == "cuda"
    hidden = hidden_parameters(model)
    muon = hidden if train.optimizer == "muon" else 0
    fixed = 8 * total + optimizer_bytes(total, muon) + (2 * total if cuda else 0)
    compiled = cuda if train.compile is None else train.compile
    # A dense window's graph is freed before the next; routers' graphs wait for the global counts.
    windows = train.accumulate if model.sparse_layers else 1
    layer = saved_elements(model, compiled) / model.model_layers
    elements = (saved_elements(model, compiled) * windows + layer) * train.tokens_per_batch
    elements *= SLACK[device]
    update = 8 * muon + 4 * (total - muon)
    return int(PROGRAM[device] + fixed + max(elements * (2 if cuda else 4), update))


def optimizer_bytes(total: int, muon: int) -> int:
    """float32 state: one tensor under Muon, two under AdamW."""
    return 4 * muon + 8 * (total - muon)


def disk_need(model: ModelConfig, train: TrainConfig, total: int) -> int:
    """Bytes of a finished run: its checkpoints, the final weights twice, and their export."""
    from sparkgpt.model.cost import hidden_parameters

    muon = hidden_parameters(model) if train.optimizer == "muon" else 0
    checkpoint = 4 * total + optimizer_bytes(total, muon)
    return (train.keep_last if train.save_every else 0) * checkpoint + 3 * 4 * total


def data_need(target_tokens: float) -> int:
    """Bytes of a corpus that is read once: as fetched, as documents, and as a cache."""
    return int(3 * target_tokens) + DATA_FLOOR


def check_need(total: int) -> int:
    """Bytes of one export check: two processes with float32 weights each."""
    return CHECK + 8 * total
