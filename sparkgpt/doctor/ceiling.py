"""How fast a shape could be on a device: floors of a step's time, by its FLOPs and by its bytes.

The numbers come from `model.cost` and `model.bytes`, which need torch and are imported when called.
The floors count only what any implementation of this recipe has to do; a real step adds launches,
elementwise work and waiting.
"""

from dataclasses import dataclass

from sparkgpt.config import ModelConfig, TrainConfig


@dataclass(frozen=True)
class Specification:
    """Dense bf16 FLOP/s with float32 sums, and bytes/s, as published; `note` says by whom."""

    gemm: float
    copy: float
    note: str


# By the name that CUDA gives a device.
SPECIFICATIONS = {
    "NVIDIA GB10": Specification(
        125e12,
        273e9,
        "NVIDIA, DGX Spark: 1 PFLOP/s in sparse fp4, an eighth of it here; others measured "
        "91 to 98 TFLOP/s and 218 to 234 GB/s",
    ),
    "NVIDIA H100 80GB HBM3": Specification(989.4e12, 3.35e12, "NVIDIA, H100 data sheet, SXM"),
    "NVIDIA H200": Specification(989.4e12, 4.8e12, "NVIDIA, H200 data sheet, SXM"),
    "NVIDIA GeForce RTX 5090": Specification(
        209.5e12, 1.792e12, "NVIDIA, RTX Blackwell architecture, appendix A"
    ),
}

COMPUTE_FORMULA = "(6 N T + 6 L Q sum(n^2) + Newton-Schulz FLOPs) / GEMM rate"
MEMORY_FORMULA = "bytes of (activations once per fused kernel + weights + Muon) / copy rate"


@dataclass(frozen=True)
class Ceiling:
    """Of one step over `tokens` positions in documents of `document` positions: operations, bytes,
    the floors in seconds; `traffic_unfused` are the bytes of the compiled path without our kernels;
    `source` says whose rates these are."""

    tokens: int
    document: int
    model_flops: float
    optimizer_flops: float
    traffic: float
    traffic_unfused: float
    compute_floor: float
    memory_floor: float
    source: str

    @property
    def seconds(self) -> float:
        """The larger floor."""
        return max(self.compute_floor, self.memory_floor)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def bound(self) -> str:
        return "compute" if self.compute_floor >= self.memory_floor else "memory"


def ceiling(
    model: ModelConfig, train: TrainConfig, device: str, gemm: float, copy: float, source: str
) -> Ceiling:
    """The floors at `gemm` FLOP/s and `copy` bytes/s. Documents are taken to be half as long as
    the longest allowed, for want of the data."""
    from sparkgpt.model.bytes import NOTHING, step_bytes, uses_muon
    from sparkgpt.model.cost import newton_schulz_flops, step_flops

    element = 2 if device == "cuda" else 4
    tokens = train.tokens_per_batch * train.accumulate
    document = max(1, min(model.max_position_embeddings // 2, train.tokens_per_batch))
    whole, rest = divmod(tokens, document)
    flops = step_flops(model, [document] * whole + [rest] * bool(rest))
    update_flops = newton_schulz_flops(model) if uses_muon(train) else 0
    traffic = sum(step_bytes(model, train, element).values())
    return Ceiling(
        tokens=tokens,
        document=document,
        model_flops=flops,
        optimizer_flops=update_flops,
        traffic=traffic,
        traffic_unfused=sum(step_bytes(model, train, element, NOTHING).values()),
        compute_floor=(flops + update_flops) / gemm,
        memory_floor=traffic / copy,
        source=source,
    )


def mfu(model_flops: float, seconds: float, gemm: float) -> float:
    """Model FLOPs utilisation: the model's FLOPs, Newton-Schulz not among them, over what `gemm`
    FLOP/s allow in `seconds` (Chowdhery et al. 2022, arXiv:2204.02311, appendix B)."""
    return model_flops / seconds / gemm
