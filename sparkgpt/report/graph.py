"""`sparkgpt graph`: the rules of the pipeline as a picture, from `snakemake --rulegraph` (DOT).

Layers by the longest way from a source, edges that a longer way implies left out, long edges bent
around the boxes between (Sugiyama, Tagawa & Toda 1981, in its plainest form).
"""

import re
import sys
from html import escape
from pathlib import Path

from sparkgpt.errors import UserError
from sparkgpt.files import write_text
from sparkgpt.flags import Parser
from sparkgpt.report.theme import DARK, LIGHT, SERIES

NODE = re.compile(r'^\s*(\d+)\[label = "([^"\\]+)', re.M)
EDGE = re.compile(r"^\s*(\d+) -> (\d+)", re.M)
COLUMN, ROW, WIDTH, HEIGHT, MARGIN = 128, 58, 100, 36, 14  # pixels
SWEEPS = 12

Graph = dict[str, set[str]]  # name -> what it is made of


def main(argv: list[str]) -> int:
    """Draw the graph on stdin. UserError when it is none."""
    parser = Parser(prog="sparkgpt graph", description="Draw `snakemake --rulegraph` as SVG.")
    parser.add_argument("--dot", help="file to read (default: standard input)")
    parser.add_argument("--out", required=True, help="SVG file to write")
    arguments = parser.parse_args(argv)
    text = Path(arguments.dot).read_text("utf-8") if arguments.dot else sys.stdin.read()
    write_text(arguments.out, draw(read_dot(text)))
    return 0


def read_dot(text: str) -> Graph:
    """The graph of a DOT text, without its targets: rules that only name files. UserError when it
    is empty or has a cycle."""
    names = dict(NODE.findall(text))
    needs: Graph = {name: set() for name in names.values()}
    for source, target in EDGE.findall(text):
        if names[source] != names[target]:
            needs[names[target]].add(names[source])
    needs.pop("all", None)
    if not needs:
        raise UserError("this is no rule graph; pipe `snakemake --rulegraph` into this command")
    return needs


def reduced(needs: Graph) -> Graph:
    """The same graph without edges that a longer way implies."""
    above = {name: _ancestors(name, needs) for name in needs}
    return {
        name: {one for one in direct if not any(one in above[other] for other in direct - {one})}
        for name, direct in needs.items()
    }


def layers(needs: Graph) -> dict[str, int]:
    """name -> one more than the deepest of what it is made of; sources beside their users."""
    depth: dict[str, int] = {}
    while len(depth) < len(needs):
        ready = [n for n in needs if n not in depth and needs[n] <= depth.keys()]
        if not ready:
            raise UserError("this rule graph has a cycle, which no pipeline has")
        for name in ready:
            depth[name] = 1 + max((depth[other] for other in needs[name]), default=-1)
    for name in [name for name in needs if not needs[name]]:
        users = [depth[other] for other in needs if name in needs[other]]
        depth[name] = min(users, default=1) - 1
    return depth


def draw(needs: Graph) -> str:
    """The graph as SVG, left to right; equal graphs give equal bytes."""
    needs = reduced(needs)
    depth = layers(needs)
    ways = {
        (source, name): [source, *_between(source, name, depth), name]
        for name in sorted(needs)
        for source in sorted(needs[name])
    }
    rank = dict(depth)
    for way in ways.values():
        rank |= {name: depth[way[0]] + step for step, name in enumerate(way[:-1]) if step}
    columns = _ordered(rank, list(ways.values()))
    tallest = max(map(len, columns))
    place = {
        name: (
            MARGIN + column * COLUMN + WIDTH / 2,
            MARGIN + (row + (tallest - len(names)) / 2) * ROW + HEIGHT / 2,
        )
        for column, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    size = (
        2 * MARGIN + (len(columns) - 1) * COLUMN + WIDTH,
        2 * MARGIN + (tallest - 1) * ROW + HEIGHT,
    )
    lines = [_path([place[name] for name in way]) for way in ways.values()]
    boxes = [_box(name, *place[name]) for name in sorted(needs)]
    told = "; ".join(
        f"{name} from {', '.join(sorted(needs[name]))}" for name in sorted(needs) if needs[name]
    )
    return _svg(size, told, [*lines, *boxes])


def _ancestors(name: str, needs: Graph) -> set[str]:
    found: set[str] = set()
    waiting = set(needs[name])
    while waiting:
        other = waiting.pop()
        found.add(other)
        waiting |= needs[other] - found
    return found


def _between(source: str, name: str, depth: dict[str, int]) -> list[str]:
    """Points of a long edge, one in each layer that it crosses."""
    return [f"{source}>{name}:{layer}" for layer in range(depth[source] + 1, depth[name])]


def _ordered(rank: dict[str, int], ways: list[list[str]]) -> list[list[str]]:
    """The names of each layer from top to bottom: each near the mean of its neighbours."""
    columns = [sorted(n for n in rank if rank[n] == r) for r in range(max(rank.values()) + 1)]
    near: dict[str, list[str]] = {name: [] for name in rank}
    for way in ways:
        for a, b in zip(way, way[1:], strict=False):
            near[a].append(b)
            near[b].append(a)
    for sweep in range(SWEEPS):
        for column in columns if sweep % 2 else columns[::-1]:
            height = {
                name: index - len(names) / 2
                for names in columns
                for index, name in enumerate(names)
            }
            mean = lambda name, height=height: sum(map(height.get, near[name])) / len(near[name])
            column.sort(key=lambda name: (mean(name) if near[name] else 0.0, name))
    return columns


def _path(points: list[tuple[float, float]]) -> str:
    (x, y), *rest = points
    text = f"M{x + WIDTH / 2:.0f} {y:.0f}"
    x += WIDTH / 2
    for index, (to_x, to_y) in enumerate(rest):
        last = index == len(rest) - 1
        end = to_x - WIDTH / 2 - 6 if last else to_x - WIDTH / 2
        bend = (x + end) / 2
        text += f"C{bend:.0f} {y:.0f} {bend:.0f} {to_y:.0f} {end:.0f} {to_y:.0f}"
        if not last:
            text += f"H{to_x + WIDTH / 2:.0f}"
        x, y = to_x + WIDTH / 2, to_y
    return f'<path class="way" marker-end="url(#tip)" d="{text}"/>'


def _box(name: str, x: float, y: float) -> str:
    left, top = x - WIDTH / 2, y - HEIGHT / 2
    return (
        f'<rect class="box" x="{left:.0f}" y="{top:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="7"/>'
        f'<text x="{x:.0f}" y="{y + 4.5:.0f}">{escape(name)}</text>'
    )


def _svg(size: tuple[float, float], told: str, parts: list[str]) -> str:
    width, height = (f"{value:.0f}" for value in size)
    rules = lambda c: (
        f".back{{fill:{c['background']}}}.box{{fill:{c['background']}}}text{{fill:{c['ink']}}}"
    )
    style = (
        f"{rules(LIGHT)}.box{{stroke:{SERIES[0]};stroke-width:1.6}}"
        ".way{fill:none;stroke:#7d8791;stroke-width:1.5}.head{fill:#7d8791}"
        "text{font:600 13px system-ui,'DejaVu Sans',sans-serif;text-anchor:middle}"
        f"@media (prefers-color-scheme: dark){{{rules(DARK)}}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-labelledby="t d">',
            f'<title id="t">Rules of the pipeline</title><desc id="d">{escape(told)}</desc>',
            f"<style>{style}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="6" '
            'markerHeight="6" orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker></defs>',
            f'<rect class="back" width="{width}" height="{height}"/>',
            *parts,
            "</svg>\n",
        ]
    )
