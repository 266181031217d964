"""`sparkgpt prepare`: raw documents -> train.jsonl, val.jsonl and manifest.json.

Rules, in this order; each document left out is counted under the first that applies:
1. an exact duplicate of an earlier document is left out (`duplicates`);
2. an empty document is left out (`empty`): it would teach only that nothing follows BOS;
3. one of more than --max-document-bytes is left out, never cut (`over_long`);
4. by the order of sha256(seed || document): the first are held out, until --val-bytes are reached;
   or, with --val-source, that file's documents are held out, and their copies among the rest are
   left out (`held_out_elsewhere`);
5. the next in that order are for training, as long as they fit into --max-bytes (`over_budget`).

Both files keep the source's order; which documents they hold depends on seed and content alone,
not on that order, and a smaller budget's choice is a subset of a larger one's.
"""

import argparse
import hashlib
import json
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparkgpt.data.formats import FORMATS, documents_of
from sparkgpt.errors import UserError
from sparkgpt.files import make_directory, replacing, sha256_file, write_json
from sparkgpt.flags import Parser
from sparkgpt.progress import progress

FORMAT = 1
# What becomes of a document; the names are the manifest's.
FATES = ("train", "val", "duplicates", "empty", "over_long", "over_budget", "held_out_elsewhere")
TRAIN, VAL, DUPLICATE, EMPTY, OVER_LONG, OVER_BUDGET, ELSEWHERE = range(len(FATES))
PROGRESS_DOCUMENTS = 1024


@dataclass
class Survey:
    """One pass over a source. Per document: fate uint8, digest (documents, 2) uint64, of which the
    first column is its place in the hash order, and bytes int64."""

    fates: np.ndarray
    digests: np.ndarray
    sizes: np.ndarray

    def counts(self) -> dict:
        """{"read": all, fate: how many} documents."""
        tally = np.bincount(self.fates, minlength=len(FATES)).tolist()
        return {"read": len(self.fates), **dict(zip(FATES, tally, strict=True))}

    def hashes(self) -> set[bytes]:
        """The digests as bytes."""
        return {row.tobytes() for row in self.digests.astype(">u8")}


def survey(source: Path, kind: str, seed: int, limit: int, elsewhere: set[bytes]) -> Survey:
    """Read `source` once and apply rules 1 to 3 (limit 0: none), and the copies of rule 4.

    Memory: some 80 bytes a document while equal ones are sought; never the text.
    """
    salt = seed.to_bytes(8, "little", signed=True)
    fates, digests, sizes = bytearray(), bytearray(), array("q")
    for document in _reported(f"read {source.name}", documents_of(source, kind)):
        digest = hashlib.sha256(salt + document).digest()[:16]
        if not document:
            fates.append(EMPTY)
        elif limit and len(document) > limit:
            fates.append(OVER_LONG)
        else:
            fates.append(ELSEWHERE if digest in elsewhere else TRAIN)
        digests += digest
        sizes.append(len(document))
    found = Survey(
        np.frombuffer(fates, np.uint8),
        np.frombuffer(digests, ">u8").astype(np.uint64).reshape(-1, 2),
        np.frombuffer(sizes, np.int64),
    )
    found.fates[_repeated(found.digests)] = DUPLICATE
    return found


def _repeated(digests: np.ndarray) -> np.ndarray:
    """Places of the documents whose digest an earlier one has."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal ones the first leads
    places = digests[order]
    return order[1:][np.all(places[1:] == places[:-1], axis=1)]


def split(found: Survey, val_bytes: int, max_bytes: int) -> None:
    """Rules 4 and 5, both in bytes: turn TRAIN into VAL or (`max_bytes` > 0) OVER_BUDGET."""
    kept = np.flatnonzero(found.fates == TRAIN)
    kept = kept[np.argsort(found.digests[kept, 0], kind="stable")]
    before = np.cumsum(found.sizes[kept]) - found.sizes[kept]
    held_out = before < val_bytes
    found.fates[kept[held_out]] = VAL
    rest = kept[~held_out]
    if max_bytes:
        found.fates[rest[np.cumsum(found.sizes[rest]) > max_bytes]] = OVER_BUDGET


def prepare(args: argparse.Namespace) -> dict:
    """Write the two files and the manifest into args.out; returns the manifest.

    Raises UserError on a bad source, or when nothing is left to train or validate on.
    """
    source, out = Path(args.source), make_directory(args.out)
    elsewhere, val_survey = set(), None
    if args.val_source:
        val_survey = survey(
            Path(args.val_source), "jsonl", args.seed, args.max_document_bytes, set()
        )
        val_survey.fates[val_survey.fates == TRAIN] = VAL
        elsewhere = val_survey.hashes()
    train_survey = survey(source, args.format, args.seed, args.max_document_bytes, elsewhere)
    split(train_survey, 0 if args.val_source else args.val_bytes, args.max_bytes)
    _check_left(train_survey, val_survey or train_survey, args)

    # A manifest never describes files that are half old, half new.
    (out / "manifest.json").unlink(missing_ok=True)
    with ExitStack() as stack:
        parts = {
            TRAIN: stack.enter_context(replacing(out / "train.jsonl")),
            VAL: stack.enter_context(replacing(out / "val.jsonl")),
        }
        files = {fate: stack.enter_context(open(path, "wb")) for fate, path in parts.items()}
        _write(source, args.format, train_survey, files)
        if val_survey:
            _write(Path(args.val_source), "jsonl", val_survey, files)
    manifest = _manifest(args, source, out, train_survey, val_survey)
    write_json(out / "manifest.json", manifest)
    return manifest


def main(argv: list[str]) -> None:
    """Prepare documents and print the manifest."""
    parser = Parser(prog="sparkgpt prepare", description="Deduplicate, filter and split documents.")
    add = parser.add_argument
    add("--source", required=True, metavar="FILE", help="what `sparkgpt fetch` brought")
    add("--format", required=True, choices=sorted(FORMATS), help="how documents lie in it")
    add(
        "--out",
        required=True,
        metavar="DIR",
        help="folder of train.jsonl, val.jsonl, manifest.json",
    )
    add("--max-document-bytes", type=int, default=4095, help="longest document kept (0: any)")
    add("--max-bytes", type=int, default=0, help="budget of all training documents (0: none)")
    add("--val-bytes", type=int, default=24_000, help="bytes to hold out")
    add("--val-source", metavar="FILE", default="", help="JSONL held out instead of --val-bytes")
    add("--seed", type=int, default=0, help="seed of the split and the budget's choice")
    add("--json", action="store_true", help="print the manifest as one JSON object")
    args = parser.parse_args(argv)
    for name in ("max_document_bytes", "max_bytes", "val_bytes"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be at least 0")
    if not -(2**63) <= args.seed < 2**63:
        parser.error("--seed must fit in 64 bits")
    manifest = prepare(args)
    if args.json:
        print(json.dumps(manifest))
    else:
        print(f"{args.out}: " + ", ".join(f"{k} {v}" for k, v in manifest["documents"].items()))


def _reported(label: str, documents: Iterator[bytes]) -> Iterator[bytes]:
    with progress(f"{label} (documents)") as bar:
        for count, document in enumerate(documents, start=1):
            yield document
            if count % PROGRESS_DOCUMENTS == 0:
                bar.advance(PROGRESS_DOCUMENTS)


def _write(source: Path, kind: str, found: Survey, files: dict) -> None:
    """Append the documents of `source` to the file of their fate."""
    documents = _reported(f"write {source.name}", documents_of(source, kind))
    for fate, document in zip(found.fates.tolist(), documents, strict=True):
        if fate in files:
            line = json.dumps({"text": document.decode()}, ensure_ascii=False)
            files[fate].write(line.encode() + b"\n")


def _check_left(train: Survey, val: Survey, args: argparse.Namespace) -> None:
    if not np.any(train.fates == TRAIN):
        raise UserError(
            f"{args.source}: no document is left to train on ({train.counts()}); raise "
            "--max-document-bytes or --max-bytes, or lower --val-bytes"
        )
    if (args.val_source or args.val_bytes) and not np.any(val.fates == VAL):
        raise UserError(f"{args.val_source}: no document is left to hold out ({val.counts()})")


def _manifest(
    args: argparse.Namespace, source: Path, out: Path, train: Survey, val: Survey | None
) -> dict:
    names = ("format", "max_document_bytes", "max_bytes", "val_bytes", "seed")
    manifest = {
        "format": FORMAT,
        "arguments": {name: getattr(args, name) for name in names},
        "source": _described(source),
        "documents": train.counts(),
        "train": _described(out / "train.jsonl") | _content(train, TRAIN),
        "val": _described(out / "val.jsonl") | _content(val or train, VAL),
    }
    if val:
        manifest["val_source"] = _described(Path(args.val_source)) | {"documents": val.counts()}
    return manifest


def _described(path: Path) -> dict:
    return {"name": path.name, "size": path.stat().st_size, "sha256": sha256_file(path)}


def _content(found: Survey, fate: int) -> dict:
    """Documents and their text's bytes, the longest included, of one fate."""
    sizes = found.sizes[found.fates == fate]
    return {
        "documents": len(sizes),
        "bytes": int(sizes.sum()),
        "longest_bytes": int(sizes.max(initial=0)),
    }
