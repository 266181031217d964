"""Facts and measured rates of the device that torch computes on. Imports torch only when called."""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GEMM_SECONDS = 1.0
COPY_SECONDS = 0.3
# Small enough to run between other programs, large enough for many cores.
GEMM_SIZES = {"cpu": (512, 2048), "cuda": (4096, 8192)}
COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
SHARE = 8  # a measurement takes at most one part in so many of the free memory


@dataclass(frozen=True)
class Device:
    """Sizes in bytes. For a CPU only `type`, `torch` and `threads` say anything.

    `unified`: device and host share one memory, so that the host's MemAvailable counts and
    `free_bytes`, which takes the page cache for used, does not. `driver` is the kernel module's
    version where one is loaded, whatever torch makes of it. `backends` maps each attention back
    end to an empty string if it computed, else to the reason; `chosen` is what 'auto' means here.
    """

    type: str
    torch: str
    threads: int
    backends: dict[str, str]
    chosen: str
    driver: str | None = None
    cuda: str | None = None
    code_for: tuple[str, ...] = ()
    name: str = ""
    count: int = 0
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    free_bytes: int = 0
    unified: bool = False
    multiprocessors: int = 0


@dataclass(frozen=True)
class Rates:
    """The best of several timed repetitions, and their median: FLOP/s and bytes/s (read plus
    written). `what` says what was timed; `share` is how much of the CPU time of torch's threads
    the products got: well below 1, other programs ran as well. 1.0 on CUDA."""

    gemm: float
    gemm_median: float
    copy: float
    copy_median: float
    what: str
    share: float = 1.0


def read_device(name: str, index: int = 0) -> Device:
    """'cpu' or 'cuda' as torch sees it. ImportError without torch."""
    import torch

    from sparkgpt.errors import UserError
    from sparkgpt.ops.attention import choose_backend

    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", index)
    backends = try_backends(device)
    try:
        chosen = choose_backend("auto", device)
    except UserError:
        chosen = ""
    common = {
        "type": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "backends": backends,
        "chosen": chosen,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }
    if name == "cpu":
        return Device(**common)
    properties = torch.cuda.get_device_properties(index)
    return Device(
        **common,
        code_for=tuple(torch.cuda.get_arch_list()),
        name=properties.name,
        count=torch.cuda.device_count(),
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        free_bytes=torch.cuda.mem_get_info(index)[0],
        unified=bool(properties.is_integrated),
        multiprocessors=properties.multi_processor_count,
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA kernel module; None where it isn't loaded."""
    try:
        words = (root / "sys/module/nvidia/version").read_text().split()
    except OSError:
        return None
    return words[0] if words else None


def fits_build(capability: tuple[int, int], code_for: tuple[str, ...], cuda: str) -> str:
    """Why a torch build can't serve a device; empty when it can.

    Machine code runs on its own major version from its minor upwards (sm_120 on 12.1), save that of
    sm_90a and its like, which runs on 9.0 alone; PTX (compute_90) runs on everything newer.
    """
    major, minor = capability
    for code in code_for:
        kind, _, digits = code.partition("_")
        number = digits.rstrip("af")
        built = (int(number[:-1]), int(number[-1]))
        if built == capability or (kind == "compute" and number == digits and built <= capability):
            return ""
        if kind == "sm" and not digits.endswith("a") and built[0] == major and built[1] <= minor:
            return ""
    return f"torch for CUDA {cuda} has no code for sm_{major}{minor}, only {', '.join(code_for)}"


def try_backends(device) -> dict[str, str]:
    """Each attention back end on two short documents, forward and backward: reason of a failure."""
    from sparkgpt.ops.attention import BACKENDS, choose_backend

    reasons = {}
    for name in BACKENDS:
        try:
            choose_backend(name, device)
            reasons[name] = "" if attends(name, device) else "gave numbers that are not finite"
        except Exception as error:  # triton's share no base class, nor does a missing compiler's
            reasons[name] = (str(error).splitlines() or [type(error).__name__])[0]
    return reasons


def attends(name: str, device) -> bool:
    """Whether outputs and gradients of a back end are finite on documents of 48 and 16."""
    import torch

    from sparkgpt.ops.attention import varlen_attention

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (torch.randn(64, n, 64, device=device, dtype=dtype) for n in (4, 2, 2))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    ends = torch.tensor([0, 48, 64], dtype=torch.int32, device=device)
    out = varlen_attention(*inputs, ends, 64, name)
    gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    return all(tensor.isfinite().all().item() for tensor in (out, *gradients))


def measure_rates(device, free_bytes: int) -> Rates:
    """Time square matrix products in the dtype of training, and copies too large for a cache.

    RuntimeError when the device can't compute.
    """
    import torch

    from sparkgpt.distributed import synchronize

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    wait = lambda: synchronize(device)
    sizes = GEMM_SIZES[device.type]
    while sizes[0] > 64 and 3 * sizes[-1] ** 2 * dtype.itemsize > free_bytes // SHARE:
        sizes = tuple(n // 2 for n in sizes)
    operands = [torch.randn(3, n, n, device=device, dtype=dtype) for n in sizes]
    wall, busy = time.perf_counter(), time.process_time()
    gemms = []
    for n, (a, b, out) in zip(sizes, operands, strict=True):
        multiply = functools.partial(torch.mm, a, b, out=out)
        found = timings(multiply, wait, GEMM_SECONDS / len(sizes))
        gemms.append((2 * n**3 / min(found), 2 * n**3 / statistics.median(found), n))
    wall, busy = time.perf_counter() - wall, time.process_time() - busy
    best, median, n = max(gemms)
    copied = max(2**20, min(COPY_BYTES[device.type], free_bytes // SHARE))
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = timings(lambda: target.copy_(source), wait, COPY_SECONDS)
    moved = 2 * source.numel()
    kind = str(dtype).removeprefix("torch.")
    return Rates(
        gemm=best,
        gemm_median=median,
        copy=moved / min(copies),
        copy_median=moved / statistics.median(copies),
        what=f"{n} x {n} matrices in {kind}; a copy of {source.numel() // 2**20} MiB",
        share=1.0 if device.type == "cuda" else min(1.0, busy / wall / torch.get_num_threads()),
    )


def timings(action: Callable[[], object], wait: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each repetition within about `seconds`, at least three, after one to warm up."""
    action()
    wait()
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        action()
        wait()
        found.append(time.perf_counter() - start)
    return found
