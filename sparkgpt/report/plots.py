"""`sparkgpt plots`: every plot of a records folder, or that of a benchmark, each a file."""

import sys
from pathlib import Path

from sparkgpt.files import read_json
from sparkgpt.flags import Parser
from sparkgpt.report.datasize import data_size
from sparkgpt.report.figures import FIGURES
from sparkgpt.report.render import Report, load_report
from sparkgpt.report.theme import drawing, note, save_svg


def main(argv: list[str]) -> int:
    """Draw the plots. UserError when a record is damaged."""
    arguments = _parser().parse_args(argv)
    if arguments.bench:
        path = Path(arguments.out) / "data-size.svg"
        with drawing(8.6, 3.4) as figure:
            data_size(figure, read_json(arguments.bench))
            save_svg(figure, path)
        print(f"drew {path}", file=sys.stderr)
        return 0
    report = load_report(arguments.records, arguments.rows, arguments.compare)
    for name in [arguments.only] if arguments.only else FIGURES:
        path = Path(arguments.out) / f"{name}.svg"
        draw(name, report, path)
        print(f"drew {path}", file=sys.stderr)
    return 0


def draw(name: str, report: Report, path: Path) -> None:
    """Draw one plot of FIGURES to an SVG file; without runs it says so."""
    function, (width, height) = FIGURES[name]
    with drawing(width, height) as figure:
        if report.runs or report.coordinates:
            function(figure, report)
        else:
            note(figure, "Not measured: there are no records")
        save_svg(figure, path)


def _parser() -> Parser:
    parser = Parser(prog="sparkgpt plots", description="Draw plots from run records, as SVG.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--records", help="folder that holds runs/")
    source.add_argument(
        "--bench", metavar="FILE", help="a record of `sparkgpt bench` with its data"
    )
    parser.add_argument("--out", required=True, help="folder for the SVG files")
    parser.add_argument("--only", choices=FIGURES, help="draw this one only")
    parser.add_argument("--rows", help="runs table (TSV) that names and orders the rows")
    parser.add_argument("--compare", help="compare.json (default: the one in --records)")
    return parser
