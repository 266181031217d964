"""With SPARKGPT_TEST_DEVICE=cuda, the tests of the kernels make their tensors on the GPU."""

import pytest
import torch
from helpers.interpreted import device


@pytest.fixture(autouse=True)
def tensors_on_the_device(monkeypatch):
    """torch's factories and generators take the device by themselves, so that the tests need not
    name one. What only makes sense on a CPU has the mark `cpu`, with the reason."""
    if device() == "cpu":
        yield
        return
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda place=None: generator(place or device()))
    with torch.device(device()):
        yield


def pytest_collection_modifyitems(items):
    if device() == "cpu":
        return
    for item in items:
        if mark := item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
