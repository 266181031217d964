"""How fast a shape could be on a device: floors of a step's time, by its FLOPs and by its bytes.

Symbols as in `needs`. Both floors count only what any implementation of this recipe has to do; a
real step adds launches, elementwise work and waiting.
"""

from dataclasses import dataclass

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.doctor.needs import matrices
from sparkgpt.vocab import VOCAB_SIZE

NEWTON_SCHULZ = 5  # iterations, as in optim.muon
# Dense bf16 FLOP/s and bytes/s by specification. GB10's FLOP/s are derived from its fp4 figure.
SPECIFICATIONS = {"NVIDIA GB10": (125e12, 273e9), "NVIDIA H200": (989e12, 4.8e12)}

COMPUTE_FORMULA = "(6 N T + 6 L Q sum(n^2) + Newton-Schulz FLOPs) / GEMM rate"
MEMORY_FORMULA = (
    "bytes of (activations once per fused kernel + weights + Newton-Schulz) / copy rate"
)

# Kernels of a layer, and what each reads and writes for one position, in multiples of D, Q, K, of
# the hidden rows F (k F with experts) and of the expert rows R = k D. Norms, q/k norm with RoPE,
# SwiGLU and residual additions are fused; SwiGLU's derivative is in the prologue of two GEMMs.
ATTENTION_HALF = (
    ("norm", {"D": 2}),
    ("qkv", {"D": 1, "Q": 1, "K": 2}),
    ("q/k norm and RoPE", {"Q": 2, "K": 2}),
    ("attention", {"Q": 2, "K": 2}),
    ("o and residual", {"Q": 1, "D": 2}),
    ("o: gradients of input and weight", {"D": 2, "Q": 2}),
    ("attention, backward", {"Q": 4, "K": 4}),
    ("q/k norm and RoPE, backward", {"Q": 3, "K": 3}),
    ("qkv: gradients of input and weight", {"D": 2, "Q": 2, "K": 4}),
    ("norm and residual, backward", {"D": 4}),
)
DENSE_HALF = (
    ("norm", {"D": 2}),
    ("gate_up and SwiGLU", {"D": 1, "F": 3}),
    ("down and residual", {"F": 1, "D": 2}),
    ("down: gradients of input and weight", {"D": 2, "F": 2}),
    ("gate_up: gradients of input and weight", {"D": 2, "F": 6}),
    ("norm and residual, backward", {"D": 4}),
)
EXPERT_HALF = (
    ("norm", {"D": 2}),
    ("dispatch", {"R": 2}),
    ("gate_up and SwiGLU", {"R": 1, "F": 3}),
    ("down", {"F": 1, "R": 1}),
    ("combine and residual", {"R": 1, "D": 2}),
    ("combine, backward", {"D": 1, "R": 2}),
    ("down: gradients of input and weight", {"R": 2, "F": 2}),
    ("gate_up: gradients of input and weight", {"R": 2, "F": 6}),
    ("dispatch, backward", {"R": 1, "D": 1}),
    ("norm and residual, backward", {"D": 4}),
)


@dataclass(frozen=True)
class Ceiling:
    """Of one step over `tokens` positions in documents of `document` positions: operations, bytes,
    the floors in seconds; `source` is 'measured' or 'specification'."""

    tokens: int
    document: int
    model_flops: float
    optimizer_flops: float
    traffic: float
    compute_floor: float
    memory_floor: float
    source: str

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.compute_floor, self.memory_floor)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_floor >= self.memory_floor else "memory"


def ceiling(
    model: ModelConfig, train: TrainConfig, device: str, gemm: float, copy: float, source: str
) -> Ceiling:
    """The floors at `gemm` FLOP/s and `copy` bytes/s. Documents are taken to be half as long as
    the longest allowed, for want of the data."""
    from sparkgpt.model.cost import step_flops

    element = 2 if device == "cuda" else 4
    tokens = train.tokens_per_batch * train.accumulate
    document = max(1, min(model.max_position_embeddings // 2, train.tokens_per_batch))
    whole, rest = divmod(tokens, document)
    flops = step_flops(model, [document] * whole + [rest] * bool(rest))
    update_flops, update_bytes = newton_schulz(model, element) if muon(train) else (0, 0)
    traffic = tokens * position_bytes(model, element) + update_bytes
    traffic += weight_bytes(model, train, element)
    return Ceiling(
        tokens=tokens,
        document=document,
        model_flops=flops,
        optimizer_flops=update_flops,
        traffic=traffic,
        compute_floor=(flops + update_flops) / gemm,
        memory_floor=traffic / copy,
        source=source,
    )


def muon(train: TrainConfig) -> bool:
    return train.optimizer == "muon"


def position_bytes(model: ModelConfig, element: int) -> int:
    """Bytes that forward and backward move for one position; `element` bytes an activation.

    Besides the layers: embedding, final norm and head move 9D, the float32 logits 5 x 4V.
    """
    k, sparse = model.num_experts_per_tok, len(model.sparse_layers)
    sizes = {
        "D": model.model_dim,
        "Q": model.attention_heads * model.head_dim,
        "K": model.kv_heads * model.head_dim,
        "F": model.intermediate_size,
    }
    routed = sizes | {"F": k * model.moe_intermediate_size, "R": k * model.model_dim}
    elements = model.model_layers * moved(ATTENTION_HALF, sizes)
    elements += (model.model_layers - sparse) * moved(DENSE_HALF, sizes)
    elements += sparse * moved(EXPERT_HALF, routed)
    return element * (elements + 9 * model.model_dim) + 20 * VOCAB_SIZE


def moved(kernels: tuple, sizes: dict[str, int]) -> int:
    """Elements that kernels read and write for one position."""
    return sum(times * sizes[name] for _, parts in kernels for name, times in parts.items())


def weight_bytes(model: ModelConfig, train: TrainConfig, element: int) -> int:
    """Bytes that a step moves for the parameters.

    Each is read by forward and backward (in bfloat16 after a cast, read 4 and written 2), its
    gradient written and read, each float32 state and the weight itself read and written.
    """
    from sparkgpt.model.cost import parameter_counts

    total = parameter_counts(model)["total"]
    hidden = sum(count * rows * columns for count, rows, columns in matrices(model))
    states = 2 * total - (hidden if muon(train) else 0)
    cast = 6 if element == 2 else 0
    return total * (cast + 2 * element + 8 + 8) + 8 * states


def newton_schulz(model: ModelConfig, element: int) -> tuple[int, int]:
    """(FLOPs, bytes) of orthogonalising each hidden matrix, M rows <= N columns when transposed.

    An iteration is a Gram matrix 2 M^2 N, its square 2 M^3 and a product 2 M^2 N; it moves the
    matrix three times and M x M four times.
    """
    flops = traffic = 0
    for count, rows, columns in matrices(model):
        m, n = sorted((rows, columns))
        flops += count * (4 * m * m * n + 2 * m**3)
        traffic += count * (3 * m * n + 4 * m * m)
    return NEWTON_SCHULZ * flops, NEWTON_SCHULZ * element * traffic
