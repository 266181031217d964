"""The table of docs/kernels.md and the README: what a step moves without and with each kernel.

`python -m sparkgpt.doctor.savings` prints it; a test compares.
"""

from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.model.bytes import FUSIONS, LEAST, NOTHING, OURS, step_bytes
from sparkgpt.model.cost import newton_schulz_flops, step_flops

# The protocol's shapes at 49,152 positions, bf16; rates that others measured on a GB10.
SHAPES = {
    "dense 50M": ModelConfig(),
    "MoE 8x2": ModelConfig(num_experts=8),
    "dense 0.6B": ModelConfig(
        model_layers=28, model_dim=1024, attention_heads=16, kv_heads=8, intermediate_size=3072
    ),
}
TRAIN = TrainConfig()
DOCUMENT = 2048  # positions
COPY, GEMM = 220e9, 98e12


def savings(model: ModelConfig) -> dict[str, float]:
    """GB of a step: `compiled`, what each fusion then takes away, in order, `kernels`, `floor`."""
    total = lambda fused: sum(step_bytes(model, TRAIN, 2, fused).values()) / 1e9
    found, fused = {"compiled": total(NOTHING)}, NOTHING
    for fusion in FUSIONS:
        found[fusion] = total(fused) - total(fused | {fusion})
        fused |= {fusion}
    return found | {"kernels": total(OURS), "floor": total(LEAST)}


def operations(model: ModelConfig) -> float:
    """Floating-point operations of a step: the model's and Newton-Schulz's."""
    lengths = [DOCUMENT] * (TRAIN.tokens_per_batch // DOCUMENT)
    return step_flops(model, lengths) + newton_schulz_flops(model)


def render() -> str:
    """The table in Markdown."""
    columns = {name: savings(model) for name, model in SHAPES.items()}
    lines = [("one step of 49,152 positions", *columns), ("---", *("---:",) * len(columns))]
    names = {"compiled": "compiled, no kernels of ours, GB", "kernels": "all kernels, GB",
             "floor": "floor (residuals in epilogues too), GB"}  # fmt: skip
    for name in ("compiled", *FUSIONS, "kernels", "floor"):
        gigabytes = [found[name] for found in columns.values()]
        sign = "-" if name in FUSIONS else ""
        cells = [f"{sign}{value:.1f}" if value else "0" for value in gigabytes]
        lines.append((names.get(name, f"`{name}`"), *cells))
    for name in ("compiled", "kernels"):
        cells = [f"{found[name] * 1e9 / COPY * 1e3:,.0f}" for found in columns.values()]
        lines.append((f"{names[name].removesuffix(', GB')}: ms at 220 GB/s", *cells))
    cells = [f"{operations(model) / GEMM * 1e3:,.0f}" for model in SHAPES.values()]
    lines.append(("operations: ms at 98 TFLOP/s", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(render())
