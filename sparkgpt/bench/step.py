"""The section `step`: agreement first, then all contestants in rounds, the split, the memory."""

from functools import partial
from pathlib import Path

from torch.profiler import record_function

from sparkgpt.bench.agreement import CPU, agreement
from sparkgpt.bench.bare import BareAttention, BareProducts
from sparkgpt.bench.contest import Contestant, Sample, WarmUp, ratio, run_rounds, spread
from sparkgpt.bench.documents import news_lengths, write_synthetic_cache
from sparkgpt.bench.memory import measure_memory
from sparkgpt.bench.peer import PeerStep
from sparkgpt.bench.shapes import Settings
from sparkgpt.bench.split import DATA, OPTIMIZER, profile_steps
from sparkgpt.config import ModelConfig, TrainConfig
from sparkgpt.data.cache import open_documents
from sparkgpt.data.store import ByteCache
from sparkgpt.data.stream import Window, WindowStream, check_lengths
from sparkgpt.errors import UserError
from sparkgpt.optim.hybrid import HybridOptimizer
from sparkgpt.progress import progress
from sparkgpt.train.build import build_loss, build_model
from sparkgpt.train.step import train_step

WINDOWS = 24  # that the synthetic documents fill, about; later steps begin another epoch


def open_data(settings: Settings, folder: Path) -> ByteCache:
    """The documents asked for, or synthetic ones written into `folder`.

    UserError when one is longer than the model or the window takes.
    """
    if settings.data:
        cache = open_documents(settings.data)
    else:
        count = max(WINDOWS, 2 * WINDOWS * settings.window // settings.longest)
        lengths = news_lengths(count, settings.longest, settings.seed)
        cache = write_synthetic_cache(folder / "step.cache", lengths, settings.seed)
    check_lengths(cache, {"--window": settings.window, "--longest": settings.longest + 1})
    return cache


def run_step(settings: Settings, folder: Path) -> dict:
    """Measure the step. Of an agreement that is red, the result is that alone: no speed."""
    train = settings.train
    cache = open_data(settings, folder)
    stream = WindowStream(
        cache, window=settings.window, buffer=train.pack_buffer, seed=train.order_seed
    )
    models = settings.models()
    checks = {}
    with progress("agreement with transformers, models", len(models)) as bar:
        for name, model in models.items():
            checks[name] = agreement(model, train, stream.window(0))
            bar.advance(1, name)
    if not all(check["passed"] for check in checks.values()):
        return {"agreement": checks}
    steps = {name: OurStep(model, train, stream) for name, model in models.items()}
    contestants = [Contestant(name, step.ready) for name, step in steps.items()]
    contestants += opponents(settings, stream)
    warmed, samples = run_rounds(contestants, settings.rounds, WarmUp(least=settings.warm_steps))
    first = settings.rounds + max(warm["steps"] for warm in warmed.values())
    profiled = range(first, first + settings.profiled)
    parts = {name: profile_steps(step.step, profiled) for name, step in steps.items()}
    memory = measure_memory(settings, cache.path.resolve(), folder)
    return {
        "agreement": checks,
        "data": {"digest": cache.digest, "documents": len(cache), "stream": stream.digest},
        "warm_up": warmed,
        "seconds": {name: summary(values) for name, values in samples.items()},
        "samples": {name: [sample._asdict() for sample in v] for name, v in samples.items()},
        "ratios": (ratios := compared(samples)),
        "split": parts,
        "memory": memory,
        "figures": figures(settings, samples, ratios, parts["ours"]) | memory["figures"],
    }


def opponents(settings: Settings, stream: WindowStream) -> list[Contestant]:
    """transformers with and without masks, and the bare kernels, on the same windows."""
    model = settings.model
    masked, unmasked = PeerStep(model), PeerStep(model)
    products, attention = BareProducts(model, settings.window), BareAttention(model)
    on_window = lambda work: lambda index: partial(work, stream.window(index))
    return [
        Contestant("masked_peer", on_window(masked.masked)),
        Contestant("unmasked_peer", on_window(unmasked.unmasked)),
        Contestant("bare_gemm", lambda index: products.run),
        Contestant("bare_attention", lambda index: attention.ready(segments(stream.window(index)))),
    ]


def segments(window: Window) -> list[int]:
    """Positions of each segment, filler's included, as attention meets them."""
    return window.cu_seqlens_S.diff().tolist()


def compared(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """The ratios, each taken inside a round. Speeds over one window are inverse to seconds."""
    wall = {name: [sample.wall for sample in values] for name, values in samples.items()}
    bare = [a + b for a, b in zip(wall["bare_gemm"], wall["bare_attention"], strict=True)]
    ratios = {
        "ratio_to_bare": ratio(bare, wall["ours"]),
        "ratio_to_masked_peer": ratio(wall["masked_peer"], wall["ours"]),
        "ratio_to_unmasked_peer": ratio(wall["unmasked_peer"], wall["ours"]),
    }
    if "moe" in wall:
        ratios["moe_to_dense"] = ratio(wall["ours"], wall["moe"])
    return ratios


def summary(values: list[Sample]) -> dict:
    """Spread of wall and CPU seconds, and how many cores were busy (CPU over wall, median)."""
    wall, cpu = [v.wall for v in values], [v.cpu for v in values]
    return {"wall": spread(wall), "cpu": spread(cpu), "cores": ratio(cpu, wall)["median"]}


def figures(settings: Settings, samples: dict, ratios: dict, part: dict) -> dict[str, float]:
    """The flat figures of the record: ratios, window tokens/s of each trainer, shares."""
    found = {name: value["median"] for name, value in ratios.items()}
    for name in ("ours", "moe", "masked_peer", "unmasked_peer"):
        if name in samples:
            seconds = spread([sample.wall for sample in samples[name]])["median"]
            found[f"{name}_tokens_per_second"] = settings.window / seconds
    return found | {f"share_{name}": value for name, value in part["shares"].items()}


class OurStep:
    """`step(index)` lays out window `index` of the stream and trains on it, at the peak rates.

    Training lays out windows ahead, in a thread; here that is inside the step, and so an upper
    bound of its cost.
    """

    def __init__(self, config: ModelConfig, train: TrainConfig, stream: WindowStream):
        self.train, self.stream = train, stream
        self.model, optimizer = build_model(config, train, CPU)
        self.optimizer = _Recorded(optimizer)
        self.loss_of = build_loss(train, CPU)

    def ready(self, index: int):
        return lambda: self.step(index)

    def step(self, index: int) -> None:
        """One update. UserError (exit code 1) when it was left out, and so not a whole step."""
        with record_function(DATA):
            window = self.stream.window(index)
        result = train_step(
            self.model, self.loss_of, self.optimizer, [window], window.real_tokens, 1.0, self.train,
            CPU, False,
        )  # fmt: skip
        if result.bad:
            raise UserError(
                f"step {index} was left out ({result.bad}), so its time says nothing; "
                "give other documents or another shape",
                exit_code=1,
            )


class _Recorded:
    """The optimizer, its update and the dropping of gradients marked for the profiler."""

    def __init__(self, optimizer: HybridOptimizer):
        self.optimizer = optimizer

    def step(self, factor: float) -> None:
        with record_function(OPTIMIZER):
            self.optimizer.step(factor)

    def zero_grad(self) -> None:
        with record_function(OPTIMIZER):
            self.optimizer.zero_grad()
