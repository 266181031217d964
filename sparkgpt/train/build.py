"""The parts of a run put together: device, model, optimizer, compiled loss."""

from collections.abc import Callable

import torch

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.model.mup import init_weights
from sparkgpt.model.transformer import Transformer
from sparkgpt.ops.attention import choose_backend
from sparkgpt.ops.choices import attention_choice
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.train.step import window_loss


def build_model(
    config: ModelConfig, train: TrainConfig, ranks: Ranks
) -> tuple[Transformer, HybridOptimizer]:
    """An initialised model on its device, computing in bf16 on CUDA and fp32 on a CPU, and its
    optimizer."""
    cuda = ranks.device.type == "cuda"
    backend = train.attention_backend
    if train.autotune and backend == "auto":
        shape = (config.attention_heads, config.kv_heads, config.head_dim)
        backend = attention_choice(train.autotune, ranks.device.type, *shape)
    model = Transformer(
        config,
        compute_dtype=torch.bfloat16 if cuda else torch.float32,
        attention_backend=choose_backend(backend, ranks.device),
    )
    init_weights(model, train)
    model.to(ranks.device)
    return model, HybridOptimizer(model, train)


def build_loss(train: TrainConfig, ranks: Ranks) -> Callable:
    """`window_loss`, compiled on CUDA or when asked to."""
    compile_it = ranks.device.type == "cuda" if train.compile is None else train.compile
    return torch.compile(window_loss) if compile_it else window_loss
