"""What a start of the pipeline leaves to look at: the page, Snakemake's report, the summary."""

import re

import pytest
from helpers.browser import look

RECORDS = "results/tiny"
PLOTS = {"loss", "matched", "throughput", "lr", "router", "utilization"}
SEE = """
const shown = Object.entries(results).map(async ([path, result]) => {
  if (result.mime_type.startsWith("image/")) {
    const image = new Image();
    image.src = result.data_uri;
    await image.decode();
    return [path, result.caption.length, image.naturalWidth];
  }
  const text = await (await fetch(result.data_uri)).text();
  const page = new DOMParser().parseFromString(text, "text/html");
  return [path, result.caption.length, page.querySelectorAll("table").length];
});
await new Promise(done => setTimeout(done, 200));
return {results: await Promise.all(shown), categories, text: document.body.innerText};
"""


@pytest.fixture(scope="module")
def report(built):
    """The HTML of `snakemake --report`."""
    code, output = built.snakemake("--cores", "2", "--report", f"{RECORDS}/report.html")
    assert code == 0, output
    return built.root / RECORDS / "report.html"


def test_a_browser_shows_each_figure_and_table_with_its_caption(report, tmp_path):
    seen = look(report, tmp_path, SEE)
    found = {path: (caption, size) for path, caption, size in seen["results"]}
    figures = {f"{RECORDS}/plots/{plot}.svg" for plot in PLOTS}
    assert set(found) == figures | {f"{RECORDS}/index.html"}
    assert all(caption > 60 for caption, _ in found.values())
    assert all(found[path][1] > 100 for path in figures)
    assert found[f"{RECORDS}/index.html"][1] == 5  # tables of the overview
    assert set(seen["categories"]) == {"Overview", "Figures"}
    assert {"Overview", "Figures"} <= set(seen["text"].split())


def test_the_report_needs_no_network(report):
    text = report.read_text()
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']https?:", text)
    assert "prefers-color-scheme: dark" in text


def test_the_picture_shows_the_rules_that_there_are(built):
    drawn = (built.root / RECORDS / "rulegraph.svg").read_text()
    names = set(re.findall(r"<text[^>]*>(\w+)</text>", drawn))
    assert names == {name for name in built.first_jobs}


def test_a_start_ends_with_what_it_did(built):
    (built.root / RECORDS / "plots" / "lr.svg").unlink()
    code, output = built.snakemake("--cores", "2")
    assert code == 0, output
    assert re.search(r"\| plot \| 1 \| 5 \|", output) and re.search(r"\| train \|  \| 2 \|", output)
    assert f"page: {RECORDS}/index.html" in output


def test_a_start_that_fails_says_what_failed(built):
    caption = built.root / "workflow" / "report" / "lr.rst"
    text = caption.read_bytes()
    caption.write_bytes(b"\xff")
    code, output = built.snakemake("--cores", "2")
    caption.write_bytes(text)
    assert code != 0
    assert f"failed: page, which makes {RECORDS}/index.html" in output
    built.run()
