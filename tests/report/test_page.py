"""The page of a records folder: whole, alone, and as a browser shows it in light and dark."""

import re

import pytest
from helpers.browser import DARK, LIGHT, look

from sparkgpt.errors import UserError
from sparkgpt.fingerprint import ROOT
from sparkgpt.report import compare, graph, page, plots
from sparkgpt.report.theme import DARK as DARK_COLOURS
from sparkgpt.report.theme import LIGHT as LIGHT_COLOURS

CAPTIONS = str(ROOT / "workflow" / "report")
DOT = 'digraph d {\n0[label = "train"];\n1[label = "plot"];\n0 -> 1\n}'
SEE = """
const images = [...document.images];
await Promise.all(images.map(image => image.decode()));
const colour = name => getComputedStyle(document.body)[name];
return {
  figures: images.map(image => [image.alt, image.naturalWidth]),
  captions: [...document.querySelectorAll("figcaption")].map(c => c.innerText.length),
  tables: [...document.querySelectorAll("table")].map(table => table.rows.length),
  headings: [...document.querySelectorAll("h2")].map(heading => heading.innerText),
  broken: [...document.querySelectorAll("nav a")].filter(a => !document.querySelector(a.hash)),
  links: [...document.querySelectorAll("td a")].map(a => a.getAttribute("href")),
  wide: document.documentElement.scrollWidth > innerWidth,
  colours: [colour("backgroundColor"), colour("color")],
  outside: performance.getEntriesByType("resource").filter(x => !x.name.startsWith("data:")).length,
};
"""


@pytest.fixture
def made(records, rows, tmp_path):
    """A records folder with its page; the page."""
    compare.main(["--records", str(records), "--pair", "dense:adamw"]
                 + ["--out", str(records / "compare.json")])  # fmt: skip
    plots.main(["--records", str(records), "--rows", str(rows), "--out", str(records / "plots")])
    (tmp_path / "rules.dot").write_text(DOT)
    graph.main(["--dot", "rules.dot", "--out", "rules.svg"])
    return write(records, rows)


def write(records, rows, *more):
    out = records / "index.html"
    flags = ["--records", str(records), "--rows", str(rows), "--captions", CAPTIONS]
    page.main([*flags, "--graph", "rules.svg", "--out", str(out), *more])
    return out


def rgb(colour):
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


@pytest.mark.parametrize("scheme, colours", [(LIGHT, LIGHT_COLOURS), (DARK, DARK_COLOURS)])
def test_a_browser_shows_every_figure_and_table(made, tmp_path, scheme, colours):
    seen = look(made, tmp_path, SEE, scheme)
    figures = dict(seen["figures"])
    assert set(figures) == {
        "Matched runs", "Loss", "Learning rates", "Throughput", "Packing utilisation",
        "Router load", "Coordinate check", "Rules of the pipeline",
    }  # fmt: skip
    assert all(width > 100 for width in figures.values())
    assert len(seen["captions"]) == len(figures) and min(seen["captions"]) > 60
    # Header and rows of: models, matched runs, exports, records, environment.
    assert seen["tables"][:4] == [5, 2, 13, 7] and seen["tables"][4] > 8
    assert seen["headings"][:3] == ["Models", "Matched runs", "Loss"]
    assert not seen["broken"] and not seen["wide"] and seen["outside"] == 0
    assert seen["colours"] == [rgb(colours["background"]), rgb(colours["ink"])]
    for link in seen["links"]:
        assert (made.parent / link).exists(), link


def test_the_page_stands_alone_and_repeats(made, records, rows):
    first = made.read_bytes()
    assert write(records, rows).read_bytes() == first
    text = first.decode()
    assert "<script" not in text and "http" not in re.sub(r"base64,[\w+/=]+", "", text)


def test_figures_that_the_folder_lacks_are_left_out(made, records, rows):
    for name in ("router", "matched"):
        (records / "plots" / f"{name}.svg").unlink()
    (records / "compare.json").unlink()
    text = write(records, rows).read_text()
    assert "Router load" not in text and "Matched runs" not in text and "Throughput" in text


def test_mistakes(records, rows, tmp_path, made):
    with pytest.raises(UserError, match="cannot read .*matched.rst"):
        write(records, rows, "--captions", str(tmp_path))
    with pytest.raises(UserError, match="holds no runs"):
        write(tmp_path / "nothing", rows)


def test_labels_are_text(made, records, rows):
    rows.write_text(rows.read_text().replace("dense, Muon", "<b>x</b> & co"))
    assert "&lt;b&gt;x&lt;/b&gt; &amp; co" in write(records, rows).read_text()
