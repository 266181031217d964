"""Peak memory of a training process, against what its tensors come to by formula."""

from dataclasses import replace
from pathlib import Path

from sparkgpt.bench.child import run_child
from sparkgpt.bench.documents import news_lengths, write_synthetic_cache
from sparkgpt.bench.shapes import Settings
from sparkgpt.doctor.needs import optimizer_bytes, saved_elements
from sparkgpt.model.cost import hidden_parameters, parameter_counts

STEPS = 3
WINDOW_BYTES = 3 * 8  # a position's token, target and place, int64
# The same program with next to nothing to hold.
NOTHING = {
    "model_layers": 1, "model_dim": 4, "attention_heads": 1, "kv_heads": 1, "head_dim": 2,
    "intermediate_size": 4,
}  # fmt: skip
FORMULA = (
    "peak_rss_ratio = (peak RSS - peak RSS of the same program on a model of nothing) / "
    "(weights 4P + gradients 4P + moments 4 per Muon's and 8 per AdamW's parameter + "
    "saved activations 4 T (L (3D + 3Q + 3K + 3F) + 2D + 2H + 3V) + window 24 T), "
    "norms, RoPE and SiLU computed again in the backward"
)


def needed_bytes(settings: Settings) -> dict[str, int]:
    """Bytes of each term of FORMULA."""
    model = settings.model
    total = parameter_counts(model)["total"]
    return {
        "weights": 4 * total,
        "gradients": 4 * total,
        "moments": optimizer_bytes(total, hidden_parameters(model)),
        "activations": int(4 * settings.window * saved_elements(model, compiled=True)),
        "window": WINDOW_BYTES * settings.window,
    }


def measure_memory(settings: Settings, data: Path, folder: Path) -> dict:
    """Train STEPS steps in a process of their own. Its resident bytes, `needed`, and the ratio.

    The program itself (interpreter, torch, threads: some 400 MB) is taken off the peak: beside a
    small model nothing else would show. `peak_rss_ratio_whole` has it in. UserError when a run
    fails.
    """
    empty = replace(settings, shape=NOTHING, window=64, longest=32)
    few = write_synthetic_cache(folder / "nothing.cache", news_lengths(64, 32, 0), 0).path
    peak = _peak(train_flags(settings, data, folder, "memory", STEPS))
    program = _peak(train_flags(empty, few, folder, "nothing", STEPS))
    needed = needed_bytes(settings)
    total = sum(needed.values())
    return {
        "formula": FORMULA,
        "needed": needed,
        "peak_rss_bytes": peak,
        "program_rss_bytes": program,
        "figures": {
            "peak_rss_ratio": (peak - program) / total,
            "peak_rss_ratio_whole": peak / total,
        },
    }


def _peak(flags: list[str]) -> int:
    return run_child("train", {"flags": flags})["peak_rss_bytes"]


def train_flags(settings: Settings, data: Path, folder: Path, name: str, steps: int) -> list[str]:
    """Flags of `sparkgpt train` for a short run of this shape, each step logged."""
    values = settings.shape | {
        "max_position_embeddings": settings.model.max_position_embeddings,
        "tokens_per_batch": settings.window,
        "threads": settings.threads,
        "seed": settings.seed,
        "train_path": data,
        "out_dir": folder,
        "run_name": name,
        "target_tokens": steps * settings.window,
        "max_train_steps": steps,
        "log_every": 1,
        "device": "cpu",
    }
    return [text for key, v in values.items() for text in (f"--{key.replace('_', '-')}", str(v))]
