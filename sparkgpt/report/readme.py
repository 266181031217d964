"""Marked blocks of README.md and CHANGES.md, rendered from the newest committed results/v*/.

A block is everything between `<!-- tables:NAME:begin -->` and `<!-- tables:NAME:end -->`;
`tables:NAME@v0.1.0:...` takes that version instead of the newest.
"""

import re
from collections.abc import Callable
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_text
from sparkgpt.report import cells, render

MARKER = re.compile(
    r"^<!-- tables:(?P<name>[a-z]+)(?:@(?P<version>v[0-9.]+))?:(?P<edge>begin|end) -->$", re.M
)
UNPUBLISHED = "No version is published yet; `make reproduce` measures these figures."


# Groups of rows in extra/ that have a table of their own.
OWN_TABLE = ("sweep", "rope", "packing", "long")


def versions(results: Path) -> list[Path]:
    """The folders `v1.2.3` of `results`, oldest first, compared as numbers (v0.10 after v0.9)."""
    found = [p for p in results.glob("v*") if p.is_dir() and re.fullmatch(r"v\d+(\.\d+)*", p.name)]
    return sorted(found, key=lambda path: [int(part) for part in path.name[1:].split(".")])


def newest(results: Path) -> Path | None:
    """The newest published version, if there is one."""
    return next(reversed(versions(results)), None)


def rendered(document: Path, results: Path, required: tuple[str, ...] = ()) -> tuple[str, dict]:
    """(the document as it is, {block: (its text, the text it should have)}).

    A block is of the newest version, or of the one that its marker names, as `sweep@v0.2.0`.
    UserError on a missing or unpaired marker, or an unknown block.
    """
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {document}: {error.strerror}") from error
    blocks = {}
    for begin, end in _pairs(document, text):
        name = begin["name"] + (f"@{begin['version']}" if begin["version"] else "")
        folder = results / begin["version"] if begin["version"] else newest(results)
        should = _block(document, begin["name"], folder)
        blocks[name] = (text[begin.end() : end.start()], f"\n{should}\n")
    for name in required:
        if name not in {block.partition("@")[0] for block in blocks}:
            raise UserError(
                f"{document} has no block {name!r}; add the lines "
                f"<!-- tables:{name}:begin --> and <!-- tables:{name}:end -->"
            )
    return text, blocks


def replaced(text: str, blocks: dict[str, tuple[str, str]]) -> str:
    """The document with every block's content as it should be."""
    for name, (_, should) in blocks.items():
        begin, end = f"<!-- tables:{name}:begin -->", f"<!-- tables:{name}:end -->"
        head, _, rest = text.partition(begin)
        text = head + begin + should + end + rest.partition(end)[2]
    return text


def fill_entry(changes: Path, version: Path) -> None:
    """Bring the figures of a published version into its entry of the changelog, made if it is
    missing, with its block if that is. UserError as in `rendered`."""
    text = changes.read_text(encoding="utf-8")
    block = f"summary@{version.name}"
    if f"<!-- tables:{block}:begin -->" not in text:
        text = _with_block(text, version.name, block)
        write_text(changes, text)
    text, blocks = rendered(changes, version.parent)
    write_text(changes, replaced(text, {block: blocks[block]}))


def _with_block(text: str, version: str, block: str) -> str:
    """The changelog with an empty block at the end of a version's entry; entries begin with ##,
    and what was unreleased becomes the version."""
    marks = (
        "Held-out loss, in nats and bits per target:\n\n"
        f"<!-- tables:{block}:begin -->\n<!-- tables:{block}:end -->\n"
    )
    heads = list(re.finditer(r"^## .*$", text, re.M))
    place = [head.group().split()[1:2] for head in heads]
    if [version] not in place and ["Unreleased"] in place:
        return _with_block(text.replace("## Unreleased", f"## {version}", 1), version, block)
    if [version] not in place:
        start = heads[0].start() if heads else len(text)
        return f"{text[:start]}## {version}\n\n{marks}\n{text[start:]}".rstrip("\n") + "\n"
    following = heads[place.index([version]) + 1 :]
    end = following[0].start() if following else len(text)
    return f"{text[:end].rstrip()}\n\n{marks}\n{text[end:]}".rstrip("\n") + "\n"


def _pairs(document: Path, text: str) -> list[tuple[re.Match, re.Match]]:
    markers = list(MARKER.finditer(text))
    pairs = list(zip(markers[::2], markers[1::2], strict=False))
    kinds = [(b["name"], b["version"]) for b, _ in pairs]
    matching = all(
        begin["edge"] == "begin"
        and end["edge"] == "end"
        and begin["name"] == end["name"]
        and begin["version"] == end["version"]
        for begin, end in pairs
    )
    if len(markers) % 2 or not matching or len(set(kinds)) != len(kinds):
        order = ", ".join(f"{m['name']}:{m['edge']}" for m in markers)
        raise UserError(
            f"{document}: the markers do not pair up ({order}); each block needs one begin line "
            "and one end line, in this order"
        )
    return pairs


def _block(document: Path, name: str, folder: Path | None) -> str:
    if name not in BLOCKS:
        raise UserError(f"{document}: unknown block {name!r}; known are {', '.join(BLOCKS)}")
    if folder is None or not folder.is_dir():
        return UNPUBLISHED
    link = f"{folder.relative_to(document.parent)}/" if _below(folder, document) else f"{folder}/"
    return BLOCKS[name](folder, link)


def _below(folder: Path, document: Path) -> bool:
    return folder.is_relative_to(document.parent)


def _models(folder: Path, link: str) -> str:
    return render.models_table(_report(folder), link)


def _matched(folder: Path, link: str) -> str:
    return render.matched(_report(folder))


def _exports(folder: Path, link: str) -> str:
    return render.exports_table(_report(folder), link)


def _environment(folder: Path, link: str) -> str:
    return render.environment_table(_report(folder))


def _summary(folder: Path, link: str) -> str:
    return render.summary_lines(_report(folder))


def _loss(folder: Path, link: str) -> str:
    return f"![Training and held-out loss over tokens]({link}plots/loss.svg)"


def _coordinates(folder: Path, link: str) -> str:
    return f"![Activation size over width, dense and MoE]({link}plots/coordinates.svg)"


def _extra(name: str) -> Callable[[Path, str], str]:
    """The block of the runs in extra/<name>/."""

    def block(folder: Path, link: str) -> str:
        report = _report(folder / "extra" / name)
        if not report.rows:
            return f"Rows `{name}`: {cells.NOT_MEASURED}."
        return render.models_table(report, f"{link}extra/{name}/")

    return block


def _planned(folder: Path, link: str) -> str:
    """Tables of the further profiles that the version lists, measured or not."""
    tables = [
        f"Profile `{rows.parent.name}`:\n\n"
        + render.models_table(
            render.load_report(rows.parent, rows), f"{link}extra/{rows.parent.name}/"
        )
        for rows in sorted(folder.glob("extra/*/rows.tsv"))
        if rows.parent.name not in OWN_TABLE
    ]
    return "\n\n".join(tables) or f"Rows that need a GPU: {cells.NOT_MEASURED}."


def _report(folder: Path) -> render.Report:
    rows = folder / "rows.tsv"
    return render.load_report(folder, rows if rows.is_file() else None)


BLOCKS: dict[str, Callable[[Path, str], str]] = {
    "models": _models,
    "matched": _matched,
    "exports": _exports,
    "environment": _environment,
    **{name: _extra(name) for name in OWN_TABLE},
    "planned": _planned,
    "loss": _loss,
    "coordinates": _coordinates,
    "summary": _summary,
}
