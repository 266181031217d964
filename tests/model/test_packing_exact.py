"""A packed window is the same as its documents one at a time: logits, losses and gradients."""

import pytest
import torch
from helpers.models import DOCUMENTS, pack, randomised, small

from sparkgpt.autotune import CANDIDATES
from sparkgpt.data.stream import empty_window
from sparkgpt.loss import cross_entropy_sum
from sparkgpt.ops import attention
from sparkgpt.ops.attention import varlen_attention
from sparkgpt.train.step import window_loss


def gradients(model, batches):
    """Gradients of the summed loss over batches, each its own forward and backward."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        tokens_T, targets_T, positions_T, cu_seqlens_S = pack(batch)
        logits_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
        cross_entropy_sum(logits_TV, targets_T).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_gradients_equal_those_of_documents_one_at_a_time(variant):
    model = randomised(variant, dtype=torch.float64)
    packed = gradients(model, [DOCUMENTS])
    alone = gradients(model, [[document] for document in DOCUMENTS])
    for name, gradient in packed.items():
        # The router's softmax and RMSNorm compute in fp32 by definition, hence not 1e-12.
        assert torch.allclose(gradient, alone[name], rtol=1e-5, atol=1e-6), name
        assert gradient.abs().max() > 0, name


def test_a_document_does_not_see_its_neighbours(variant):
    model = randomised(variant)
    first, second = b"the first document", b"a second one"
    tokens_T, _, positions_T, cu_seqlens_S = pack([first, second])
    one_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
    tokens_T, _, positions_T, cu_seqlens_S = pack([b"THE FIRST DOCUMENT", second])
    other_TV, _ = model(tokens_T, positions_T, cu_seqlens_S)
    start = len(first) + 1
    assert torch.allclose(one_TV[start:], other_TV[start:], atol=1e-5)
    assert not torch.allclose(one_TV[:start], other_TV[:start], atol=1e-2)


def test_an_all_filler_window_adds_nothing_and_stays_finite(variant):
    model = randomised(variant)
    nats, router = window_loss(model, empty_window(300))
    nats.backward()
    assert nats.item() == 0
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model.parameters())
    if router is not None:
        assert router.counts_LE.sum() == 0 and router.prob_sums_LE.sum() == 0


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("backend", (*CANDIDATES["cpu"], "triton"))
def test_attention_equals_a_dense_mask_in_fp64(backend, heads):
    torch.manual_seed(0)
    (n, k), lengths, h = heads, [63, 1, 130, 7], 16
    t = sum(lengths)
    q, kk, v = (torch.randn(t, x, h, dtype=torch.float64, requires_grad=True) for x in (n, k, k))
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    out = varlen_attention(q, kk, v, cu, max(lengths), backend)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(t)
    allowed = (document[:, None] == document) & (position[:, None] >= position)
    scores = torch.einsum("tnh,snh->nts", q, kk.repeat_interleave(n // k, 1)) * h**-0.5
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("nts,snh->tnh", weights, v.repeat_interleave(n // k, 1))
    assert torch.allclose(out, expected, atol=1e-12)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (q, kk, v), grad)
    wanted = torch.autograd.grad(expected, (q, kk, v), grad)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_no_segment_is_longer_than_the_bound_that_kernels_get(monkeypatch):
    """Filler comes in segments too, and may be longer than the model's own limit."""
    seen = []

    def spy(q_TNH, k_TKH, v_TKH, cu_seqlens_S, max_seqlen):
        seen.append((int(cu_seqlens_S.diff().max()), max_seqlen))
        return q_TNH

    monkeypatch.setitem(attention.BACKENDS, "sdpa-expanded", spy)
    model = randomised(small(max_position_embeddings=64))
    window_loss(model, empty_window(700))
    assert seen and all(longest <= bound for longest, bound in seen)
