"""A published version outside git: its weights beside it, and the folder as one file."""

import gzip
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import replacing, sha256_file, write_text
from sparkgpt.report.records import Run

LIMIT_BYTES = 10_000_000  # of a version in git, which keeps it for ever
WEIGHTS = "model_final.safetensors"
WEIGHTS_SUMS = "WEIGHTS.sha256"


def check_size(folder: Path) -> int:
    """The size of a folder in bytes. UserError, naming the largest files, when git should not
    hold it."""
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > LIMIT_BYTES:
        largest = sorted(sizes, key=sizes.get, reverse=True)[:3]
        named = ", ".join(f"{path.relative_to(folder)} {sizes[path]:,}" for path in largest)
        raise UserError(
            f"this version has {total:,} bytes, more than the {LIMIT_BYTES:,} that git should hold "
            f"(largest: {named}); log less often, or leave out an --extra"
        )
    return total


def weights_sums(runs: Iterable[Run]) -> str:
    """The weights of all runs in the format of `sha256sum -c`, a file `<run>.safetensors` each."""
    sums = {run.summary.run: run.summary.weights_sha256 for run in runs}
    return "".join(f"{sums[name]}  {name}.safetensors\n" for name in sorted(sums) if sums[name])


def copy_weights(runs: Iterable[Run], target: Path) -> None:
    """Copy every run's weights to `target`, checked, with their sums. UserError when one is
    missing or is not the file that was recorded."""
    runs = list(runs)
    for run in runs:
        source = run.path / WEIGHTS
        if not source.is_file():
            raise UserError(f"{run.path} has no {WEIGHTS} to copy; run it again with --save-final")
        with replacing(target / f"{run.summary.run}.safetensors") as temporary:
            shutil.copyfile(source, temporary)
            if sha256_file(temporary) != run.summary.weights_sha256:
                raise UserError(f"{source} is not the file that summary.json names; run it again")
    write_text(target / WEIGHTS_SUMS, weights_sums(runs))


def pack(folder: Path, target: Path) -> None:
    """The folder as a .tar.gz whose bytes depend on its content alone: no times, no owners."""
    with (
        replacing(target) as temporary,
        open(temporary, "wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = Path(folder.name, path.relative_to(folder)).as_posix()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = path.stat().st_size, 0o644
            with open(path, "rb") as content:
                archive.addfile(entry, content)
