"""The figure of a `sparkgpt bench` record: what grows with a corpus, and what does not."""

from sparkgpt.errors import UserError
from sparkgpt.report.theme import style

MEMORY = {
    "cache_peak_rss_bytes": "caching",
    "stream_peak_rss_bytes": "opening, planning, reading, hashing",
}
SECONDS = {
    "verify_seconds": "hashing, beside training",
    "rejoin_seconds": "planning, first window",
    "open_seconds": "opening",
}


def data_size(figure, record: dict) -> None:
    """Peak memory and seconds of a start over GB of text, on logarithmic axes.

    UserError when the record has fewer than two sizes.
    """
    series = record.get("data", {}).get("series", [])
    if len(series) < 2:
        raise UserError(
            "the record has fewer than two sizes of data, so there is no curve; make one with "
            "`sparkgpt bench --only data --sizes 0.1,1,10 --out FILE`"
        )
    sizes = [entry["gb"] for entry in series]
    memory, seconds = figure.subplots(1, 2)
    text = [entry["bytes"] * 1e-6 for entry in series]
    memory.plot(sizes, text, color="0.5", linestyle=":", label="the text itself")
    for axes, names, scale in ((memory, MEMORY, 1e-6), (seconds, SECONDS, 1)):
        for index, (name, label) in enumerate(names.items()):
            values = [entry[name] * scale for entry in series]
            axes.plot(sizes, values, marker="o", markersize=4, label=label, **style(index))
        axes.set(xscale="log", yscale="log", xlabel="GB of text")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.legend(fontsize=8)
    memory.set(title="Peak memory of the process", ylabel="MB")
    seconds.set(title="A start", ylabel="seconds")
