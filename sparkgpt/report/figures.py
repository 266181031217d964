"""What each plot shows: functions that draw a Report on an empty matplotlib figure."""

import math
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from sparkgpt.report.records import Run, of_row
from sparkgpt.report.render import Report
from sparkgpt.report.theme import LIGHT, note, style


def loss(figure, report: Report) -> None:
    """Training and held-out loss over real tokens, one colour a row, single seeds thin."""
    train, val = figure.subplots(1, 2)
    _curves(train, report, "train", "train/loss")
    _curves(val, report, "val", "val/loss")
    train.set(title="Training loss", ylabel="nats per target")
    val.set_title("Held-out loss, last three quarters")
    _tokens_axis(train, val)
    _zoom(train, _values(report, "train", "train/loss"))
    # The first drop is the same for all and would flatten what tells the rows apart.
    _zoom(val, _values(report, "val", "val/loss", start=0.25))
    _legend(figure, train)


def lr(figure, report: Report) -> None:
    """Learning rates over steps."""
    muon, adamw = figure.subplots(1, 2)
    _curves(muon, report, "train", "lr/muon", by_step=True)
    _curves(adamw, report, "train", "lr/adamw", by_step=True)
    muon.set(title="Muon", ylabel="learning rate", xlabel="step", ylim=(0, None))
    adamw.set(title="AdamW", xlabel="step", ylim=(0, None))
    _legend(figure, adamw)


def utilization(figure, report: Report) -> None:
    """The share of each window that holds real tokens."""
    axes = figure.subplots()
    _curves(axes, report, "train", "utilization", scale=100)
    axes.set(title="Packing utilisation", ylabel="real tokens, % of the window")
    axes.set_ylim(top=100)
    _tokens_axis(axes)
    _legend(figure, axes)


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
    _thousands(axes.xaxis)


def matched(figure, report: Report) -> None:
    """The difference of matched rows at each validation, its seeds, and its 95 % interval."""
    pairs = (report.comparison or {}).get("pairs", [])
    if not pairs:
        note(figure, "No matched runs: nothing compared")
        return
    for index, (axes, pair) in enumerate(
        zip(figure.subplots(1, len(pairs), squeeze=False)[0], pairs, strict=True)
    ):
        _difference(axes, pair, style(index)["color"])
        verdict = textwrap.fill(f"{pair['verdict']} (n = {pair['n']})", 80 // len(pairs))
        axes.set_title(f"{pair['a']} - {pair['b']}", pad=10 + 12 * len(verdict.splitlines()))
        axes.text(0, 1.03, verdict, transform=axes.transAxes, fontsize=9)
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
    _curves(spread, report, "train", "router/cv", by_step=True)
    _curves(entropy, report, "train", "router/entropy", by_step=True)
    experts = len(_last_load(runs[0])[0])
    entropy.axhline(math.log(experts), color=LIGHT["ink"], linewidth=1, linestyle=":")
    spread.set(title="Spread of load (CV)", xlabel="step", ylabel="std / mean", ylim=(0, None))
    entropy.set(title=f"Router entropy (dotted: ln {experts})", xlabel="step", ylabel="nats")
    _load_maps(bottom, runs)


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


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean over seeds at the points that all of them have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {x: sum(curve[x] for curve in curves) / len(curves) for x in common}


def _curves(axes, report: Report, kind: str, key: str, by_step=False, scale=1.0) -> None:
    for index, row in enumerate(report.rows):
        runs = of_row(report.runs, row.name)
        curves = [run.metrics.series(kind, key) for run in runs]
        curves = [{x: y * scale for x, y in curve.items()} for curve in curves if curve]
        if not curves:
            continue
        tokens = {} if by_step else runs[0].metrics.series(kind, "real_tokens")
        place = lambda steps, tokens=tokens: [tokens.get(step, step) for step in steps]
        for curve in curves if len(curves) > 1 else []:
            axes.plot(place(curve), curve.values(), alpha=0.45, linewidth=0.7, **style(index))
        mean = mean_curve(curves)
        axes.plot(place(mean), mean.values(), linewidth=1.8, label=row.label, **style(index))


def _difference(axes, pair: dict[str, Any], color: str) -> None:
    curve = pair["curve"]
    steps = [point["step"] for point in curve]
    for seed in pair["differences"]:
        values = [point["differences"][seed] for point in curve]
        axes.plot(steps, values, color=color, alpha=0.55, linewidth=0.9)
    axes.plot(steps, [point["mean"] for point in curve], color=color, linewidth=2)
    axes.axhline(0, color=LIGHT["ink"], linewidth=1, zorder=1)
    values = [value for point in curve for value in point["differences"].values()]
    _zoom(axes, [*values, 0.0])
    if pair["interval"]:
        low, high = zip(*(point["interval"] for point in curve), strict=True)
        # Two seeds give bands far wider than the curves: the frame follows the curves.
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)


def _load_maps(figure, runs: list[Run]) -> None:
    """The load of each expert in each sparse layer at each run's last step; 1 is its even share."""
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    loads = [[[e * len(x) / sum(x) for e in x] for x in _last_load(run)] for run in runs]
    top = max(2.0, *(load for run in loads for layer in run for load in layer))
    for axes, run, load in zip(panels, runs, loads, strict=True):
        # pcolormesh, not imshow: an image would be embedded as a raster.
        mesh = axes.pcolormesh(load, cmap="cividis", vmin=0, vmax=top)
        # More steps than this, and matplotlib writes the colour bar as a raster as well.
        mesh.set_cmap(mesh.get_cmap().resampled(24))
        axes.set(title=f"Load, {run.summary.run}", xlabel="expert")
        axes.set_xticks([i + 0.5 for i in range(len(load[0]))], range(len(load[0])))
        axes.set_yticks([i + 0.5 for i in range(len(load))], range(len(load)))
        axes.grid(visible=False)
        axes.invert_yaxis()
    panels[0].set_ylabel("sparse layer")
    figure.colorbar(mesh, ax=list(panels), label="load (1: even)")


def _last_load(run: Run) -> list[list[float]]:
    loads = run.metrics.series("train", "router/load")
    return loads[max(loads)]


def _values(report: Report, kind: str, key: str, start: float = 0.0) -> list[float]:
    """The values of all runs from the share `start` of their steps on."""
    curves = [run.metrics.series(kind, key) for run in report.runs]
    return [y for curve in curves for x, y in curve.items() if x >= start * max(curve)]


def _zoom(axes, values: Iterable[float]) -> None:
    """Limits that hold the finite values with a margin, whatever else is drawn."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        margin = 0.08 * (max(finite) - min(finite)) or 0.01
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def _tokens_axis(*panels) -> None:
    for axes in panels:
        axes.set_xlabel("real tokens trained on")
        axes.set_xlim(left=0)
        _thousands(axes.xaxis)


def _thousands(axis) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(EngFormatter(sep=""))


def _legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
