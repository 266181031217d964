"""`sparkgpt compare`: two rows of a runs table, or one row at two revisions, paired by seed."""

import json
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_json
from sparkgpt.flags import Parser
from sparkgpt.report.matched import comparison, matched_table
from sparkgpt.report.records import Run, load_runs


def main(argv: list[str]) -> int:
    """Compare the named rows. UserError when runs are missing or not matched."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.base:
        if arguments.pair or arguments.records or len(arguments.rows) != 1:
            parser.error("--base REV takes one ROW of the profile's runs tables, and no records")
        from sparkgpt.report.revisions import compare_revisions

        result = compare_revisions(arguments)
    else:
        pairs = [_pair(text) for text in [*arguments.pair, *_positional(arguments.rows)]]
        if not pairs:
            parser.error("name two rows, as `compare dense adamw`, or --pair A:B")
        records = arguments.records or _all_records(Path("results", arguments.profile))
        result = comparison(_runs(records), pairs)
        if arguments.out:
            write_json(arguments.out, result)
    print(json.dumps(result) if arguments.json else matched_table(result))
    return 0


def _positional(rows: list[str]) -> list[str]:
    return [":".join(rows)] if rows else []


def _runs(folders: list[str]) -> list[Run]:
    """The runs of several records folders, in which each run has one place."""
    found: dict[str, Run] = {}
    for run in [run for folder in folders for run in load_runs(folder)]:
        other = found.setdefault(run.summary.run, run)
        if other is not run:
            raise UserError(f"{other.path} and {run.path} are two runs of one name; name --records")
    return list(found.values())


def _all_records(profile: Path) -> list[str]:
    """The records folders of a profile: its own, and those of its further runs tables."""
    folders = [path.parent for path in [profile / "runs", *sorted(profile.glob("*/runs"))]]
    found = [str(folder) for folder in folders if (folder / "runs").is_dir()]
    if not found:
        raise UserError(f"{profile} holds no runs; run the pipeline first, or name --records")
    return found


def _pair(text: str) -> tuple[str, str]:
    a, colon, b = text.partition(":")
    if not (a and colon and b) or a == b or ":" in b:
        raise UserError(f"pair {text!r}: name two different rows, as dense:adamw")
    return a, b


def _parser() -> Parser:
    parser = Parser(
        prog="sparkgpt compare",
        description="Compare rows of matched runs, paired by seed: `compare dense adamw`. With "
        "--base, train one row by this tree and by another revision, and compare the two.",
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="two rows, or one with --base")
    parser.add_argument("--profile", default="cpu", help="whose runs, rows and data")
    parser.add_argument(
        "--records",
        action="append",
        help="folder that holds runs/, also several (default: all of results/<profile>)",
    )
    parser.add_argument(
        "--pair", action="append", default=[], metavar="A:B", help="rows to compare, A - B"
    )
    parser.add_argument("--out", help="JSON file to write; with --base, the records folder")
    parser.add_argument("--json", action="store_true", help="print it as one JSON object")
    base = parser.add_argument_group("one row at two revisions")
    base.add_argument("--base", metavar="REV", help="the other revision: a commit, tag or branch")
    base.add_argument("--seeds", default="0,1,2,3,4", help="one pair of runs for each")
    base.add_argument("--threads", type=int, help="of each run (default: all cores)")
    base.add_argument("--flags", default="", help="flags of `train` on top of the row's, in both")
    return parser
