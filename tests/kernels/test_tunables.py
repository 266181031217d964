"""What `sparkgpt autotune` measures of the kernels, and that each choice reaches its launcher."""

import dataclasses
import importlib
import shlex

import pytest
import torch
from helpers.interpreted import device, interpreted
from helpers.models import small
from helpers.switched import poison

from sparkgpt.files import write_json
from sparkgpt.flags import parse_train
from sparkgpt.model.attention import Attention
from sparkgpt.model.mlp import MLP
from sparkgpt.model.moe import MoE
from sparkgpt.ops import qk_rope_attention, swiglu, tuning, varlen
from sparkgpt.ops.choices import Kernels, kernel_code, kernel_configs
from sparkgpt.ops.kernels.specimen import Config
from sparkgpt.pipeline.profiles import load_profile, read_profile

interpreted("qk_rope")
attention, grouped, swiglu_kernels = map(interpreted, ("attention", "grouped", "swiglu"))
tunables = importlib.import_module("sparkgpt.ops.tunables")
HERE = torch.device(device())
POSITIONS = 4
OPERATORS = (
    *(swiglu.swiglu_hidden, swiglu.swiglu_hidden_backward),
    *(swiglu.swiglu_down, swiglu.swiglu_down_backward),
    *(varlen.varlen_forward, varlen.varlen_backward),
    *(qk_rope_attention.fused_forward, qk_rope_attention.fused_backward),
)


def gb10_models():
    """What `sparkgpt autotune` is told of the profile's models, and those that it trains."""
    profile = load_profile(read_profile("gb10") | {"profile": "gb10"})
    told = [word.partition("=")[2] for word in shlex.split(profile.autotune_flags) if "=" in word]
    tuned = [parse_train(shlex.split(flags), "--model")[0] for flags in told]
    return tuned, {model for model, _ in map(profile.parsed, profile.run_flags)}


def found_in(models, positions=POSITIONS):
    return {one.key: one for one in tuning.tunables(models, positions, HERE)}


@pytest.fixture
def recorded(tmp_path):
    """As from a record of the gb10 profile's models: a configuration of its own for each kernel."""
    found = found_in(gb10_models()[0])
    chosen = {key: Config({"MARK": n + 1}) for n, key in enumerate(found)}
    choices = {key: {"winner": config.text} for key, config in chosen.items()}
    state = {"type": "cuda", "name": "a GPU", "capability": "12.1"}
    path = tmp_path / "autotune.json"
    write_json(path, {"device": state, "kernels": {"code": kernel_code(), "choices": choices}})
    return chosen, kernel_configs(str(path), state)


@pytest.fixture
def launched(monkeypatch):
    """The configuration that each launcher got, by name; CUDA's side of the operators, on any
    device, with launchers that only make their outputs."""
    for operator in OPERATORS:
        monkeypatch.setitem(operator._backend_fns, "cpu", operator._backend_fns["cuda"])
    seen = {}
    like = lambda *tensors: tuple(map(torch.zeros_like, tensors))

    def forward(x, weight, ends, config):
        seen["swiglu_forward"] = config
        hidden = x.new_zeros(len(x), weight.shape[1] // 2)
        return hidden, torch.cat((hidden, hidden), 1)

    def matmul(a, weight, ends, by_rows=False, config=None):
        seen["grouped_matmul_by_rows" if by_rows else "grouped_matmul"] = config
        return a.new_zeros(len(a), weight.shape[2 if by_rows else 1])

    def note(name, config, result):
        seen[name] = config
        return result

    def attend(q, k, v, ends, config):
        return note("forward", config, (torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))))

    def backward(dout, q, k, v, out, lse, ends, configs):
        return note("queries", configs[0], note("keys", configs[1], like(q, k, v)))

    def fused_backward(dout, qkv, q, k, out, lse, gains, tables, ends, eps, configs):
        seen["fused_queries"], seen["fused_keys"] = configs
        return like(qkv, *gains)

    outer = lambda g, a, ends, config: note(
        "grouped_outer", config, g.new_zeros(len(ends), g.shape[1], a.shape[1])
    )
    dgrad = lambda g, acts, w, ends, config: note(
        "swiglu_dgrad", config, g.new_zeros(len(g), w.shape[2])
    )
    wgrad = lambda g, acts, x, ends, config: note(
        "swiglu_wgrad", config, g.new_zeros(len(ends), acts.shape[1], x.shape[1])
    )
    for module, name, function in (
        (swiglu_kernels, "swiglu_forward", forward),
        (swiglu_kernels, "swiglu_dgrad", dgrad),
        (swiglu_kernels, "swiglu_wgrad", wgrad),
        (grouped, "grouped_matmul", matmul),
        (grouped, "grouped_outer", outer),
        (attention, "forward", attend),
        (attention.attention_backward, "backward", backward),
        (attention.attention_backward, "fused_backward", fused_backward),
    ):
        monkeypatch.setattr(module, name, function)
    return seen


def step(module, model, *arguments):
    """Forward and backward of one layer's part."""
    x = torch.zeros(POSITIONS, model.model_dim, requires_grad=True)
    out = module(x, *arguments)
    (out[0] if isinstance(out, tuple) else out).sum().backward()


def layer_parts(model, kernels):
    """The modules of `model` that launch kernels, run once: attention apart from norm and RoPE, and
    with them."""
    tables = torch.zeros(2, POSITIONS, model.head_dim)
    ends = torch.tensor([0, POSITIONS], dtype=torch.int32)
    for fused in (False, True):
        part = Attention(model, dataclasses.replace(kernels, qk_rope=fused))
        step(part, model, *tables, ends, POSITIONS, "triton")
    if model.sparse_layers:
        step(MoE(model, kernels), model, None)
    if len(model.sparse_layers) < model.model_layers:
        step(MLP(model, kernels), model)


def test_what_was_recorded_for_a_shape_reaches_its_launchers(recorded, launched):
    chosen, configs = recorded
    reached = set()
    for model in gb10_models()[1]:
        launched.clear()
        layer_parts(model, Kernels(swiglu=True, configs=configs))
        own = {key.rpartition("/")[2]: key for key in found_in([model])}
        assert launched == {name: chosen[key] for name, key in own.items()}
        reached |= set(own.values())
    assert reached == chosen.keys() and len(reached) == 28


def test_without_a_record_launchers_take_their_defaults(launched):
    model = small(num_experts=4, moe_intermediate_size=32, mlp_only_layers=(0,))
    layer_parts(model, Kernels(swiglu=True))
    assert len(launched) == 11 and set(launched.values()) == {None}


TUNED = found_in([small(head_dim=64, attention_heads=2, kv_heads=1, num_experts=3,
                        moe_intermediate_size=40, mlp_only_layers=(0,))], 70)  # fmt: skip


@pytest.mark.parametrize("key", TUNED)
def test_each_runs_as_it_is_used(key, monkeypatch):
    """The default and the last candidate write every output, and agree."""
    poison(monkeypatch)
    one = TUNED[key]
    assert len({config.text for config in one.candidates}) == len(one.candidates) > 1
    first, other = one.run(one.default), one.run(one.candidates[-1])
    for mine, theirs in zip(first, other, strict=True):
        assert mine.isfinite().all() and mine.abs().max() > 0
        scale = theirs.float().abs().max().item()
        allowed = max(1e-5, tuning.UNITS * torch.finfo(mine.dtype).eps)
        assert (mine - theirs).abs().max() <= allowed * scale


def test_a_head_dimension_without_kernels_has_nothing_to_tune():
    assert not any(key.startswith("attention") for key in found_in([small(head_dim=16)]))


@pytest.mark.parametrize("positions", [1, 70, 5000])
def test_documents_fill_the_window_and_experts_share_the_rows_unevenly(positions):
    ends = tunables.document_ends(positions, 1024, HERE)
    lengths = ends.diff()
    assert ends[0] == 0 and ends[-1] == positions and lengths.min() > 0 and lengths.max() <= 1024
    offsets = tunables.expert_ends(positions, 8, HERE)
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    assert offsets[-1] == positions and counts.min() >= 0
    assert positions < 5000 or (len(set(counts.tolist())) == 8 and len(lengths) > 5)
    assert tunables.expert_ends(positions, 1, HERE).tolist() == [positions]
