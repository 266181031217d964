"""What a kernel family ships, as data: `sparkgpt kernels` compiles it without a GPU.

Each family's module has `FAMILY`, its name, and `specimens() -> list[Specimen]`: every kernel in
every configuration that can be launched, at the types and constants of the shapes we train.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("swiglu", "qk_rope", "attention", "dispatch", "newton_schulz", "cross_entropy")


@dataclass(frozen=True)
class Config:
    """How a kernel is launched: its tile sizes, warps of 32 threads, and pipeline stages."""

    tiles: Mapping[str, int]
    num_warps: int = 4
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int]:
        """Keyword arguments of a launch: `kernel[grid](..., **config.options)`."""
        return {**self.tiles, "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Specimen:
    """One kernel with the types and constants that fix its binary.

    `signature` maps each argument that is no constant to its Triton type ("*bf16", "*fp32", "i32");
    `constants` each other `tl.constexpr`, without those of `config.tiles`.
    """

    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    config: Config

    @property
    def name(self) -> str:
        """As `swiglu_forward`: that of its function, without leading underscores."""
        return self.kernel.fn.__name__.lstrip("_")
