"""What the figures are made of: curves, differences and maps on one matplotlib axes."""

import math
from collections.abc import Iterable
from typing import Any

from sparkgpt.report.records import Run, of_row
from sparkgpt.report.render import Report
from sparkgpt.report.theme import LIGHT, style


def mean_curve(curves: list[dict[int, float]]) -> dict[int, float]:
    """The mean over seeds at the points that all of them have."""
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {x: sum(curve[x] for curve in curves) / len(curves) for x in common}


def draw_curves(axes, report: Report, kind: str, key: str, by_step=False, scale=1.0) -> None:
    """One colour a row: the mean over its seeds, and the seeds thin."""
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


def draw_difference(axes, pair: dict[str, Any], color: str) -> None:
    """The differences of a pair at each validation: each seed, their mean, and its interval."""
    curve = pair["curve"]
    steps = [point["step"] for point in curve]
    for seed in pair["differences"]:
        values = [point["differences"][seed] for point in curve]
        axes.plot(steps, values, color=color, alpha=0.55, linewidth=0.9)
    axes.plot(steps, [point["mean"] for point in curve], "o-", color=color,
              linewidth=2, markersize=3.5)  # fmt: skip
    axes.axhline(0, color=LIGHT["ink"], linewidth=1, zorder=1)
    values = [value for point in curve for value in point["differences"].values()]
    zoom(axes, [*values, 0.0])
    if pair["interval"]:
        low, high = zip(*(point["interval"] for point in curve), strict=True)
        # Two seeds give bands far wider than the curves: the frame follows the curves.
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)


def draw_load_maps(figure, runs: list[Run]) -> None:
    """The load of each expert in each sparse layer at each run's last step; 1 is its even share."""
    panels = figure.subplots(1, len(runs), squeeze=False)[0]
    loads = [[[e * len(x) / sum(x) for e in x] for x in last_load(run)] for run in runs]
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


def last_load(run: Run) -> list[list[float]]:
    loads = run.metrics.series("train", "router/load")
    return loads[max(loads)]


def values_of(report: Report, kind: str, key: str, start: float = 0.0) -> list[float]:
    """The values of all runs from the share `start` of their steps on."""
    curves = [run.metrics.series(kind, key) for run in report.runs]
    return [y for curve in curves for x, y in curve.items() if x >= start * max(curve)]


def bins(values: list[float], most: int = 20) -> list[float]:
    """Edges of equal bins from the least value to 100 %, on round numbers."""
    low = min(values, default=99.0)
    width = next(
        w for w in (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10) if (100 - low) / w <= most or w == 10
    )
    first = math.floor(low / width - 1e-9)
    return [width * edge for edge in range(first, round(100 / width) + 1)]


def zoom(axes, values: Iterable[float]) -> None:
    """Limits that hold the finite values with a margin, whatever else is drawn."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        margin = 0.08 * (max(finite) - min(finite)) or 0.01
        axes.set_ylim(min(finite) - margin, max(finite) + margin)


def tokens_axis(*panels) -> None:
    for axes in panels:
        axes.set_xlabel("real tokens trained on")
        axes.set_xlim(left=0)
        thousands(axes.xaxis)


def thousands(axis) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(6))
    axis.set_major_formatter(EngFormatter(sep=""))


def draw_legend(figure, axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
