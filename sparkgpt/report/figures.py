"""What each plot shows: functions that draw a Report on an empty matplotlib figure."""

import math
import textwrap
from collections.abc import Callable
from typing import Any

from sparkgpt.report.panels import (
    bins,
    draw_curves,
    draw_difference,
    draw_legend,
    draw_load_maps,
    last_load,
    thousands,
    tokens_axis,
    values_of,
    zoom,
)
from sparkgpt.report.records import of_row
from sparkgpt.report.render import Report
from sparkgpt.report.theme import LIGHT, note, style


def loss(figure, report: Report) -> None:
    """Training and held-out loss over real tokens, one colour a row, single seeds thin."""
    train, val = figure.subplots(1, 2)
    draw_curves(train, report, "train", "train/loss")
    draw_curves(val, report, "val", "val/loss")
    train.set(title="Training loss", ylabel="nats per target")
    val.set_title("Held-out loss, last three quarters")
    tokens_axis(train, val)
    zoom(train, values_of(report, "train", "train/loss"))
    # The first drop is the same for all and would flatten what tells the rows apart.
    zoom(val, values_of(report, "val", "val/loss", start=0.25))
    draw_legend(figure, train)


def lr(figure, report: Report) -> None:
    """Learning rates over steps."""
    muon, adamw = figure.subplots(1, 2)
    draw_curves(muon, report, "train", "lr/muon", by_step=True)
    draw_curves(adamw, report, "train", "lr/adamw", by_step=True)
    muon.set(title="Muon", ylabel="learning rate", xlabel="step", ylim=(0, None))
    adamw.set(title="AdamW", xlabel="step", ylim=(0, None))
    draw_legend(figure, adamw)


def utilization(figure, report: Report) -> None:
    """The share of each window that holds real tokens: over training, and how it is spread."""
    curve, spread = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    draw_curves(curve, report, "train", "utilization", scale=100)
    curve.set(title="Packing utilisation", ylabel="real tokens, % of the window")
    curve.set_ylim(top=100)
    tokens_axis(curve)
    edges = bins([100 * value for value in values_of(report, "train", "utilization")])
    for index, row in enumerate(report.rows):
        curves = [
            run.metrics.series("train", "utilization") for run in of_row(report.runs, row.name)
        ]
        values = [100 * value for curve in curves for value in curve.values()]
        shares = [1 / len(values) for _ in values]
        spread.hist(values, edges, weights=shares, histtype="step", orientation="horizontal",
                    linewidth=1.8, **style(index))  # fmt: skip
    spread.set(title="Histogram", xlabel="share of the logged steps")
    draw_legend(figure, curve)


def throughput(figure, report: Report) -> None:
    """Real and window tokens per second: the mean of a row as bars, its seeds as dots."""
    axes = figure.subplots()
    rows = [row for row in report.rows if of_row(report.runs, row.name)]
    kinds = (
        ("window_tokens_per_second", 0.4, "window tokens"),
        ("real_tokens_per_second", 1.0, "real tokens"),
    )
    for index, row in enumerate(rows):
        runs = of_row(report.runs, row.name)
        for offset, (key, alpha, name) in zip((-0.19, 0.19), kinds, strict=True):
            speeds = [getattr(run.summary, key) for run in runs]
            mean, place = sum(speeds) / len(speeds), index + offset
            axes.barh(place, mean, 0.34, color=style(index)["color"], alpha=alpha)
            axes.plot(speeds, [place] * len(speeds), "o", color=LIGHT["ink"], markersize=3)
            axes.annotate(
                f"{mean:,.0f} {name}",
                (max(speeds), place),
                (7, 0),
                va="center",
                textcoords="offset points",
            )
    axes.set(title="Throughput", xlabel="tokens per second (bars: mean; dots: seeds)")
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    thousands(axes.xaxis)


def matched(figure, report: Report) -> None:
    """The difference of matched rows at each validation, its seeds, and its 95 % interval."""
    pairs = (report.comparison or {}).get("pairs", [])
    if not pairs:
        note(figure, "No matched runs: nothing compared")
        return
    verdicts = [
        textwrap.fill(f"{pair['verdict']} (n = {pair['n']})", 80 // len(pairs)) for pair in pairs
    ]
    lines = max(len(verdict.splitlines()) for verdict in verdicts)
    for index, (axes, pair) in enumerate(
        zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True)
    ):
        draw_difference(axes, pair, style(index)["color"])
        axes.set_title(f"{pair['a']} - {pair['b']}", pad=10 + 12 * lines)
        axes.text(0, 1.03, verdicts[index], transform=axes.transAxes, fontsize=9)
        axes.set_xlabel("step (shaded: 95 % interval)" if pair["interval"] else "step")
        if index == 0:
            axes.set_ylabel("difference of held-out loss, nats")


def router(figure, report: Report) -> None:
    """How evenly the routers spread positions: over time, and by expert at the end."""
    runs = [run for run in report.runs if run.metrics.series("train", "router/load")]
    if not runs:
        note(figure, "No run has experts: no router to show")
        return
    top, bottom = figure.subfigures(2, 1)
    spread, entropy = top.subplots(1, 2)
    draw_curves(spread, report, "train", "router/cv", by_step=True)
    draw_curves(entropy, report, "train", "router/entropy", by_step=True)
    experts = len(last_load(runs[0])[0])
    entropy.axhline(math.log(experts), color=LIGHT["ink"], linewidth=1, linestyle=":")
    spread.set(title="Spread of load (CV)", xlabel="step", ylabel="std / mean", ylim=(0, None))
    entropy.set(title=f"Router entropy (dotted: ln {experts})", xlabel="step", ylabel="nats")
    draw_load_maps(bottom, runs)


def coordinates(figure, report: Report) -> None:
    """muP's coordinate check: activation size over width, a line per module, routers dashed."""
    if report.coordinates is None:
        note(figure, "No coordinate check: run `sparkgpt coordinates`")
        return
    for axes, kind in zip(figure.subplots(1, 2), ("dense", "moe"), strict=True):
        check = report.coordinates[kind]
        for index, (name, sizes) in enumerate(sorted(check["sizes"].items())):
            label = f"{name.removeprefix('layers.')}: {check['slopes'][name]:+.2f}"
            line = {"color": style(index)["color"], "linestyle": "--" if "router" in name else "-"}
            axes.loglog(check["widths"], sizes, marker="o", markersize=3, label=label, **line)
        axes.set_xticks(check["widths"], check["widths"])
        axes.minorticks_off()
        axes.set(title=f"{kind} after {check['steps']} steps", xlabel="width")
        axes.legend(title="module: log-log slope", fontsize=7.5, loc="upper left",
                    bbox_to_anchor=(0, -0.18), ncols=2)  # fmt: skip
    figure.axes[0].set_ylabel("mean absolute activation")


FIGURES: dict[str, tuple[Callable[[Any, Report], None], tuple[float, float]]] = {
    "loss": (loss, (9.2, 4.0)),
    "matched": (matched, (9.2, 3.7)),
    "throughput": (throughput, (8.2, 3.2)),
    "lr": (lr, (9.2, 3.4)),
    "router": (router, (9.2, 6.2)),
    "utilization": (utilization, (8.2, 3.4)),
    "coordinates": (coordinates, (9.2, 4.6)),
}
