"""What every test shares."""

import os

import pytest
from helpers.models import VARIANTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub


@pytest.fixture(params=VARIANTS)
def variant(request):
    """Each kind of model, as a ModelConfig."""
    return VARIANTS[request.param]
