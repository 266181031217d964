"""Plans of epochs kept as files, so that a run which goes on need not plan again.

`epoch<N>.plan` is a line of JSON, padded to HEADER bytes, and a plan's three arrays one after the
other. The line holds {"format", "key", "epoch", "first", "documents", "windows", "sha256"}: `key`
tells all that fixes the plan, `first` is the number of its first window in the whole stream, and
the hash is that of the line without it and of the arrays.
"""

import hashlib
import json
import mmap
import re
from pathlib import Path

import numpy as np

from sparkgpt.data.packing import PackPlan, index_type
from sparkgpt.files import make_directory, replacing

FORMAT = 1
HEADER = 512
NAME = re.compile(r"epoch(\d+)\.plan")
REAL = np.dtype("<i4")


class PlanFiles:
    """The plans under `key` in one folder, which nobody else writes to."""

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key

    def load(self) -> dict[int, tuple[int, PackPlan]]:
        """Epoch -> (number of its first window, plan, memory-mapped), of every file that is whole
        and of this key. Others are passed over."""
        found = {epoch: self._read(path, epoch) for epoch, path in sorted(self._paths().items())}
        return {epoch: entry for epoch, entry in found.items() if entry}

    def write(self, epoch: int, first: int, plan: PackPlan) -> PackPlan:
        """Keep a plan; returns it memory-mapped. UserError when the disk is full."""
        make_directory(self.folder)
        fields = {
            "format": FORMAT, "key": self.key, "epoch": epoch, "first": first,
            "documents": len(plan.doc_ids), "windows": len(plan),
        }  # fmt: skip
        arrays = (plan.doc_ids, plan.window_starts, plan.real_tokens)
        path = self.folder / f"epoch{epoch}.plan"
        with replacing(path) as temporary, open(temporary, "wb") as file:
            line = json.dumps(fields | {"sha256": _hash(fields, *arrays)}).encode()
            file.write(line.ljust(HEADER - 1) + b"\n")
            for array in arrays:
                array.tofile(file)
        return _arrays(path, fields)

    def prune(self, keep: set[int]) -> None:
        """Remove the files of all other epochs."""
        for epoch, path in self._paths().items():
            if epoch not in keep:
                path.unlink()

    def _paths(self) -> dict[int, Path]:
        names = ((NAME.fullmatch(path.name), path) for path in self.folder.glob("epoch*.plan"))
        return {int(match[1]): path for match, path in names if match}

    def _read(self, path: Path, epoch: int) -> tuple[int, PackPlan] | None:
        try:
            with open(path, "rb") as file:
                fields = json.loads(file.read(HEADER))
            found = fields.pop("sha256")
            if (fields["format"], fields["key"], fields["epoch"]) != (FORMAT, self.key, epoch):
                return None
            plan = _arrays(path, fields)
            if _hash(fields, plan.doc_ids, plan.window_starts, plan.real_tokens) != found:
                return None
            return fields["first"], plan
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return None  # cut, damaged, or not ours


def _arrays(path: Path, fields: dict) -> PackPlan:
    """Map a file's arrays. ValueError when it is too short for them."""
    documents, windows = fields["documents"], fields["windows"]
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays, at = [], HEADER
    for count, kind in (
        (documents, index_type(documents)), (windows + 1, index_type(documents)), (windows, REAL)
    ):  # fmt: skip
        arrays.append(np.frombuffer(content, kind, count, at))
        at += arrays[-1].nbytes
    return PackPlan(*arrays)


def _hash(fields: dict, *arrays: np.ndarray) -> str:
    total = hashlib.sha256(json.dumps(fields).encode())
    for array in arrays:
        total.update(array)
    return total.hexdigest()
