"""What kernels' configurations are measured on: seeded tensors as training has them.

Shapes: S = documents + 1, E experts.
"""

import torch
from torch import Tensor


def dtype_of(device: torch.device) -> torch.dtype:
    """bfloat16; on a CPU, where Triton's interpreter has no products of it, float32."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def normal(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal tensors of `dtype_of`, equal at each call."""
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "device": device, "dtype": dtype_of(device)}
    return [torch.randn(shape, **options) for shape in shapes]


def document_ends(positions: int, longest: int, device: torch.device) -> Tensor:
    """cu_seqlens (S,) int32 of documents that fill a window: most short, and most of the positions
    in long ones. Their lengths' logarithms are uniform from sqrt(longest) to longest."""
    generator = torch.Generator("cpu").manual_seed(0)
    ends = [0]
    while ends[-1] < positions:
        share = torch.rand((), generator=generator, device="cpu").item()
        ends.append(min(positions, ends[-1] + round(longest ** (0.5 + 0.5 * share))))
    return torch.tensor(ends, dtype=torch.int32, device=device)


def expert_ends(rows: int, num_experts: int, device: torch.device) -> Tensor:
    """Offsets (E,) int32 of rows spread over experts as an untrained router does: unevenly."""
    generator = torch.Generator("cpu").manual_seed(0)
    weight_E = torch.randn(num_experts, generator=generator, device="cpu").mul(0.5).exp()
    ends_E = (weight_E.cumsum(0) / weight_E.sum() * rows).round()
    ends_E[-1] = rows
    return ends_E.to(device, torch.int32)
