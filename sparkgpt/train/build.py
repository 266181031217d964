"""The parts of a run put together: device, model, optimizer, compiled loss."""

import dataclasses
from collections.abc import Callable

import torch

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.distributed import Ranks
from sparkgpt.model.mup import init_weights
from sparkgpt.model.transformer import Transformer
from sparkgpt.ops import attention, experts
from sparkgpt.ops.attention import choose_backend
from sparkgpt.ops.choices import Kernels, attention_choice, kernel_configs, kernels_of
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.provenance import device_state, platform_state
from sparkgpt.train.gemms import compile_tuning_gemms
from sparkgpt.train.parts import loss_in_parts
from sparkgpt.train.step import window_loss


def build_model(
    config: ModelConfig, train: TrainConfig, ranks: Ranks
) -> tuple[Transformer, HybridOptimizer]:
    """An initialised model on its device, computing in bf16 on CUDA and fp32 on a CPU, and its
    optimizer."""
    cuda = ranks.device.type == "cuda"
    model = Transformer(
        config,
        compute_dtype=torch.bfloat16 if cuda else torch.float32,
        attention_backend=attention_backend(config, train, ranks.device),
        kernels=_kernels(train, ranks),
    )
    init_weights(model, train)
    model.to(ranks.device)
    return model, HybridOptimizer(model, train, model.kernels.muon)


def attention_backend(config: ModelConfig, train: TrainConfig, device: torch.device) -> str:
    """The back end that the flags name, or, for 'auto', that the record of `autotune` chose, unless
    a flag rules it out. UserError when it can't run on the device."""
    wanted, triton = train.attention_backend, train.triton_attention is not False
    if train.autotune and wanted == "auto":
        shape = (config.attention_heads, config.kv_heads, config.head_dim)
        recorded = attention_choice(train.autotune, device.type, *shape)
        wanted = recorded if triton or recorded != "triton" else "auto"
    return choose_backend(wanted, device, config.head_dim, triton)


def _kernels(train: TrainConfig, ranks: Ranks) -> Kernels:
    """The fused operations, in the configurations that the record chose for this device."""
    kernels = kernels_of(train, ranks.device.type)
    if not train.autotune:
        return kernels
    configs = kernel_configs(train.autotune, device_state(ranks.device))
    return dataclasses.replace(kernels, configs=configs)


def build_loss(train: TrainConfig, ranks: Ranks) -> Callable:
    """`window_loss`, compiled on CUDA or when asked to, else on a CPU's threads in parts."""
    if not compiles(train, ranks):
        return loss_in_parts if ranks.device.type == "cpu" else window_loss
    if ranks.device.type == "cpu":
        _keep_loops_eager()
    if tunes_gemms(train, ranks):
        return compile_tuning_gemms(window_loss)
    return torch.compile(window_loss)


def _keep_loops_eager() -> None:
    """On a CPU, attention and experts loop over lengths read from tensors: in a graph, they would
    be unrolled and compiled anew for each number of documents."""
    for functions in (attention.BACKENDS, experts.CPU_LOOPS):
        for name, function in functions.items():
            functions[name] = torch.compiler.disable(function)


def compiles(train: TrainConfig, ranks: Ranks) -> bool:
    """Whether the loss is compiled: by default on CUDA only."""
    return ranks.device.type == "cuda" if train.compile is None else train.compile


def tunes_gemms(train: TrainConfig, ranks: Ranks) -> bool:
    """Whether compiling chooses among matrix products by measuring: by default on CUDA only."""
    wanted = ranks.device.type == "cuda" if train.autotune_gemm is None else train.autotune_gemm
    return wanted and compiles(train, ranks)


def inexact_values(model: Transformer, train: TrainConfig, ranks: Ranks) -> dict[str, object]:
    """What may change between the attempts of a run although it can change the last bits."""
    machine = platform_state()
    return {
        "device": device_state(ranks.device).get("name", machine["cpu"]),
        "threads": machine["threads"],
        "torch": torch.__version__,
        "attention": model.attention_backend,
        "compiled": compiles(train, ranks),
        "autotune_gemm": tunes_gemms(train, ranks),
        "kernels": dataclasses.asdict(model.kernels),
    }
