"""The picture of the rules: what it keeps of the graph, and where it puts it."""

import io
import xml.etree.ElementTree as ElementTree

import pytest

from sparkgpt.errors import UserError
from sparkgpt.report import graph

SVG = "{http://www.w3.org/2000/svg}"
DOT = """digraph snakemake_dag {
    graph[bgcolor=white, margin=0];
\t0[label = "all", color = "0.00 0.6 0.85", style="rounded"];
\t1[label = "fetch", color = "0.1 0.6 0.85", style="rounded"];
\t2[label = "cache", color = "0.1 0.6 0.85", style="rounded"];
\t3[label = "train", color = "0.1 0.6 0.85", style="rounded"];
\t4[label = "plot", color = "0.1 0.6 0.85", style="rounded"];
\t5[label = "coordinates", color = "0.1 0.6 0.85", style="rounded"];
\t1 -> 2
\t2 -> 3
\t1 -> 3
\t3 -> 4
\t1 -> 4
\t5 -> 4
\t4 -> 0
\t3 -> 0
}"""


def test_targets_go_and_implied_arrows_go():
    needs = graph.read_dot(DOT)
    assert needs["train"] == {"cache", "fetch"} and "all" not in needs
    assert graph.reduced(needs) == {
        "fetch": set(), "coordinates": set(), "cache": {"fetch"}, "train": {"cache"},
        "plot": {"train", "coordinates"},
    }  # fmt: skip


def test_layers_follow_the_longest_way_and_sources_stand_beside_their_users():
    depth = graph.layers(graph.reduced(graph.read_dot(DOT)))
    assert depth == {"fetch": 0, "cache": 1, "train": 2, "coordinates": 2, "plot": 3}


def test_the_picture_has_every_box_and_arrow_and_repeats(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(DOT))
    graph.main(["--out", str(tmp_path / "a.svg")])
    lines = DOT.splitlines()
    shuffled = "\n".join([*lines[:8], *lines[8:-1][::-1], "}"])
    assert (tmp_path / "a.svg").read_text() == graph.draw(graph.read_dot(shuffled))
    root = ElementTree.fromstring((tmp_path / "a.svg").read_bytes())
    assert sorted(text.text for text in root.iter(f"{SVG}text")) == sorted(graph.read_dot(DOT))
    assert len([p for p in root.iter(f"{SVG}path") if p.get("class") == "way"]) == 4
    boxes = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "box"]
    places = {(float(box.get("x")), float(box.get("y"))) for box in boxes}
    assert len(places) == 5
    for x, y in places:
        assert 0 <= x <= float(root.get("width")) - graph.WIDTH
        assert 0 <= y <= float(root.get("height")) - graph.HEIGHT


def test_a_long_arrow_bends_around_the_boxes_between():
    needs = {"a": set(), "b": {"a"}, "c": {"b"}, "d": {"c", "x"}, "x": {"a"}}
    text = graph.draw(needs)
    (way,) = [line for line in text.splitlines() if line.count("H") == 1 and "way" in line]
    assert way.count("C") == 2


@pytest.mark.parametrize("text", ["", "digraph {}", "Building DAG of jobs..."])
def test_what_is_no_graph_is_refused(text):
    with pytest.raises(UserError, match="no rule graph"):
        graph.read_dot(text)


def test_a_cycle_is_refused():
    with pytest.raises(UserError, match="cycle"):
        graph.layers({"a": {"b"}, "b": {"a"}})
