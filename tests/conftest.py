"""What every test shares."""

import os

import pytest
from helpers.models import VARIANTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may reach for a hub


# Of minutes each. With two processes, no two that need the same finished pipeline start together.
SLOW = (
    "test_staleness", "test_ranks", "test_explained", "test_compiled", "test_resume",
    "test_interrupted", "test_revisions", "test_hosts", "test_export_check", "test_disk",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """The slowest files first, so that short ones fill up the end of every process alike."""
    rank = {name: index for index, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(SLOW)))


@pytest.fixture(params=VARIANTS)
def variant(request):
    """Each kind of model, as a ModelConfig."""
    return VARIANTS[request.param]
