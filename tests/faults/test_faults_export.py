"""Faults of what is published: RoPE's base, experts, the tokenizer, and equal checkpoints."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.random_runs import random_model, write_run
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sparkgpt.checkpoint import save_final
from sparkgpt.errors import UserError
from sparkgpt.export import hf
from sparkgpt.export.hf import read_hf, write_hf
from sparkgpt.files import read_json, sha256_file
from sparkgpt.report.archive import check_different
from sparkgpt.vocab import BOS, EOS

THETA = 123_456.0  # no library's default


def export(folder, model):
    write_hf(model.state_dict(), model.config, folder)
    return folder


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_fault_12_both_spellings_of_rope_theta_are_written(tmp_path, variant):
    directory = export(tmp_path / "hf", random_model(variant, rope_theta=THETA))
    config = read_json(directory / "config.json")
    assert config["rope_theta"] == THETA
    assert config["rope_parameters"] == {"rope_theta": THETA, "rope_type": "default"}
    assert AutoConfig.from_pretrained(directory).rope_parameters["rope_theta"] == THETA
    assert read_hf(directory)[0].rope_theta == THETA


def test_fault_12_mlx_reads_the_same_base(tmp_path):
    qwen3 = pytest.importorskip("mlx_lm.models.qwen3", reason="pip install 'sparkgpt[mlx]'")
    directory = export(tmp_path / "hf", random_model("dense", rope_theta=THETA))
    assert qwen3.ModelArgs.from_dict(read_json(directory / "config.json")).rope_theta == THETA


def numbered_experts():
    """A model whose expert matrices hold nothing but their own number: layer, expert, part."""
    model = random_model("moe")
    hidden = model.config.moe_intermediate_size
    with torch.no_grad():
        for layer, block in enumerate(model.layers):
            for expert in range(model.config.num_experts):
                block.moe.gate_up[expert, :hidden] = 100 * layer + 10 * expert + 1
                block.moe.gate_up[expert, hidden:] = 100 * layer + 10 * expert + 2
                block.moe.down[expert] = 100 * layer + 10 * expert + 3
    return model


def test_fault_13_each_expert_is_written_under_its_own_name_and_read_back(tmp_path):
    model = numbered_experts()
    directory = export(tmp_path / "hf", model)
    parts = load_file(directory / "model.safetensors")
    hidden, width = model.config.moe_intermediate_size, model.config.model_dim
    kinds = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    for layer, expert in itertools.product(range(3), range(4)):
        for number, (kind, shape) in enumerate(kinds.items(), start=1):
            part = parts.pop(f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight")
            assert torch.equal(part, torch.full(shape, 100.0 * layer + 10 * expert + number))
    assert not [name for name in parts if "experts" in name], "a packed form beside the single one"
    _, state = read_hf(directory)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_fault_13_the_library_packs_the_experts_as_we_do(tmp_path):
    model = numbered_experts()
    theirs = AutoModelForCausalLM.from_pretrained(export(tmp_path / "hf", model))
    for ours, block in zip(model.layers, theirs.model.layers, strict=True):
        assert torch.equal(block.mlp.experts.gate_up_proj, ours.moe.gate_up)
        assert torch.equal(block.mlp.experts.down_proj, ours.moe.down)


LITERAL = ["<|bos|>", "<|eos|>", "<|pad|>", "a<|eos|>b", "<|bos|><|bos|>\n<|pad|> ", "<|eos|"]


@pytest.mark.parametrize("text", LITERAL)
def test_fault_14_literal_special_tokens_become_bytes(tmp_path, text):
    tokenizer = AutoTokenizer.from_pretrained(export(tmp_path / "hf", random_model("dense")))
    ids = list(text.encode())
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer(text)["input_ids"] == [BOS, *ids]
    assert tokenizer([text, ""])["input_ids"] == [[BOS, *ids], [BOS]]
    assert tokenizer.decode(ids) == text == tokenizer.decode(ids, skip_special_tokens=True)
    assert tokenizer.decode([BOS, *ids, EOS], skip_special_tokens=True) == text


def run_of(name, digest):
    return SimpleNamespace(path=Path(name), summary=SimpleNamespace(weights_sha256=digest))


def test_fault_18_equal_checkpoints_are_not_published(tmp_path):
    models = {"a-s0": 0, "b-s0": 1, "c-s0": 0}
    digests = {name: save_final(tmp_path / name, random_model("dense", seed))
               for name, seed in models.items()}  # fmt: skip
    runs = [run_of(name, digest) for name, digest in digests.items()]
    check_different(runs[:2])
    with pytest.raises(UserError, match=f"a-s0 and c-s0 have the same weights .{digests['a-s0']}"):
        check_different(runs)


def test_fault_18_exports_of_different_steps_are_different_files(tmp_path):
    run = write_run(tmp_path / "run", random_model("dense"))
    for step in (10, 20):
        save_final(run / f"step{step}", random_model("dense", seed=step))
        (run / f"step{step}" / "model_final.safetensors").rename(
            run / f"step{step}" / "model.safetensors"
        )
    digests = set()
    for step in (0, 10, 20):
        assert hf.main([str(run), "--out", str(tmp_path / f"hf{step}"), "--step", str(step)]) == 0
        digests.add(sha256_file(tmp_path / f"hf{step}" / "model.safetensors"))
        expected = random_model("dense", seed=step).state_dict()
        _, state = read_hf(tmp_path / f"hf{step}")
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert len(digests) == 3
