"""`sparkgpt tables`: Markdown from records, for the pipeline and for the README.

With --records it renders a records folder to a file. With --write or --check it keeps the marked
blocks of README.md, and of CHANGES.md beside it, equal to the newest published version.
"""

import os
import sys
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_json, write_text
from sparkgpt.flags import Parser
from sparkgpt.report import cells, readme, render

README_BLOCKS = ("models", "matched", "exports", "sweep", "environment", "planned", "loss")


def main(argv: list[str]) -> int:
    """Render, write or check. UserError with exit code 1 when a block drifted from its records."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.records:
        if not arguments.out:
            parser.error("--records needs --out FILE")
        _render(arguments)
        return 0
    documents = [(Path(arguments.readme), README_BLOCKS)]
    changes = Path(arguments.readme).parent / "CHANGES.md"
    if changes.is_file():
        documents.append((changes, ()))
    for document, required in documents:
        text, blocks = readme.rendered(document, Path(arguments.results), required)
        drifted = [name for name, (current, should) in blocks.items() if current != should]
        if arguments.check and drifted:
            _report_drift(document, blocks, drifted)
        elif drifted:
            write_text(document, readme.replaced(text, blocks))
        print(f"{document}: {len(blocks)} blocks, {len(drifted)} changed", file=sys.stderr)
    return 0


def document(report: render.Report, link: str) -> str:
    """All tables of one records folder; `link` leads from the document to that folder."""
    parts = {
        "Models": render.models_table(report, link),
        "Matched runs": render.matched(report),
        "Exports": render.exports_table(report, link),
        "Environment": render.environment_table(report),
    }
    return "\n".join(f"## {title}\n\n{body}\n" for title, body in parts.items())


def _render(arguments) -> None:
    report = render.load_report(arguments.records, arguments.rows, arguments.compare)
    link = os.path.relpath(arguments.records, Path(arguments.out).parent)
    write_text(arguments.out, document(report, "" if link == "." else f"{link}/"))
    if arguments.json_out:
        values = {
            "schema": 1,
            "models": render.models(report),
            "matched": (report.comparison or {}).get("pairs", []),
            "exports": render.exports(report),
            "environment": render.environment(report),
        }
        write_json(arguments.json_out, values)


def _report_drift(document: Path, blocks: dict, drifted: list[str]) -> None:
    for name in drifted:
        print(f"{document}, block {name}:\n{cells.short_diff(*blocks[name])}", file=sys.stderr)
    raise UserError(
        f"{document} differs from its records in {', '.join(drifted)}; "
        "run `sparkgpt tables --write` and commit it",
        exit_code=1,
    )


def _parser() -> Parser:
    parser = Parser(prog="sparkgpt tables", description="Render tables from run records.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--records", help="render this records folder to --out")
    action.add_argument("--write", action="store_true", help="bring the README up to date")
    action.add_argument("--check", action="store_true", help="exit 1 if the README is not")
    parser.add_argument("--rows", help="runs table (TSV) that names the rows, with --records")
    parser.add_argument("--compare", help="compare.json (default: the one in --records)")
    parser.add_argument("--out", help="Markdown file to write, with --records")
    parser.add_argument("--json-out", help="the same figures as JSON, with --records")
    parser.add_argument("--readme", default="README.md", help="document with marked blocks")
    parser.add_argument("--results", default="results", help="folder of published versions")
    return parser
