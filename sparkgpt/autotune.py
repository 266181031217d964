"""`sparkgpt autotune`: measures interchangeable kernels on this device and records the fastest.

On a CPU only choices that give the reference's bits, output and gradients, may win: the record
then changes a run's speed and nothing else. On CUDA the configurations of our own kernels are
measured as well. Training reads the record and never tunes by itself.

Shapes: T packed positions, N query heads, K key/value heads, H head dimension, S = segments + 1.
"""

import json
import shlex
import statistics
import time
from pathlib import Path

from sparkgpt.config import ModelConfig
from sparkgpt.errors import UserError
from sparkgpt.files import write_json
from sparkgpt.flags import Parser, parse_train
from sparkgpt.ops.choices import attention_key, kernel_code
from sparkgpt.progress import progress

SCHEMA = 1
REPEATS = 7
# Per device type: the reference first, then what may take its place.
CANDIDATES = {
    "cpu": ("tiles", "sdpa-expanded", "sdpa-view", "sdpa"),
    "cuda": ("varlen", "flash-attn", "triton"),
}


def tune_attention(shape: tuple[int, int, int], device, window: int, longest: int) -> dict:
    """Time forward and backward of each back end that can run here, interleaved.

    shape = (N, K, H); `window` positions in documents of up to `longest`. Returns the record's
    entry: winner, reference, and per candidate its median in ms and whether its bits are equal.
    """
    import torch

    from sparkgpt.ops.attention import choose_backend

    inputs = _inputs(shape, device, window, longest)
    names = []
    for name in CANDIDATES[device.type]:
        try:
            names.append(choose_backend(name, device, shape[2]))
        except UserError:  # without its package, or for other shapes, it is no candidate
            continue
    seconds: dict[str, list[float]] = {name: [] for name in names}
    results = {}
    with progress(f"tuning {attention_key(*shape)}", REPEATS + 1) as bar:
        for repeat in range(REPEATS + 1):
            for name in names:
                elapsed, results[name] = _timed(name, inputs, longest)
                if repeat:  # the first round warms up
                    seconds[name].append(elapsed)
            bar.advance()
    reference = results[names[0]]
    candidates = {
        name: {
            "median_ms": round(statistics.median(seconds[name]) * 1e3, 3),
            "bit_identical": all(map(torch.equal, results[name], reference)),
            "finite": all(tensor.isfinite().all().item() for tensor in results[name]),
        }
        for name in names
    }
    must = "finite" if device.type == "cuda" else "bit_identical"
    allowed = [name for name in names if candidates[name][must]]
    winner = min(allowed, key=lambda name: candidates[name]["median_ms"])
    return {"winner": winner, "reference": names[0], "candidates": candidates}


def tune_kernels(models: list[ModelConfig], device, window: int) -> dict:
    """The record's section on our own kernels, with the digest of their code; empty on a CPU,
    where torch computes their formulas."""
    if device.type != "cuda" or not models:
        return {}
    from sparkgpt.ops.tuning import tunables, tune_all

    found = tune_all(tunables(models, window, device), device)
    return {"kernels": {"code": kernel_code(), "choices": found}}


def main(argv: list[str]) -> None:
    """Measure, and write the record."""
    parser = Parser(prog="sparkgpt autotune", description="Record this machine's fastest kernels.")
    parser.add_argument(
        "--attention",
        action="append",
        required=True,
        metavar="N,K,H",
        help="query heads, key/value heads, head dimension; may be repeated",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="FLAGS",
        help="a model's flags, whose kernels are tuned on CUDA: --model='--model-dim 512'",
    )
    parser.add_argument("--tokens-per-batch", type=int, default=8192, help="positions in a window")
    parser.add_argument("--longest", type=int, default=2048, help="longest document, in positions")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the record")
    args = parser.parse_args(argv)
    shapes = [_shape(text) for text in dict.fromkeys(args.attention)]
    models = [parse_train(shlex.split(text), "--model")[0] for text in dict.fromkeys(args.model)]
    import torch

    from sparkgpt.devices import device_for
    from sparkgpt.distributed import choose_device
    from sparkgpt.provenance import device_state, platform_state, versions

    if args.threads > 0:
        torch.set_num_threads(args.threads)
    with device_for(choose_device(args.device)) as device:
        choices = {
            attention_key(*shape): tune_attention(
                shape, device, args.tokens_per_batch, args.longest
            )
            for shape in shapes
        }
        kernels = tune_kernels(models, device, args.tokens_per_batch)
    record = {
        "schema": SCHEMA,
        "choices": choices,
        **kernels,
        "window": args.tokens_per_batch,
        "longest": args.longest,
        "device": device_state(device),
        "platform": platform_state(),
        "versions": versions(),
    }
    write_json(Path(args.out), record)
    choices |= kernels.get("kernels", {}).get("choices", {})
    print(json.dumps({key: choice["winner"] for key, choice in choices.items()}))


def _shape(text: str) -> tuple[int, int, int]:
    try:
        heads, kv_heads, head_dim = (int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--attention {text}: give N,K,H as three whole numbers") from None
    if min(heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise UserError(f"--attention {text}: K must divide N, and all be at least 1")
    return heads, kv_heads, head_dim


def _inputs(shape: tuple[int, int, int], device, window: int, longest: int) -> tuple:
    """q, k, v, the output's gradient, and cu_seqlens of seeded documents that fill a window."""
    import torch

    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    ends = [0]
    while ends[-1] < window:
        length = int(torch.randint(max(1, longest // 8), longest + 1, (), generator=generator))
        ends.append(min(window, ends[-1] + length))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v, grad = (
        torch.randn(window, n, head_dim, generator=generator).to(device, dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    for tensor in (q, k, v):
        tensor.requires_grad_()
    return q, k, v, grad, torch.tensor(ends, dtype=torch.int32, device=device)


def _timed(name: str, inputs: tuple, longest: int) -> tuple[float, tuple]:
    """Seconds of one forward and backward, and (output, dq, dk, dv)."""
    import torch

    from sparkgpt.distributed import synchronize
    from sparkgpt.ops.attention import varlen_attention

    q, k, v, grad, cu_seqlens_S = inputs
    synchronize(q.device)
    start = time.perf_counter()
    out = varlen_attention(q, k, v, cu_seqlens_S, longest, name)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    synchronize(q.device)
    return time.perf_counter() - start, (out, *gradients)
