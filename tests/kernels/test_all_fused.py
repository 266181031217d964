"""A whole model with every fused operation on: the plain model's values, in one graph."""

import pytest
import torch
from helpers.models import VARIANTS, randomised
from helpers.switched import assert_equal_models, window
from torch._dynamo.backends.debugging import aot_eager

from sparkgpt.model import Transformer
from sparkgpt.ops.choices import Kernels
from sparkgpt.train.step import window_loss

CONFIGS = {
    "attention/H16-K2-N4": "forward:QUERIES=64,KEYS=32,warps=4,stages=2",
    "swiglu/D48-E1-F96": "swiglu_forward:BLOCK_R=64,BLOCK_F=64,BLOCK_D=32,warps=4,stages=2",
    "swiglu/D48-E4-F32": "grouped_outer:BLOCK_N=64,BLOCK_K=64,BLOCK_R=32,warps=4,stages=2",
}
ALL = Kernels(qk_rope=True, swiglu=True, dispatch=True, head=True, configs=CONFIGS)
MODELS = {name: VARIANTS[name] for name in ("dense", "moe")}
pytestmark = pytest.mark.cpu("on CUDA attention takes heads of 64 or 128, these models have 16")


def fused(config):
    """The plain model and the same weights with everything on."""
    plain = randomised(config)
    model = Transformer(config, attention_backend="triton", kernels=ALL)
    model.load_state_dict(plain.state_dict())
    return plain, model


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_plain_model(name):
    assert_equal_models(*fused(MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_for_windows_of_any_documents(name):
    """The second window makes lengths dynamic; nothing is compiled after that, and nothing breaks
    the graph: no operation is a stand-in."""
    _, model = fused(MODELS[name])
    assert all(m.configs in CONFIGS.values() for m in model.modules() if hasattr(m, "configs"))
    graphs, after = [], []

    def counting(graph, examples):
        graphs.append(graph)
        return aot_eager(graph, examples)

    torch._dynamo.reset()
    compiled = torch.compile(window_loss, fullgraph=True, backend=counting)
    for count in (3, 5, 1, 12):
        nats, router = compiled(model, window(count))
        (nats if router is None else nats + router.prob_sums_LE.sum()).backward()
        after.append(len(graphs))
        assert nats.item() == pytest.approx(window_loss(model, window(count))[0].item(), rel=1e-6)
    torch._dynamo.reset()
    assert after == [1, 2, 2, 2]
