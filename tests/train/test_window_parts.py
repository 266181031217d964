"""A window computed part by part on a CPU: which parts, what they add up to, their bits."""

import platform
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from faults.fault_tools import gradients_of_step
from helpers.models import VARIANTS, randomised, small
from helpers.runs import MOE, flags, weights
from helpers.switched import laid_out
from hypothesis import example, given
from hypothesis import strategies as st

from sparkgpt.data.stream import empty_window
from sparkgpt.model.cost import step_flops
from sparkgpt.train.__main__ import main as train
from sparkgpt.train.parts import UNEVEN, deal, loss_in_parts
from sparkgpt.train.step import window_loss

pytestmark = pytest.mark.cpu


@pytest.fixture
def threads():
    """Sets torch's number of threads, as often as a test likes; put back afterwards."""
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


def window(lengths):
    """Documents that fill so many positions each, and filler up to a multiple of 64."""
    documents = [np.arange(length - 1, dtype=np.uint8) for length in lengths]
    return laid_out(documents, -(-sum(lengths) // 64) * 64)


def segments_of(window):
    """(tokens, targets, positions) of each segment."""
    fields = (window.tokens_T, window.targets_T, window.positions_T)
    lengths = window.cu_seqlens_S.diff().tolist()
    return list(zip(*([tuple(x.tolist()) for x in f.split(lengths)] for f in fields), strict=True))


def values(model, window, loss):
    """Nats, what the routers counted, and all gradients, of a loss with a router's part."""
    model.zero_grad()
    nats, router = loss(model, window)
    total = nats if router is None else nats + (router.prob_sums_LE * router.counts_LE).sum()
    total.backward()
    figures = [nats.detach(), *(field.detach() for field in router or ())]
    return figures + [p.grad.clone() for p in model.parameters()]


@example([64, 64], 2)
@example([64, 64, 32, 32], 2)
@example([100, 60, 60, 20, 8, 8], 4)
@example([256] * 8, 8)
@given(st.lists(st.integers(1, 256), min_size=1, max_size=12), st.integers(1, 8))
def test_each_segment_is_in_one_part_and_parts_cost_alike(lengths, count):
    whole = window(lengths)
    config = small()
    parts = deal(whole, config, count)
    assert len(parts) == 1 or count % len(parts) == 0
    if len(parts) == 1:
        assert parts[0] is whole
    found = [segment for part in parts for segment in segments_of(part)]
    assert Counter(found) == Counter(segments_of(whole))
    assert sorted(i for part in parts for i in part.doc_ids) == sorted(whole.doc_ids)
    costs = [step_flops(config, part.cu_seqlens_S.diff().tolist()) for part in parts]
    assert max(costs) * len(parts) <= UNEVEN * sum(costs) * (1 + 1e-9)
    for part in parts:
        assert part.real_tokens == sum(part.doc_lengths) == (part.targets_T >= 0).sum()
        assert part.cu_seqlens_S.dtype == torch.int32 and part.cu_seqlens_S[0] == 0


def test_four_threads_take_two_parts_where_four_would_be_uneven():
    parts = deal(window([200, 100, 100]), small(), 4)
    assert [part.doc_lengths for part in parts] == [[200], [100, 100]]
    assert len(deal(window([250, 3, 3]), small(), 4)) == 1


def test_parts_add_up_to_the_window(variant, threads):
    model, whole = randomised(variant, dtype=torch.float64), window([170, 85, 170, 85])
    threads(1)
    expected = values(model, whole, window_loss)
    assert all(map(torch.equal, expected, values(model, whole, loss_in_parts)))  # one thread
    for count in (2, 3, 4):
        threads(count)
        assert len(deal(whole, variant, count)) == {2: 2, 3: 3, 4: 2}[count]
        found = values(model, whole, loss_in_parts)
        assert torch.get_num_threads() == count
        for one, other in zip(found, expected, strict=True):
            # RMSNorm and the router compute in float32 by definition, hence not 1e-12.
            assert (one - other).norm() <= 1e-5 * other.norm()
        assert all(map(torch.equal, found, values(model, whole, loss_in_parts)))


def test_windows_of_filler_alone_are_dealt_out(threads):
    threads(2)
    whole = empty_window(2048)  # segments that all cost the same
    assert [len(part.cu_seqlens_S) - 1 for part in deal(whole, small(), 2)] == [4, 4]
    assert loss_in_parts(randomised(small()), whole)[0] == 0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_several_windows_of_a_step_add_up(kind, threads):
    windows = [window([170, 85, 170, 85]), window([90, 90, 60]), window([40])]
    total = sum(one.real_tokens for one in windows)
    model = randomised(VARIANTS[kind], dtype=torch.float64)
    threads(1)
    loss, expected = gradients_of_step(model, windows, total)
    threads(2)
    found_loss, found = gradients_of_step(model, windows, total, loss_of=loss_in_parts)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_a_run_on_two_threads_extends_its_prefix_exactly(tmp_path):
    arguments = flags(tmp_path, "whole-s0", *MOE, "--threads", "2")
    assert train(arguments) == 0
    again = flags(tmp_path, "prefix-s0", *MOE, "--threads", "2")
    assert train([*again, "--max-train-steps", "13"]) == 0
    assert train([*again, "--resume"]) == 0
    runs = tmp_path / "runs"
    assert weights(runs / "prefix-s0") == weights(runs / "whole-s0")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps are told by glibc")
@pytest.mark.parametrize("shared", [True, False])
def test_threads_share_a_heap(shared):
    program = f"""
import ctypes, threading
from sparkgpt.train.__main__ import share_heap
if {shared}:
    share_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
both = threading.Barrier(3)
def allocate():
    both.wait()
    libc.malloc(ctypes.c_size_t(1000))
    both.wait()
threads = [threading.Thread(target=allocate) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""
    found = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert (found.count("<heap nr=") == 1) is shared


def test_without_gradients_the_window_stays_whole(threads):
    threads(2)
    model, whole = randomised(small()), window([200, 200])
    with torch.no_grad():
        assert torch.equal(loss_in_parts(model, whole)[0], window_loss(model, whole)[0])


def test_an_error_in_a_part_is_raised_and_threads_are_put_back(threads):
    threads(2)
    model, whole = randomised(small()), window([200, 200])
    whole.tokens_T[250] = 1000  # in the second part
    with pytest.raises(IndexError):
        loss_in_parts(model, whole)
    assert torch.get_num_threads() == 2
