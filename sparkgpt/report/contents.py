"""What goes into a published version, copied as text and freed of this machine's paths."""

import re
import shutil
import sys
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import read_json, write_json
from sparkgpt.report.records import CHECK_FILES, RECORD_FILES, Run
from sparkgpt.report.sbom import bill_of_materials, check_versions

# What a records folder holds beside its runs; `jobs` are the pipeline's own notes by value.
PATTERNS = (
    "*.json",
    "*.jsonl",
    "*.md",
    "index.html",
    "*.svg",
    "*.tsv",
    "plots/*.svg",
    "jobs/*.json",
)
IMAGES = Path("containers")
LOCKS = ("base.lock.txt", "torch.txt")
MANIFESTS = ("data/manifest.json", "data/train.cache/manifest.json", "data/val.cache/manifest.json")
EMBEDDED = re.compile(r";base64,[A-Za-z0-9+/=]+")
# An absolute path of two or more parts that is not the tail of a word, a URL or a relative path.
ABSOLUTE = re.compile(r"(?<![\w./:~-])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
# Paths that are the same on every Linux machine say nothing about this one.
COMMON = ("/usr/", "/dev/", "/proc/", "/bin/", "/lib/", "/lib64/")


def copy_records(records: Path, runs: list[Run], folder: Path) -> None:
    """Runs, and what lies beside them: tables, plots, the page, the pipeline's notes."""
    for run in runs:
        for name in (*RECORD_FILES, *CHECK_FILES):
            if (run.path / name).is_file():
                copy_text(run.path / name, folder / "runs" / run.summary.run / name)
    for pattern in PATTERNS:
        for path in sorted(records.glob(pattern)):
            copy_text(path, folder / path.relative_to(records))


def copy_pins(records: Path, runs: list[Run], folder: Path, profile: Path, pins: Path) -> None:
    """What the version was made of: configuration, data manifests, libraries. UserError when the
    data or the libraries that are here now are not those of the runs."""
    for path in (profile, *sorted(profile.parent.glob(f"{profile.stem}.*.tsv"))):
        copy_text(path, folder / "config" / path.name)
    found = [path.relative_to(records) for path in sorted(records.glob("raw/*.verified.json"))]
    for path in (*MANIFESTS, *found):
        copy_text(records / path, folder / path)
    for split in ("train", "val"):
        digest = read_json(folder / "data" / f"{split}.cache" / "manifest.json").get("digest")
        for run in runs:
            if getattr(run.summary, f"{split}_digest") != digest:
                raise UserError(
                    f"{run.path} was made with other {split} data than {records / 'data'} holds "
                    "now; run the pipeline to its end first"
                )
    locks = [pins / name for name in LOCKS]
    for path in locks:
        copy_text(path, folder / "requirements" / path.name)
    images = {run.provenance.get("image") for run in runs}
    if images != {None}:
        _copy_image_list(images, folder)
        return
    bill = bill_of_materials(locks)
    recorded: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.provenance.get("versions", {}).items():
            recorded.setdefault(name, set()).add(version)
    check_versions(bill, recorded)
    write_json(folder / "sbom.cdx.json", bill)


def _copy_image_list(images: set[str | None], folder: Path) -> None:
    """What the image of the runs holds, as `containers/build` wrote it. UserError unless all ran in
    one image that lies here."""
    digests = {path.read_text(encoding="utf-8").strip(): path for path in IMAGES.glob("*.digest")}
    found = [digests.get(image or "") for image in images]
    if len(found) != 1 or found[0] is None:
        named = ", ".join(sorted(str(image or "none") for image in images))
        raise UserError(
            f"the runs were made in {named}, and {IMAGES} has no such image, or they are not of "
            "one; publish where it was built"
        )
    copy_text(found[0].with_suffix(".contents.txt"), folder / "image.contents.txt")
    copy_text(found[0].with_suffix(".cdx.json"), folder / "sbom.cdx.json")


def copy_text(source: Path, target: Path) -> None:
    """Copy a text. Paths below the checkout become relative; any other absolute one is refused."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {source}: {error.strerror}; a version needs it") from error
    relative = re.sub(rf"(?<![\w./:~-]){re.escape(str(Path.cwd()))}/", "", text)
    told = EMBEDDED.sub("", relative)
    found = [path for path in ABSOLUTE.findall(told) if not path.startswith(COMMON)]
    if found and source.suffix != ".svg":
        raise UserError(
            f"{source} holds the path {found[0]} of this machine; run inside the checkout with "
            "relative paths, then publish"
        )
    if relative == text:
        shutil.copyfile(source, target)
        return
    print(f"{source}: paths of the checkout made relative", file=sys.stderr)
    target.write_text(relative, encoding="utf-8")
