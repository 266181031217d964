"""Stock Hugging Face directories: what transformers and mlx_lm load without this package.

`sparkgpt export` is here too. torch is imported only once there is work, so that --help is quick.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparkgpt.config import ModelConfig
from sparkgpt.errors import UserError
from sparkgpt.export.hf_config import from_hf_config, generation_config, to_hf_config
from sparkgpt.export.layout import join, split
from sparkgpt.export.tokenizer import tokenizer_config, tokenizer_json
from sparkgpt.files import read_json, replacing_directory, sha256_file, write_json
from sparkgpt.flags import Parser

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EXPORTED = re.compile(
    r"(generation_|tokenizer_)?config\.json|tokenizer\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
)
SHARD_BYTES = 5_000_000_000  # of tensor data in one file


def write_hf(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    out: Path | str,
    *,
    dtype: torch.dtype | str = "float32",
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model (native names, any device) as the directory `out`, which appears by rename.

    `dtype` is that of the weights on disk; `metadata` goes into the safetensors headers; more than
    `shard_bytes` of tensors are split over several files with an index. UserError when `state`
    lacks a tensor, has one too many, or one of the wrong shape, or `out` holds anything else.
    """
    _check_replaceable(Path(out))
    dtype = str(dtype).removeprefix("torch.")
    parts = split(dict(state), config)
    with replacing_directory(out) as folder:
        _write_weights(parts, folder, dtype, dict(metadata or {}), shard_bytes)
        write_json(folder / "config.json", to_hf_config(config, dtype))
        write_json(folder / "generation_config.json", generation_config())
        write_json(folder / "tokenizer.json", tokenizer_json())
        write_json(folder / "tokenizer_config.json", tokenizer_config())


def _check_replaceable(out: Path) -> None:
    """UserError unless `out` is free, or holds nothing but an older export."""
    if not out.exists():
        return
    if not out.is_dir() or not all(EXPORTED.fullmatch(file.name) for file in out.iterdir()):
        raise UserError(f"{out} exists and is not an export; choose another --out")


def _write_weights(
    parts: dict[str, Tensor], folder: Path, dtype: str, metadata: dict[str, str], limit: int
) -> None:
    import torch

    from sparkgpt.checkpoint import write_tensors

    to = getattr(torch, dtype)
    shards = _shards(parts, limit // to.itemsize)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        total = sum(tensor.numel() for tensor in parts.values()) * to.itemsize
        files = {part: name for name, shard in zip(names, shards, strict=True) for part in shard}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        write_json(folder / INDEX, index)
    for name, shard in zip(names, shards, strict=True):
        # Copies, one shard at a time: safetensors refuses views that share a storage.
        tensors = {
            part: parts[part].detach().to("cpu", to, copy=True).contiguous() for part in shard
        }
        write_tensors(folder / name, tensors, {**metadata, "format": "pt"})
        _order_metadata(folder / name)


def _order_metadata(path: Path) -> None:
    """Sort a safetensors header's metadata in place: the library writes them in random order, and
    the same model must give the same bytes."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        file.seek(8)
        file.write(text.ljust(size))


def _shards(parts: dict[str, Tensor], limit: int) -> list[list[str]]:
    """Names in order, cut where a shard would exceed `limit` elements."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in parts.items():
        if shards[-1] and size + tensor.numel() > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.numel()
    return shards


def read_hf(directory: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a stock directory: the config, and tensors under native names in the file's dtype.

    The exact inverse of `write_hf`. UserError when a file or tensor is missing, unexpected or of
    another shape, or the config is another model's.
    """
    from sparkgpt.checkpoint import read_tensors

    directory = Path(directory)
    config = from_hf_config(read_json(directory / "config.json"), directory / "config.json")
    parts = {}
    for path in weight_files(directory):
        parts |= read_tensors(path)
    return config, join(parts, config, directory)


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a stock directory, by its index when there is one."""
    if not (directory / INDEX).exists():
        return [directory / SINGLE]
    return [
        directory / name
        for name in sorted(set(read_json(directory / INDEX)["weight_map"].values()))
    ]


def main(argv: list[str]) -> int:
    """`sparkgpt export`."""
    args = _parser().parse_args(argv)
    from sparkgpt.checkpoint import read_run

    run, out = Path(args.run), Path(args.out)
    if not args.out:
        raise UserError("--out is empty; name a folder")
    config, state = read_run(run / f"step{args.step}" if args.step else run)
    metadata = {"run": run.resolve().name} | ({"step": str(args.step)} if args.step else {})
    write_hf(state, config, out, dtype=args.dtype, metadata=metadata)
    digests = {path.name: sha256_file(path) for path in weight_files(out)}
    print(f"exported {run} to {out} ({args.dtype})", file=sys.stderr)
    if args.json:
        print(
            json.dumps({"run": str(run), "out": str(out), "dtype": args.dtype, "sha256": digests})
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparkgpt export",
        description="Write a run's weights as a stock Hugging Face directory.",
    )
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory to write")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights on disk"
    )
    parser.add_argument(
        "--step", type=int, default=0, metavar="N", help="checkpoint step<N> (0: the final weights)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser
