"""What is timed on the GPU: modules of the model with a fusion off and on, forward and backward.

The modules themselves are taken (`gpu.modules`), wired by their flags as in training, so that a
case can't drift from what a run does.
"""

import dataclasses
from dataclasses import dataclass

from sparkgpt.config import ModelConfig
from sparkgpt.doctor.savings import DOCUMENT, SHAPES, TRAIN
from sparkgpt.model.bytes import (
    ATTENTION_HALF,
    DENSE_HALF,
    EXPERT_HALF,
    Pass,
    moved,
    muon_bytes,
    position_bytes,
    symbols,
)
from sparkgpt.model.cost import hidden_parameters, newton_schulz_flops, step_flops

POSITIONS = TRAIN.tokens_per_batch
# Kernels outside the module that is timed.
OUTSIDE = {"residual and norm", "norm", "norm and residual, backward"}


@dataclass(frozen=True)
class Case:
    """A module of a shape under some fusions, beside the same without; `part` says which."""

    part: str  # 'mlp', 'attention', 'moe', 'head' or 'muon'
    shape: str
    fused: tuple[str, ...] = ()
    backend: str = "varlen"

    @property
    def name(self) -> str:
        return f"{self.shape}: {self.part} {' + '.join(self.fused) or f'plain, {self.backend}'}"

    @property
    def plain(self) -> "Case":
        """What it is measured against."""
        return Case(self.part, self.shape)


CASES = (
    Case("mlp", "dense 50M", ("swiglu",)),
    Case("mlp", "dense 0.6B", ("swiglu",)),
    Case("attention", "dense 50M", ("qk_rope",)),
    Case("attention", "dense 50M", ("qk_rope", "attention"), "triton"),
    Case("attention", "dense 0.6B", ("qk_rope",)),
    Case("attention", "dense 0.6B", ("qk_rope", "attention"), "triton"),
    Case("moe", "MoE 8x2", ("swiglu",)),
    Case("moe", "MoE 8x2", ("dispatch",)),
    Case("moe", "MoE 8x2", ("swiglu", "dispatch")),
    Case("head", "dense 50M", ("head",)),
    Case("muon", "dense 50M", ("muon",)),
    Case("muon", "MoE 8x2", ("muon",)),
    Case("muon", "dense 0.6B", ("muon",)),
)


def case_bytes(case: Case, element: int = 2, positions: int = POSITIONS) -> int:
    """Bytes of one forward and backward of a case's module, without the weights'."""
    model, fused = SHAPES[case.shape], frozenset(case.fused)
    if case.part == "muon":
        return muon_bytes(model, element, fused) + 20 * hidden_parameters(model)
    if case.part == "head":
        return positions * position_bytes(one_layer(model), element, fused)
    table = {"mlp": DENSE_HALF, "attention": ATTENTION_HALF, "moe": EXPERT_HALF}[case.part]
    sizes = symbols(model, routed=case.part == "moe")
    return element * positions * moved(_inside(table), sizes, fused)


def case_flops(case: Case, positions: int = POSITIONS) -> float:
    """Floating-point operations of the same."""
    model = SHAPES[case.shape]
    width, queries = model.model_dim, model.attention_heads * model.head_dim
    keys, k = model.kv_heads * model.head_dim, model.num_experts_per_tok
    if case.part == "muon":
        return newton_schulz_flops(model)
    if case.part == "head":
        return step_flops(one_layer(model), [DOCUMENT] * (positions // DOCUMENT))
    weights = {
        "mlp": 3 * width * model.intermediate_size,
        "attention": width * (2 * queries + 2 * keys),
        "moe": k * 3 * width * model.moe_intermediate_size + width * model.num_experts,
    }[case.part]
    products = 6 * weights * positions
    if case.part == "attention":
        products += 6 * queries * DOCUMENT * positions
    return float(products)


def one_layer(model: ModelConfig) -> ModelConfig:
    """What the head is timed with: it has no module of its own."""
    return dataclasses.replace(model, model_layers=1)


def _inside(table: tuple[Pass, ...]) -> list[Pass]:
    return [one for one in table if one.name not in OUTSIDE]
