"""Plots: one SVG each, the same bytes from the same records, readable in light and dark."""

import shutil
import xml.etree.ElementTree as ElementTree

import pytest

from sparkgpt.errors import UserError
from sparkgpt.files import write_json
from sparkgpt.fingerprint import ROOT
from sparkgpt.report import compare, datasize, plots
from sparkgpt.report.figures import FIGURES
from sparkgpt.report.panels import mean_curve
from sparkgpt.report.theme import DARK, LIGHT, SERIES


def draw(records, out, *more):
    plots.main(["--records", str(records), "--out", str(out), *more])
    return {path.stem: path.read_bytes() for path in sorted(out.glob("*.svg"))}


def paths(svg):
    return svg.count(b"<path")


def test_every_plot_repeats_byte_for_byte(records, rows, tmp_path):
    compare.main(["--records", str(records), "--pair", "dense:adamw", "--pair", "dense:moe"]
                 + ["--out", str(records / "compare.json")])  # fmt: skip
    sizes = {"layers.0.attention.o": [0.5, 0.5, 0.6], "lm_head": [1.0, 1.1, 1.0]}
    check = {
        "widths": [64, 128, 256],
        "steps": 10,
        "sizes": sizes,
        "slopes": dict.fromkeys(sizes, 0.0),
    }
    write_json(records / "coordinates.json", {"schema": 1, "dense": check, "moe": check})
    first = draw(records, tmp_path / "a", "--rows", str(rows))
    assert first == draw(records, tmp_path / "b", "--rows", str(rows))
    assert set(first) == set(FIGURES)
    for svg in first.values():
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and paths(svg) > 50
        assert b"<image" not in svg and b"<dc:date>" not in svg
        assert b"prefers-color-scheme: dark" in svg


def test_only_one(records, tmp_path):
    assert set(draw(records, tmp_path / "a", "--only", "loss")) == {"loss"}
    with pytest.raises(SystemExit):
        draw(records, tmp_path / "a", "--only", "nothing")


def test_without_experts_and_pairs_the_pictures_say_so(records, tmp_path):
    with_experts = draw(records, tmp_path / "a", "--only", "router")["router"]
    shutil.rmtree(records / "runs" / "moe-s0")
    shutil.rmtree(records / "runs" / "moe-s1")
    svgs = draw(records, tmp_path / "b")
    assert len(svgs["router"]) < len(with_experts) / 2
    assert b"No run has experts" in svgs["router"]  # the text, in a comment beside its outline
    assert b"No matched runs" in svgs["matched"]


def test_without_records(tmp_path):
    for svg in draw(tmp_path, tmp_path / "out").values():
        assert b"Not measured" in svg


def bench_record(path, sizes):
    names = ("bytes", *datasize.MEMORY, *datasize.SECONDS)
    series = [{"gb": size} | {name: size * 1e9 for name in names} for size in sizes]
    write_json(path, {"data": {"series": series}})
    return str(path)


def test_size_of_data(tmp_path):
    record = bench_record(tmp_path / "bench.json", (0.1, 1, 10))
    drawn = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert plots.main(["--bench", record, "--out", str(folder)]) == 0
        drawn.append((folder / "data-size.svg").read_bytes())
    assert drawn[0] == drawn[1]
    longer = bench_record(tmp_path / "longer.json", (0.1, 1, 10, 100))
    plots.main(["--bench", longer, "--out", str(tmp_path)])
    assert paths((tmp_path / "data-size.svg").read_bytes()) > paths(drawn[0])


def test_the_published_picture_is_that_of_its_record(tmp_path):
    folder = ROOT / "results" / "bench"
    plots.main(["--bench", str(folder / "cpu.json"), "--out", str(tmp_path)])
    drawn = (tmp_path / "data-size.svg").read_bytes()
    assert drawn == (folder / "data-size.svg").read_bytes()


def test_one_size_of_data_is_no_curve(tmp_path):
    record = bench_record(tmp_path / "bench.json", (0.1,))
    with pytest.raises(UserError, match="fewer than two sizes"):
        plots.main(["--bench", record, "--out", str(tmp_path)])


def test_mean_over_the_points_that_all_seeds_have():
    assert mean_curve([{1: 2.0, 2: 4.0}, {2: 6.0, 3: 8.0}]) == {2: 5.0}


@pytest.mark.parametrize("color", SERIES)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_contrast_of_the_rows(color, theme):
    assert contrast(color, theme["background"]) >= 3


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_contrast_of_the_text(theme):
    assert contrast(theme["ink"], theme["background"]) >= 7


def contrast(a, b):
    """The contrast ratio of WCAG 2.1 between two sRGB colours."""
    bright, dim = sorted((luminance(a), luminance(b)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
