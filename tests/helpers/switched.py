"""Models with and without fused operations, and what is compiled for them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.interpreted import device
from helpers.models import DOCUMENTS, randomised
from torch._dynamo.testing import CompileCounterWithBackend

from sparkgpt.config import ModelConfig
from sparkgpt.data.stream import _lay_out
from sparkgpt.model import Transformer, moe
from sparkgpt.ops import attention
from sparkgpt.ops.choices import Kernels
from sparkgpt.train.step import window_loss

# tests/gpu/run compares the modules on a GPU, with float64.
of_formulas = pytest.mark.cpu("models in float32: torch's grouped product on CUDA takes bfloat16")


def poison(monkeypatch) -> None:
    """From here on `torch.empty` and `empty_like` give NaN, so that what a kernel leaves unwritten
    shows."""

    def poisoned(make):
        def full(*args, **named):
            out = make(*args, **named)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return full

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def plain_and_switched(
    config: ModelConfig, backend: str = "sdpa-expanded", **switches: bool
) -> tuple[Transformer, Transformer]:
    """Two models of equal random weights, the second with these fused operations and attention."""
    plain = randomised(config)
    switched = Transformer(config, attention_backend=backend, kernels=Kernels(**switches))
    switched.load_state_dict(plain.state_dict())
    return plain, switched


def window(count: int, positions: int = 128):
    """`count` documents of different lengths, then filler."""
    return laid_out([np.arange(1 + 5 * i % 11, dtype=np.uint8) for i in range(count)], positions)


def laid_out(documents: list[np.ndarray], positions: int):
    """A window of documents, then filler, on the device under test."""
    return _lay_out(documents, range(len(documents)), positions).to(torch.device(device()))


def values_and_gradients(model: Transformer, window) -> dict[str, torch.Tensor]:
    """Logits, nats and gradients of one window, the routers' part included."""
    nats, router = window_loss(model, window)
    loss = nats if router is None else nats + (router.prob_sums_LE * router.counts_LE).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss / 50, parameters)
    with torch.no_grad():
        logits_TV, _ = model(window.tokens_T, window.positions_T, window.cu_seqlens_S)
    found = {"logits": logits_TV, "nats": nats.detach()}
    return found | dict(zip(names, gradients, strict=True))


def assert_equal_models(plain: Transformer, switched: Transformer) -> None:
    """Equal values and gradients in float32, up to the order of additions.

    Bounds are shares of the largest value: 2e-6 on short documents; 1e-5 on those that every model
    is tested on, where the plain model itself is 2e-6 from float64.
    """
    documents = [np.frombuffer(document, np.uint8) for document in DOCUMENTS]
    for one, bound in ((window(6), 2e-6), (laid_out(documents, 512), 1e-5)):
        expected = values_and_gradients(plain, one)
        for name, found in values_and_gradients(switched, one).items():
            scale = expected[name].abs().max().item()
            tolerance = 1e-6 if name == "nats" else bound
            assert torch.allclose(found, expected[name], rtol=0, atol=tolerance * scale), name


def graphs_after_each(model: Transformer, counts: tuple[int, ...], monkeypatch) -> list[int]:
    """How many graphs `fullgraph=True` has compiled after windows of so many documents.

    Attention and the experts' products are stand-ins that read no length back to the host, as the
    operations on CUDA don't.
    """
    counter, after = CompileCounterWithBackend("aot_eager"), []

    def attend(q, k, v, ends, longest):
        return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1) / ends.shape[0]

    def product(x, w, ends):
        return F.grouped_mm(x.bfloat16(), w.bfloat16().transpose(1, 2), offs=ends).to(x.dtype)

    monkeypatch.setitem(attention.BACKENDS, model.attention_backend, attend)
    monkeypatch.setattr(moe, "grouped_linear", product)
    torch._dynamo.reset()
    compiled = torch.compile(window_loss, fullgraph=True, backend=counter)
    for count in counts:
        nats, router = compiled(model, window(count))
        (nats if router is None else nats + router.prob_sums_LE.sum()).backward()
        after.append(counter.frame_count)
        eager = window_loss(model, window(count))[0].item()
        assert abs(nats.item() - eager) <= 1e-4 * eager
    torch._dynamo.reset()
    return after
