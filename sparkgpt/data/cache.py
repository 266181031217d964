"""`sparkgpt cache`: makes byte caches from JSONL, and tells how their documents pack."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparkgpt.data.jsonl import read_documents
from sparkgpt.data.packing import plan_epoch, utilization
from sparkgpt.data.store import FILES, ByteCache, read_manifest, write_cache
from sparkgpt.errors import UserError
from sparkgpt.files import make_directory, replacing_directory
from sparkgpt.flags import Parser
from sparkgpt.lock import exclusive
from sparkgpt.progress import progress

PROGRESS_DOCUMENTS = 1024  # between updates of the bar


def open_documents(path: Path | str) -> ByteCache:
    """Open a cache folder, or a JSONL file through the cache `<file>.cache` beside it.

    That cache is made once and used while the file keeps its size and time. Processes that need
    it at the same moment wait for the first one. Raises UserError like `build_cache`.
    """
    path = Path(path)
    if path.is_dir():
        return ByteCache.open(path)
    if not path.is_file():
        raise UserError(f"no documents at {path}; give a byte cache or a JSONL file")
    out = path.with_name(path.name + ".cache")
    if not _is_current(out, path):
        build_cache(path, out, unless_current=True)
    return ByteCache.open(out)


def build_cache(documents: Path | str, out: Path | str, unless_current: bool = False) -> None:
    """Write the cache `out` from the JSONL file `documents`, in one pass and bounded memory.

    The folder appears by rename. Raises UserError on bad lines, no documents, or no permission.
    """
    documents, out = Path(documents), Path(out)
    source = _identity(documents)
    if out.exists() and not _is_replaceable(out):
        raise UserError(f"{out} exists and is not a byte cache; choose another --out")
    make_directory(out.parent)
    try:
        with exclusive(out):
            if unless_current and _is_current(out, documents):
                return
            with replacing_directory(out) as folder:
                if not write_cache(folder, _reported(documents, source["size"]), source):
                    raise UserError(f"{documents} holds no documents; prepare or fetch it again")
    except OSError as error:
        raise UserError(
            f"cannot write the cache {out}: {error.strerror}; make it elsewhere with "
            f"`sparkgpt cache {documents} --out DIR` and give DIR instead"
        ) from error


def statistics(cache: ByteCache, window: int, buffer: int, seed: int) -> dict:
    """Sizes of a cache and how well its first epoch packs. Units: documents, bytes, positions.

    `packing_utilization` covers all windows; `packing_utilization_full` leaves out the last one,
    which is usually part empty (None if it is the only one). UserError as from `plan_epoch`.
    """
    lengths = cache.lengths
    plan = plan_epoch(lengths + 1, window, buffer, seed)
    everything, full = utilization(plan, window)
    return {
        "documents": len(cache),
        "bytes": len(cache.bytes),
        "real_tokens": int(plan.real_tokens.sum()),
        "longest_bytes": int(lengths.max()),
        "median_bytes": float(np.median(lengths)),
        "window": window,
        "buffer": buffer,
        "seed": seed,
        "windows": len(plan),
        "packing_utilization": everything,
        "packing_utilization_full": full,
        "digest": cache.digest,
    }


def main(argv: list[str]) -> None:
    """Make a cache, or print the statistics of one."""
    parser = Parser(prog="sparkgpt cache", description="Turn JSONL documents into a byte cache.")
    parser.add_argument("documents", metavar="DOCS", help="JSONL file, or a cache for --stats")
    parser.add_argument("--out", metavar="DIR", help="folder of the cache (None: DOCS.cache)")
    parser.add_argument("--verify", action="store_true", help="hash the cache's content again")
    parser.add_argument("--stats", action="store_true", help="print how the documents pack")
    parser.add_argument("--window", type=int, default=49_152, help="positions in a window")
    parser.add_argument("--buffer", type=int, default=32_768, help="as --pack-buffer of train")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data order")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    if args.out and Path(args.documents).is_dir():
        parser.error(f"{args.documents} is a folder; --out needs a JSONL file")
    if args.out:
        build_cache(args.documents, args.out)
    cache = open_documents(args.out or args.documents)
    if args.verify:
        cache.verify()
    if args.stats:
        result = statistics(cache, args.window, args.buffer, args.seed)
    else:
        result = {key: cache.manifest[key] for key in ("documents", "bytes", "digest")}
    result["path"] = str(cache.path)
    if args.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:26} {value}")


def _reported(documents: Path, size: int) -> Iterator[bytes]:
    """The documents of a JSONL file of `size` bytes, with progress in text bytes."""
    with progress(f"cache {documents.name}", size) as bar:
        read = 0
        for count, (_, document) in enumerate(read_documents(documents), start=1):
            yield document
            read += len(document)
            if count % PROGRESS_DOCUMENTS == 0:
                bar.advance(read, f"bytes, {count} documents")
                read = 0


def _identity(documents: Path) -> dict:
    """What tells whether a JSONL file is still the one that was cached."""
    try:
        status = documents.stat()
    except OSError as error:
        raise UserError(f"cannot read {documents}: {error.strerror}") from error
    return {"name": documents.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _is_current(out: Path, documents: Path) -> bool:
    manifest = read_manifest(out)
    return manifest is not None and manifest["source"] == _identity(documents)


def _is_replaceable(out: Path) -> bool:
    """Whether `out` is a folder of a cache's files only, or some of them, or none."""
    return out.is_dir() and {file.name for file in out.iterdir()} <= FILES
