"""Kernels that run on CPU tensors, in Triton's interpreter; or, with SPARKGPT_TEST_DEVICE=cuda, on
the GPU as they are."""

import importlib.util
import os
from types import ModuleType

import numpy as np
import pytest
import torch


def device() -> str:
    """'cpu', where kernels are interpreted, or 'cuda'. Kernel tests make their tensors there by
    themselves (tests/kernels/conftest.py); they need this only for a device's name."""
    return os.environ.get("SPARKGPT_TEST_DEVICE", "cpu")


def interpreted(family: str) -> ModuleType:
    """`sparkgpt.ops.kernels.<family>`, its kernels made for the interpreter; as they are on a GPU.

    Where a kernel is defined decides it, so the variable is set for the import alone: it must not
    leak into the processes that other tests start.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed", allow_module_level=True)
    if device() == "cuda":
        return importlib.import_module(f"sparkgpt.ops.kernels.{family}")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        _interpret_library()
        return importlib.import_module(f"sparkgpt.ops.kernels.{family}")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _interpret_library() -> None:
    """Triton's own functions too, as `tl.sum`: torch.compile may have imported them before."""
    import triton.experimental.gluon  # noqa: F401, loaded at the first launch, from what these were
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction, ReduceOps
    from triton.runtime.jit import JITFunction

    ReduceOps.sum = _sum_in_pairs
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            for place in (tl.standard, tl, tl.core.tensor):
                if getattr(place, name, None) is function:
                    setattr(place, name, InterpretedFunction(function.fn))


def _sum_in_pairs(self, tile):
    """`tl.sum` with about as few roundings as on a GPU, where a column's rows lie in many threads
    that add two by two: numpy does so along what is contiguous, and else adds row after row."""
    values = tile.handle.data
    values = np.asfortranarray(values) if self.axis == 0 else values
    return self.to_tensor(np.sum(values, axis=self.axis, keepdims=self.keep_dims), tile.dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A buffer full of NaN, for what a kernel must write in full."""
    return torch.full(shape, float("nan"), dtype=dtype)


def assert_as_exact(
    ours: torch.Tensor, same_precision: torch.Tensor, fp64: torch.Tensor, name: str = ""
) -> None:
    """Our largest error against fp64 is at most twice that of the same-precision reference."""
    assert torch.isfinite(ours).all(), f"{name}: not finite"
    error = lambda x: (x.double() - fp64).abs().max().item() if fp64.numel() else 0.0
    # A reference that happens to be exact would allow nothing: one rounding of the largest value.
    unit = torch.finfo(ours.dtype).eps * (fp64.abs().max().item() if fp64.numel() else 0.0)
    allowed = max(2 * error(same_precision), unit)
    assert error(ours) <= allowed, f"{name}: {error(ours):.3g} of at most {allowed:.3g}"
