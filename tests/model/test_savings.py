"""The table of bytes in the documents is the one that the formulas give."""

import pytest

from sparkgpt.doctor.savings import SHAPES, render, savings
from sparkgpt.fingerprint import ROOT
from sparkgpt.model.bytes import FUSIONS


@pytest.mark.parametrize("document", ["README.md", "docs/kernels.md"])
def test_documents_show_the_rendered_table(document):
    text = (ROOT / document).read_text()
    block = text.split("<!-- bytes:begin -->\n")[1].split("\n<!-- bytes:end -->")[0]
    assert block == render(), "replace it by what `python -m sparkgpt.doctor.savings` prints"


@pytest.mark.parametrize("shape", SHAPES)
def test_savings_add_up(shape):
    found = savings(SHAPES[shape])
    taken = sum(found[fusion] for fusion in FUSIONS)
    assert found["compiled"] - taken == pytest.approx(found["kernels"])
    assert all(found[fusion] >= 0 for fusion in FUSIONS)
