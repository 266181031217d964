"""What a kernel family ships, as data: `sparkgpt kernels` compiles it without a GPU.

Each family's module has `FAMILY`, its name, and `specimens() -> list[Specimen]`: every kernel in
every configuration that can be launched, at the types and constants of the shapes we train. Which
configurations are worth measuring says `sparkgpt.ops.tunables`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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

    @property
    def text(self) -> str:
        """As `BLOCK_M=64,BLOCK_N=128,warps=4,stages=3`, tiles by name: an operator's argument."""
        tiles = [f"{name}={size}" for name, size in sorted(self.tiles.items())]
        return ",".join((*tiles, f"warps={self.num_warps}", f"stages={self.num_stages}"))

    @classmethod
    def parse(cls, text: str) -> "Config":
        """What `text` gave. ValueError for other text."""
        sizes = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            sizes[name] = int(size)
        if not {"warps", "stages"} <= sizes.keys() or min(sizes.values()) < 1:
            raise ValueError(f"{text!r} is no configuration of a kernel")
        return cls(sizes, num_warps=sizes.pop("warps"), num_stages=sizes.pop("stages"))


@functools.cache
def config_of(configs: str, kernel: str) -> Config | None:
    """A kernel's part of `Kernels.configs_of`'s text, as launchers take it; None: the default."""
    for part in filter(None, configs.split(";")):
        name, _, text = part.partition(":")
        if name == kernel:
            return Config.parse(text)
    return None


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


@dataclass(frozen=True)
class Tunable:
    """One kernel at one shape: `run` launches it in a configuration and returns its outputs.

    `shape` names what the configuration depends on, as `D512-E1-F1536` (`choices.shape_text`).
    """

    family: str
    shape: str
    kernel: str
    default: Config
    candidates: tuple[Config, ...]
    run: Callable[[Config], Sequence[Any]]  # tensors

    @property
    def key(self) -> str:
        """Name of the choice in the record."""
        return f"{self.family}/{self.shape}/{self.kernel}"
