"""`sparkgpt report`: all tables and figures of a records folder on one page of plain HTML.

The page stands alone: no script, no network, figures inside it, colours by the reader's preference.
Its links to the records are relative, so that the folder can move.
"""

import base64
import os
import re
import sys
from html import escape
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_text
from sparkgpt.flags import Parser
from sparkgpt.report import cells, render
from sparkgpt.report.theme import DARK, LIGHT

# Plot -> its heading; a page shows those that its folder has, in this order.
FIGURES = {
    "loss": "Loss",
    "lr": "Learning rates",
    "throughput": "Throughput",
    "utilization": "Packing utilisation",
    "router": "Router load",
    "coordinates": "Coordinate check",
}
STYLE = """
:root { color-scheme: light dark; --back: BACK0; --ink: INK0; --line: GRID0; --soft: #59636e; --link: #1c63bd }
@media (prefers-color-scheme: dark) {
  :root { --back: BACK1; --ink: INK1; --line: GRID1; --soft: #9aa5b1; --link: #74aef5 }
}
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 66rem; background: var(--back); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.7rem; margin: 0 0 .25rem } h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem }
p, figcaption { max-width: 46rem } .lead, figcaption { color: var(--soft) }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; padding: 0; list-style: none }
a { color: var(--link) } code { font-size: .9em }
.table { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
thead th { white-space: nowrap } figure { margin: .8rem 0 0 } img { max-width: 100%; height: auto }
figcaption { margin-top: .4rem; font-size: .9rem } figcaption p { margin: 0 }
@media print { nav { display: none } }
"""  # noqa: E501


def main(argv: list[str]) -> int:
    """Write the page. UserError when a record is damaged or a caption is missing."""
    arguments = _parser().parse_args(argv)
    records, out = Path(arguments.records), Path(arguments.out)
    report = render.load_report(records, arguments.rows)
    if not report.runs:
        raise UserError(f"{records} holds no runs to report on; run the pipeline first")
    link = os.path.relpath(records, out.parent)
    captions, graph = Path(arguments.captions), arguments.graph
    write_text(out, page(report, records, "" if link == "." else f"{link}/", captions, graph))
    print(f"wrote {out}", file=sys.stderr)
    return 0


def page(
    report: render.Report, records: Path, link: str, captions: Path, graph: str | None = None
) -> str:
    """The page as HTML; `link` leads from it to the records, `captions` holds <plot>.rst."""
    plot = lambda name: records / "plots" / f"{name}.svg"
    figure = lambda name, title: _figure(plot(name), title, captions / f"{name}.rst")
    parts = {"Models": _markdown(render.models_table(report, link))}
    if report.comparison is not None:
        drawn = figure("matched", "Matched runs") if plot("matched").is_file() else ""
        parts["Matched runs"] = _markdown(render.matched(report)) + drawn
    parts |= {title: figure(name, title) for name, title in FIGURES.items() if plot(name).is_file()}
    if any(run.checks for run in report.runs):
        parts["Exports"] = _markdown(render.exports_table(report, link))
    parts["Records"] = _markdown(_records(report, link))
    parts["Environment"] = _markdown(render.environment_table(report))
    if graph:
        parts["Pipeline"] = _figure(
            Path(graph), "Rules of the pipeline", captions / "rulegraph.rst"
        )
    name = records.name if records.is_absolute() else records.as_posix().removeprefix("results/")
    return _html(f"sparkgpt: {name}", _lead(report), parts)


def _lead(report: render.Report) -> str:
    rows = [row for row in report.rows if any(run.row == row.name for run in report.runs)]
    trees = {str(run.provenance.get("tree", {}).get("commit"))[:12] for run in report.runs}
    return (
        f"{len(report.runs)} runs of {len(rows)} rows, trained by commit "
        f"{', '.join(sorted(trees))}. Every figure comes from the records that its row links to."
    )


def _records(report: render.Report, link: str) -> str:
    """Each run's files, and the digest of its weights."""
    header = ["run", "figures", "origin", "log", "settings", "weights sha256"]
    files = ("summary.json", "run.json", "metrics.jsonl", "config.json")
    return cells.table(
        header,
        [
            [
                run.summary.run,
                *(f"[{name}]({link}runs/{run.summary.run}/{name})" for name in files),
                f"`{run.summary.weights_sha256}`",
            ]
            for run in report.runs
        ],
    )


def _markdown(text: str) -> str:
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    wide = html.replace("<table>", '<div class="table"><table>')
    return re.sub(r"<th\b", '<th scope="col"', wide.replace("</table>", "</table></div>"))


def _figure(path: Path, title: str, caption: Path) -> str:
    """An SVG inside the page: as an image, so that ids and styles of two can't meet."""
    try:
        content, said = path.read_bytes(), caption.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error
    data = base64.b64encode(content).decode()
    return (
        f'<figure><img alt="{escape(title)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{_markdown(said)}</figcaption></figure>"
    )


def _html(title: str, lead: str, parts: dict[str, str]) -> str:
    names = {heading: heading.lower().replace(" ", "-") for heading in parts}
    places = "".join(f'<li><a href="#{name}">{heading}</a></li>' for heading, name in names.items())
    sections = "\n".join(
        f'<section id="{names[heading]}"><h2>{heading}</h2>\n{body}</section>'
        for heading, body in parts.items()
    )
    style = STYLE
    for number, colours in enumerate((LIGHT, DARK)):
        for word, role in (("BACK", "background"), ("INK", "ink"), ("GRID", "grid")):
            style = style.replace(f"{word}{number}", colours[role])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>
<nav aria-label="Contents"><ul>{places}</ul></nav>
<main>
{sections}
</main>
</body>
</html>
"""


def _parser() -> Parser:
    parser = Parser(prog="sparkgpt report", description="One page of all tables and figures.")
    parser.add_argument("--records", required=True, help="folder that holds runs/ and plots/")
    parser.add_argument("--out", required=True, help="HTML file to write")
    parser.add_argument("--rows", help="runs table (TSV) that names and orders the rows")
    parser.add_argument("--graph", help="picture of the pipeline (SVG)")
    parser.add_argument("--captions", default="workflow/report", help="folder of <plot>.rst")
    return parser
