"""The bare kernels of our step, as plain torch calls on tensors that are there already.

Matrix products: for every matrix of a dense model, the forward, the input's gradient and the
weight's, at the real shapes. Attention: torch's SDPA, forward and backward, for each segment of
the window by itself, with keys and values already at the queries' number of heads. Layers share
their tensors, which keeps more of them in the caches than a model can. The optimizer's own products
are not counted. So the sum favours the bare side.

Shapes: T packed positions, I inputs and O outputs of a matrix, N query heads, n positions of one
segment, H head dimension.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sparkgpt.config import ModelConfig
from sparkgpt.model.cost import matrices
from sparkgpt.vocab import VOCAB_SIZE


def matrix_shapes(config: ModelConfig) -> list[tuple[int, int, int]]:
    """(how many, outputs, inputs) of the matrices of a dense model, the head last.

    ValueError for one with experts: how many rows an expert gets is not fixed.
    """
    if config.sparse_layers:
        raise ValueError("the bare kernels are those of a dense model")
    return [*matrices(config), (1, VOCAB_SIZE, config.model_dim)]


class BareProducts:
    """All matrix products of one step over T = `window` positions."""

    def __init__(self, config: ModelConfig, window: int):
        self.products = []
        for count, outputs, inputs in matrix_shapes(config):
            x_TI, dx_TI = torch.randn(window, inputs), torch.empty(window, inputs)
            y_TO, dy_TO = torch.empty(window, outputs), torch.randn(window, outputs)
            w_OI, dw_OI = torch.randn(outputs, inputs), torch.empty(outputs, inputs)
            self.products.append((count, x_TI, dx_TI, y_TO, dy_TO, w_OI, dw_OI))

    def run(self) -> None:
        for count, x_TI, dx_TI, y_TO, dy_TO, w_OI, dw_OI in self.products:
            for _ in range(count):
                torch.mm(x_TI, w_OI.T, out=y_TO)
                torch.mm(dy_TO, w_OI, out=dx_TI)
                torch.mm(dy_TO.T, x_TI, out=dw_OI)


class BareAttention:
    """The attention of all layers; `ready` takes the window's segments, in positions."""

    def __init__(self, config: ModelConfig):
        self.layers, self.heads, self.head_dim = (
            config.model_layers, config.attention_heads, config.head_dim,
        )  # fmt: skip

    def ready(self, segments: list[int]) -> Callable[[], None]:
        documents = []
        for positions in segments:
            shape = (1, self.heads, positions, self.head_dim)
            q_1NnH, k_1NnH, v_1NnH = (torch.randn(shape, requires_grad=True) for _ in range(3))
            documents.append(((q_1NnH, k_1NnH, v_1NnH), torch.randn(shape)))

        def run() -> None:
            for _ in range(self.layers):
                for qkv, dout_1NnH in documents:
                    out_1NnH = F.scaled_dot_product_attention(*qkv, is_causal=True)
                    torch.autograd.grad(out_1NnH, qkv, dout_1NnH)

        return run
