"""How a plot looks and how it is written: SVG whose bytes depend on the records alone.

The three neutral colours switch with the reader's light or dark preference (a style sheet inside
the SVG); the colours of the rows have a contrast of at least 3 to 1 with both backgrounds.
"""

import io
from contextlib import contextmanager
from pathlib import Path

from sparkgpt.files import write_text

LIGHT = {"background": "#fdfdfe", "ink": "#1f2329", "grid": "#dfe3e8"}
DARK = {"background": "#0e1116", "ink": "#e5e9ee", "grid": "#2b323b"}
SERIES = ("#2f7fe0", "#d9691e", "#2b9a57", "#9a5fd6", "#d0455c", "#168f98")
# Rows often share a schedule or a stream: dashes keep the lower of two equal lines visible.
DASHES = ("-", (0, (5, 3)), (0, (1.5, 2)), (0, (7, 2, 1.5, 2)), (0, (3, 1.5)), (0, (9, 3)))

SETTINGS = {
    "svg.hashsalt": "sparkgpt",  # element ids are random otherwise
    "svg.fonttype": "path",  # the same letters wherever it is shown
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": LIGHT["background"],
    "figure.facecolor": LIGHT["background"],
    "savefig.facecolor": LIGHT["background"],
    "axes.edgecolor": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["ink"],
    "ytick.color": LIGHT["ink"],
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "axes.formatter.useoffset": False,
}


@contextmanager
def drawing(width: float, height: float):
    """Context whose value is an empty matplotlib Figure of `width` x `height` inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **SETTINGS}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
        yield figure


def save_svg(figure, path: Path) -> None:
    """Write `figure` as SVG by rename; call it inside `drawing`. No date, no version, no raster."""
    buffer = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(buffer, format="svg", metadata=nothing)
    write_text(path, _with_dark(buffer.getvalue()))


def style(index: int) -> dict:
    """Colour and dashes of the row at `index`."""
    return {"color": SERIES[index % len(SERIES)], "linestyle": DASHES[index % len(DASHES)]}


def note(figure, text: str) -> None:
    """A figure that only says why there is nothing to draw."""
    figure.text(0.5, 0.5, text, ha="center", va="center", fontsize=11)


def _with_dark(svg: str) -> str:
    """Add the rules that replace the neutral colours where the reader prefers dark."""
    rules = "".join(
        f'[style*="{part}: {LIGHT[role]}"]{{{part}:{DARK[role]}!important}}'
        for role in LIGHT
        for part in ("fill", "stroke")
    )
    sheet = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
    head, tag, rest = svg.partition("<defs>")
    return head + sheet + "\n " + tag + rest
