"""The section `data`: caching, planning, packing and batches, over the size of a corpus.

All of it through `sparkgpt.data`, on synthetic documents in a temporary folder, each measurement
in a process of its own.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

from sparkgpt.bench.child import run_child
from sparkgpt.bench.documents import LONGEST, news_lengths, write_jsonl, write_sparse_cache
from sparkgpt.config import TrainConfig
from sparkgpt.data.packing import plan_epoch, utilization
from sparkgpt.errors import UserError
from sparkgpt.progress import progress

GB = 10**9
MEAN_BYTES = 3310  # of the documents; a corpus of a size is that many of them
WINDOW, SMALL_WINDOW = 49_152, 8_192
BUFFER = TrainConfig.pack_buffer
PACKED = 100_000  # documents, at most, of the packing figures
PLACE = 0.9  # of the epoch, where a run is resumed
PARTS, MANY_PARTS = 4, 3  # that progress tells of
MANY = 10_000_000  # documents at which resuming is judged
BIG = 10 * GB  # bytes at which opening is judged


def run_data(sizes: list[float], documents: int, seed: int, folder: Path) -> dict:
    """Measure at each size (GB of text), then opening and resuming at `documents` documents.

    `series`: a row per size. UserError when the disk is too small.
    """
    check_space(sizes, folder)
    with progress("data, parts", PARTS * len(sizes) + MANY_PARTS + 1) as bar:
        series = [measure(size, seed, folder, bar.advance) for size in sorted(sizes)]
        many = measure_many(documents, seed, folder, bar.advance)
        packing = pack(min(PACKED, series[-1]["documents"]), seed)
        bar.advance(1, "packing")
    return {"series": series, "many": many, "packing": packing} | {
        "figures": figures(series[-1], many, packing)
    }


def measure(size: float, seed: int, folder: Path, done: Callable[[int, str], None]) -> dict:
    """Caching, planning and batches of a corpus of `size` GB, written and removed again.

    Calls `done(1, what)` after each of PARTS parts.
    """
    documents = max(2, int(size * GB / MEAN_BYTES))
    lengths = news_lengths(documents, LONGEST, seed)
    source, cache = folder / "data.jsonl", folder / "data.cache"
    row = {"gb": size, "bytes": int(lengths.sum())}
    row["jsonl_bytes"] = write_jsonl(source, lengths, seed)
    done(1, f"{size:g} GB written")
    row |= run_child("cache", {"documents": str(source), "out": str(cache)})
    done(1, f"{size:g} GB cached")
    way = {"path": str(cache), "window": WINDOW, "buffer": BUFFER}
    row |= run_child("plan", way)
    done(1, f"{size:g} GB planned")
    row |= run_child("stream", way | {"place": 0.0, "verify": True, "keep": ""})
    done(1, f"{size:g} GB streamed")
    source.unlink()
    shutil.rmtree(cache)
    return row | {
        "caching_mb_per_cpu_second": row["jsonl_bytes"] / 1e6 / row["cache_cpu_seconds"],
        "planned_documents_per_second": row["documents"] / row["plan_seconds"],
    }


def measure_many(documents: int, seed: int, folder: Path, done: Callable[[int, str], None]) -> dict:
    """Opening a cache of that many documents of zeros, and resuming a run at PLACE of its epoch.

    Two starts: the first leaves its plan in a folder, as a run does, and the second finds it. Calls
    `done(1, what)` after each of MANY_PARTS parts.
    """
    lengths = news_lengths(documents, LONGEST, seed)
    cache = folder / "many.cache"
    write_sparse_cache(cache, lengths)
    done(1, f"{documents:,} documents laid out")
    way = {"path": str(cache), "window": WINDOW, "buffer": BUFFER, "place": PLACE, "verify": False}
    way["keep"] = str(folder / "plans")  # as in a run's folder
    first = run_child("stream", way)
    done(1, f"{documents:,} documents, first start")
    again = run_child("stream", way)
    done(1, f"{documents:,} documents, second start")
    shutil.rmtree(cache)
    return {"documents": documents, "bytes": int(lengths.sum()), "first": first, "again": again}


def pack(documents: int, seed: int) -> dict[str, float | None]:
    """Window -> utilisation without the last window, of documents that fit it. None for one."""
    result = {}
    for window in (WINDOW, SMALL_WINDOW):
        lengths = news_lengths(documents, min(LONGEST, window - 1), seed)
        result[str(window)] = utilization(plan_epoch(lengths + 1, window, BUFFER, seed), window)[1]
    return result


def figures(largest: dict, many: dict, packing: dict) -> dict[str, float | None]:
    """The flat figures: those of the largest size; None for a limit that was not reached."""
    again = many["again"]
    return {
        "caching_mb_per_cpu_second": largest["caching_mb_per_cpu_second"],
        "planned_documents_per_second": largest["planned_documents_per_second"],
        "batch_milliseconds": 1e3 * largest["batch_seconds"],
        "open_seconds": again["open_seconds"] if many["bytes"] >= BIG else None,
        "resume_seconds": (
            again["open_seconds"] + again["rejoin_seconds"] if many["documents"] >= MANY else None
        ),
        "packing_49152": packing[str(WINDOW)],
        "packing_8192": packing[str(SMALL_WINDOW)],
    }


def check_space(sizes: list[float], folder: Path) -> None:
    """UserError when the temporary folder can't hold the largest corpus, as text and as a cache."""
    free, need = shutil.disk_usage(folder).free, int(2.2 * max(sizes) * GB)
    if free < need:
        raise UserError(
            f"--sizes {max(sizes):g} needs {need / GB:.1f} GB in {folder.parent}, where "
            f"{free / GB:.1f} GB are free; set TMPDIR to another disk, or ask for less"
        )
