"""torch.compile that also tries Triton for matrix products, on GPUs of any size."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Only products are tuned: what else `max_autotune` tries takes minutes and gains little.
OPTIONS = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
GATE = "is_big_gpu"  # of torch._inductor.utils: False below 68 multiprocessors, and no setting


def compile_tuning_gemms(function: Callable) -> Callable:
    """`torch.compile(function)` whose products are the fastest of cuBLAS and inductor's Triton.

    Inductor measures them while it compiles, so two processes may choose differently, and give
    other last bits; its cache keeps a machine's choices. Where torch lacks the gate, a warning.
    """
    from torch._inductor import utils

    if not hasattr(utils, GATE):
        print(
            f"torch {torch.__version__} has no torch._inductor.utils.{GATE}: on a GPU of fewer "
            "than 68 multiprocessors --autotune-gemm may try cuBLAS alone",
            file=sys.stderr,
        )
    return torch.compile(function, backend=_inductor)


def _inductor(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """The backend: inductor's own, with OPTIONS, and the gate open while it compiles a graph."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_one(*args: Any, **kwargs: Any) -> Callable:
        with every_gpu_is_big():  # here, because the backward is compiled when it first runs
            return compile_fx_inner(*args, **kwargs)

    return compile_fx(graph, inputs, inner_compile=compile_one, config_patches=OPTIONS)


@contextmanager
def every_gpu_is_big() -> Iterator[None]:
    """Inductor's gate open; as it was, afterwards. Nothing happens where there is none."""
    from torch._inductor import utils

    gate = getattr(utils, GATE, None)
    if gate is not None:
        setattr(utils, GATE, lambda *device: True)
    try:
        yield
    finally:
        if gate is not None:
            setattr(utils, GATE, gate)
