"""What a training step moves between memory and the device, by formula: bytes, kernel by kernel.

Counted is what a kernel has to move: each of its inputs read once, each output written once; what
several tiles read again comes from the cache. Statistics of one number a row (of a norm, of a
softmax) and integers are left out. Without our kernels the compiled path is counted: cuBLAS
products, and one kernel for each chain of elementwise work between them, sums along rows included.

Symbols, in elements of one position: D width, Q = query heads x head dim, K = key/value heads x
head dim, H head dim, F hidden rows (k F with k experts per position), R = k D expert rows,
V vocabulary, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.model.cost import ITERATIONS, hidden_parameters, matrices, parameter_counts
from sparkgpt.vocab import VOCAB_SIZE

# Our kernels, by what they fuse. The backward of `attention` ends, with `qk_rope`, in that of RoPE
# and norm.
FUSIONS = ("swiglu", "qk_rope", "attention", "dispatch", "head", "muon")
NOTHING: frozenset[str] = frozenset()
OURS = frozenset(FUSIONS)
# The floor: residual additions in the products' epilogues as well.
LEAST = OURS | {"residual"}


@dataclass(frozen=True)
class Pass:
    """One kernel of a step: what it moves for a position, in multiples of the symbols, and the
    fusions with which it runs: all of `needs`, none of `lacks`."""

    name: str
    moves: dict[str, int]
    needs: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()

    def runs(self, fused: frozenset[str]) -> bool:
        return self.needs <= fused and not self.lacks & fused


def _pass(name: str, needs: str = "", lacks: str = "", **moves: int) -> Pass:
    return Pass(name, moves, frozenset(needs.split()), frozenset(lacks.split()))


ATTENTION_HALF = (
    _pass("residual and norm", lacks="residual", D=4),
    _pass("norm", needs="residual", D=2),
    _pass("qkv", D=1, Q=1, K=2),
    # A compiler fuses norm and RoPE forward as well; it reads whole tables, the kernel their half.
    _pass("q/k norm and RoPE", lacks="qk_rope", Q=2, K=2, H=2),
    _pass("q/k norm and RoPE", needs="qk_rope", Q=2, K=2, H=1),
    _pass("attention", Q=2, K=2),
    _pass("o", lacks="residual", Q=1, D=1),
    _pass("o and residual", needs="residual", Q=1, D=2),
    _pass("o: gradients of input and weight", D=2, Q=2),
    # In one pass over the keys (Dao 2023, arXiv:2307.08691, algorithm 2): out times its gradient
    # 2Q, q, k, v and their gradients 2Q + 4K; dq is filled with zeros, read and written in float32,
    # at least once each, and cast: 9Q. Ours is two passes that write each gradient once.
    _pass("attention, backward", lacks="attention", Q=13, K=4),
    _pass("attention, backward", needs="attention", lacks="qk_rope", Q=6, K=6),
    _pass("attention, norm and RoPE, backward", needs="attention qk_rope", Q=7, K=7, H=1),
    # Norm and RoPE; the gains' sums over positions; v's gradient copied into qkv's.
    _pass("q/k norm and RoPE, backward", lacks="qk_rope", Q=5, K=7, H=2),
    _pass("q/k norm and RoPE, backward", needs="qk_rope", lacks="attention", Q=3, K=5, H=1),
    _pass("qkv: gradients of input and weight", D=2, Q=2, K=4),
    _pass("norm and residual, backward", D=4),
)
DENSE_HALF = (
    _pass("residual and norm", lacks="residual", D=4),
    _pass("norm", needs="residual", D=2),
    _pass("gate_up", lacks="swiglu", D=1, F=2),
    _pass("SwiGLU", lacks="swiglu", F=3),
    _pass("gate_up and SwiGLU", needs="swiglu", D=1, F=3),
    _pass("down", lacks="residual", F=1, D=1),
    _pass("down and residual", needs="residual", F=1, D=2),
    _pass("down: gradients of input and weight", D=2, F=2),
    _pass("SwiGLU, backward", lacks="swiglu", F=5),
    _pass("gate_up: gradients of input and weight", lacks="swiglu", D=2, F=4),
    _pass("gate_up with SwiGLU's derivative: gradients", needs="swiglu", D=2, F=6),
    _pass("norm and residual, backward", D=4),
)
EXPERT_HALF = (
    _pass("residual and norm", lacks="residual", D=4),
    _pass("norm", needs="residual", D=2),
    _pass("router", D=1, E=4),
    _pass("dispatch", lacks="dispatch", R=2),
    _pass("dispatch", needs="dispatch", D=1, R=1),
    _pass("gate_up", lacks="swiglu", R=1, F=2),
    _pass("SwiGLU", lacks="swiglu", F=3),
    _pass("gate_up and SwiGLU", needs="swiglu", R=1, F=3),
    _pass("down", F=1, R=1),
    _pass("combine", lacks="residual", R=1, D=1),
    _pass("combine and residual", needs="residual", R=1, D=2),
    _pass("combine, backward", lacks="dispatch", D=1, R=3),
    _pass("combine, backward", needs="dispatch", D=1, R=2),
    _pass("down: gradients of input and weight", R=2, F=2),
    _pass("SwiGLU, backward", lacks="swiglu", F=5),
    _pass("gate_up: gradients of input and weight", lacks="swiglu", R=2, F=4),
    _pass("gate_up with SwiGLU's derivative: gradients", needs="swiglu", R=2, F=6),
    _pass("dispatch, backward", R=1, D=1),
    _pass("router: gradients of input and weight", D=2, E=4),
    _pass("norm and residual, backward", D=4),
)
ENDS = (
    _pass("final norm", D=4),
    _pass("head", lacks="head", D=1, V=1),
    _pass("cross-entropy", lacks="head", V=1),
    _pass("cross-entropy, backward", lacks="head", V=2),
    _pass("head: gradients of input and weight", lacks="head", D=2, V=2),
    # By chunks whose logits and their gradients stay in the cache.
    _pass("head and cross-entropy, both ways", needs="head", D=2),
    _pass("final norm, backward", D=3),
    _pass("embedding, backward", D=1),
)


def moved(passes: Iterable[Pass], sizes: dict[str, int], fused: frozenset[str]) -> int:
    """Elements that the passes which run with `fused` read and write for one position."""
    running = [one for one in passes if one.runs(fused)]
    return sum(times * sizes[name] for one in running for name, times in one.moves.items())


def symbols(model: ModelConfig, routed: bool) -> dict[str, int]:
    """Elements of one position by symbol, in a dense layer or in one whose rows are routed."""
    k = model.num_experts_per_tok
    return {
        "D": model.model_dim,
        "Q": model.attention_heads * model.head_dim,
        "K": model.kv_heads * model.head_dim,
        "H": model.head_dim,
        "F": k * model.moe_intermediate_size if routed else model.intermediate_size,
        "R": k * model.model_dim,
        "V": VOCAB_SIZE,
        "E": model.num_experts,
    }


def position_bytes(model: ModelConfig, element: int, fused: frozenset[str] = LEAST) -> int:
    """Bytes that forward and backward move for one position; `element` bytes an activation."""
    sparse = len(model.sparse_layers)
    sizes, routed = symbols(model, routed=False), symbols(model, routed=True)
    elements = model.model_layers * moved(ATTENTION_HALF, sizes, fused)
    elements += (model.model_layers - sparse) * moved(DENSE_HALF, sizes, fused)
    elements += sparse * moved(EXPERT_HALF, routed, fused)
    return element * (elements + moved(ENDS, sizes, fused))


def weight_bytes(model: ModelConfig, train: TrainConfig, element: int) -> int:
    """Bytes that a step moves for the parameters, whatever is fused.

    Each is read by forward and backward (in bfloat16 after a cast, read 4 and written 2), its
    gradient written and read, each float32 state and the weight itself read and written.
    """
    total = parameter_counts(model)["total"]
    states = 2 * total - (hidden_parameters(model) if uses_muon(train) else 0)
    cast = 6 if element == 2 else 0
    return total * (cast + 2 * element + 8 + 8) + 8 * states


def newton_schulz_bytes(model: ModelConfig, element: int, fused: frozenset[str] = LEAST) -> int:
    """Bytes of the iterations, M rows <= N columns when transposed: a Gram matrix, a polynomial of
    it, a product with x. Where an addend is the operand that a tile has read already, each moves x
    three times and M x M four times; by separate products four and five times."""
    elements = squares = 0
    for count, rows, columns in matrices(model):
        m, n = sorted((rows, columns))
        elements += count * m * n
        squares += count * m * m
    times = (3, 4) if "muon" in fused else (4, 5)
    return ITERATIONS * element * (times[0] * elements + times[1] * squares)


def muon_bytes(model: ModelConfig, element: int, fused: frozenset[str] = LEAST) -> int:
    """Bytes of Muon's update beyond `weight_bytes`, which has 20 of them an element.

    Fused, the look-ahead is written and the direction read in the iteration's dtype. Apart, average
    12, look-ahead 12, batch 8, cast 6, norm 2, quotient 4, cast back 6 and addition 12 are kernels
    of their own; in float32 there are no casts.
    """
    apart = 42 if element == 2 else 36
    around = 2 * element if "muon" in fused else apart
    return newton_schulz_bytes(model, element, fused) + around * hidden_parameters(model)


def step_bytes(
    model: ModelConfig, train: TrainConfig, element: int, fused: frozenset[str] = LEAST
) -> dict[str, int]:
    """Bytes of one step of one process: `activations`, `weights`, `muon` (0 under AdamW)."""
    positions = train.tokens_per_batch * train.accumulate
    return {
        "activations": positions * position_bytes(model, element, fused),
        "weights": weight_bytes(model, train, element),
        "muon": muon_bytes(model, element, fused) if uses_muon(train) else 0,
    }


def uses_muon(train: TrainConfig) -> bool:
    return train.optimizer == "muon"
