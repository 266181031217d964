"""The dense SwiGLU MLP.

Shapes: T packed positions, D model width, F hidden width, G = 2F.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from sparkgpt.config import ModelConfig
from sparkgpt.model.linear import Linear
from sparkgpt.ops.choices import Kernels
from sparkgpt.ops.swiglu import one_group, swiglu_mlp


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: fused (..., 2F), gate first -> (..., F). Shazeer 2020 (arXiv:2002.05202)."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


class MLP(nn.Module):
    """down(silu(gate) * up), gate and up in one matrix, gate's rows first."""

    def __init__(self, config: ModelConfig, kernels: Kernels = Kernels()):  # noqa: B008, frozen
        super().__init__()
        self.kernels = kernels
        sizes = {"D": config.model_dim, "E": 1, "F": config.intermediate_size}
        self.configs = kernels.configs_of("swiglu", **sizes)
        self.gate_up = Linear(config.model_dim, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.model_dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.kernels.swiglu:
            gate_up_1GD = self.gate_up.weight.to(x_TD.dtype)[None]
            down_1DF = self.down.weight.to(x_TD.dtype)[None]
            return swiglu_mlp(x_TD, gate_up_1GD, down_1DF, one_group(x_TD), self.configs)
        return self.down(swiglu(self.gate_up(x_TD)))
