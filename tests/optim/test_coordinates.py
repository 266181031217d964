"""Coordinate check: under muP, activations after a few steps don't grow or shrink with width."""

import pytest

from sparkgpt import coordinates
from sparkgpt.model import mup
from sparkgpt.optim import groups


def test_slope_of_a_power_law():
    assert coordinates.slope((1, 2, 4), [3, 6, 12]) == pytest.approx(1)
    assert coordinates.slope((1, 2, 4), [5, 5, 5]) == pytest.approx(0)


def test_activations_do_not_depend_on_width():
    slopes = coordinates.coordinate_check(0, widths=(64, 128, 256))["slopes"]
    assert len(slopes) == 9 and max(map(abs, slopes.values())) < 0.1, slopes


def test_without_mup_they_do(monkeypatch):
    for module in (mup, groups):
        monkeypatch.setattr(module, "width_ratio", lambda width, base: 1.0)
    slopes = coordinates.coordinate_check(0, widths=(64, 128, 256))["slopes"]
    assert max(map(abs, slopes.values())) > 0.1, slopes
