"""Fault 15: a compiled step serves windows of any number of documents, without compiling again."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.models import randomised, small
from torch._dynamo.backends.debugging import aot_eager

from sparkgpt.config import TrainConfig
from sparkgpt.data.stream import _lay_out
from sparkgpt.distributed import Ranks
from sparkgpt.model import moe
from sparkgpt.ops import attention, experts
from sparkgpt.train.build import build_loss
from sparkgpt.train.step import window_loss

KINDS = {
    "dense": small(model_layers=1),
    "moe": small(model_layers=1, num_experts=4, moe_intermediate_size=32),
}
COUNTS = (3, 2, 1, 5, 9, 12, 0, 4)  # documents in each window


def window(count):
    """256 positions with `count` documents of different lengths."""
    documents = [np.arange(1 + 3 * i % 7, dtype=np.uint8) for i in range(count)]
    return _lay_out(documents, range(count), 256)


@torch.library.custom_op("faults::varlen", mutates_args=())
def varlen(q: torch.Tensor, k: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
    """What a kernel for packed documents is to the compiler: one operation, whose `ends` have any
    length and whose `longest` is a constant."""
    return q + k.repeat_interleave(q.shape[1] // k.shape[1], 1) / len(ends)


@varlen.register_fake
def _(q, k, ends, longest):
    assert type(longest) is int, "a kernel would be built for each value"
    return torch.empty_like(q)


varlen.register_autograd(lambda ctx, grad: (grad.clone(), None, None, None))


@pytest.fixture(autouse=True)
def own_tables(monkeypatch):
    """Copies of the tables of functions, as a compiled loss on a CPU changes them."""
    monkeypatch.setattr(attention, "BACKENDS", dict(attention.BACKENDS))
    monkeypatch.setattr(experts, "CPU_LOOPS", dict(experts.CPU_LOOPS))


def like_a_gpu(monkeypatch):
    """The operations that the model calls on CUDA, where no length is read back to the host."""
    monkeypatch.setitem(
        attention.BACKENDS,
        "sdpa-expanded",
        lambda q, k, v, ends, longest: torch.ops.faults.varlen(q, k, ends, longest),
    )
    monkeypatch.setattr(
        moe, "grouped_linear", lambda x, w, ends: F.grouped_mm(x, w.transpose(1, 2), offs=ends)
    )


def graphs_after_each(config, monkeypatch, device, dtype):
    """How many graphs were compiled after each window of COUNTS; losses equal the eager ones."""
    graphs, after = [], []

    def backend(graph, examples):
        graphs.append(graph)
        return aot_eager(graph, examples)

    torch._dynamo.reset()
    true = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **named: true(f, **(named | {"backend": backend}))
    )
    compiled = build_loss(TrainConfig(compile=True), Ranks(0, 1, torch.device(device)))
    model = randomised(config, dtype=dtype).float()  # the weights; it computes in `dtype`
    for count in COUNTS:
        nats, router = compiled(model, window(count))
        (nats if router is None else nats + router.prob_sums_LE.sum()).backward()
        after.append(len(graphs))
        assert nats.item() == pytest.approx(window_loss(model, window(count))[0].item(), rel=1e-5)
    torch._dynamo.reset()
    return after


@pytest.mark.parametrize("kind", KINDS)
def test_fault_15_one_graph_serves_all_windows_on_a_gpu(kind, monkeypatch):
    like_a_gpu(monkeypatch)
    after = graphs_after_each(KINDS[kind], monkeypatch, "cuda", torch.bfloat16)
    # The first for the length that it sees, the second for any length.
    assert after == [1] + [2] * (len(COUNTS) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_15_nothing_is_compiled_after_the_second_window_on_a_cpu(kind, monkeypatch):
    after = graphs_after_each(KINDS[kind], monkeypatch, "cpu", torch.float32)
    assert after[1:] == [after[1]] * (len(COUNTS) - 1)
