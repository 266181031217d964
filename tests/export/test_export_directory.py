"""Writing and reading stock directories: the same bits back, and damage named."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from helpers.random_runs import VARIANTS, random_model, write_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sparkgpt.checkpoint import read_run
from sparkgpt.errors import UserError
from sparkgpt.export import hf
from sparkgpt.export.hf import read_hf, write_hf
from sparkgpt.export.hf_config import from_hf_config, to_hf_config
from sparkgpt.files import read_json, sha256_file


def assert_same(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


@pytest.fixture
def exported(tmp_path):
    model = random_model("mixed")
    write_hf(model.state_dict(), model.config, tmp_path / "hf")
    return model, tmp_path / "hf"


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_gives_back_the_same_bits(variant, tmp_path):
    model = random_model(variant)
    write_hf(model.state_dict(), model.config, tmp_path / "hf")
    config, state = read_hf(tmp_path / "hf")
    assert config == model.config
    assert_same(model.state_dict(), state)


def test_rows_go_where_the_library_expects_them(exported):
    model, directory = exported
    state, parts = model.state_dict(), load_file(directory / "model.safetensors")
    layer, qkv = "model.layers.0.", state["layers.0.attention.qkv.weight"]
    assert torch.equal(parts[layer + "self_attn.q_proj.weight"], qkv[:48])
    assert torch.equal(parts[layer + "self_attn.k_proj.weight"], qkv[48:72])
    assert torch.equal(parts[layer + "self_attn.v_proj.weight"], qkv[72:])
    experts = state["layers.0.moe.gate_up"]
    assert torch.equal(parts[layer + "mlp.experts.3.gate_proj.weight"], experts[3, :24])
    assert torch.equal(parts[layer + "mlp.experts.3.up_proj.weight"], experts[3, 24:])
    # Layer 2 is dense in this variant.
    gate_up = state["layers.2.mlp.gate_up.weight"]
    assert torch.equal(parts["model.layers.2.mlp.up_proj.weight"], gate_up[40:])


def test_large_models_are_sharded_with_an_index(exported, tmp_path):
    model, whole = exported
    write_hf(model.state_dict(), model.config, tmp_path / "cut", shard_bytes=30_000)
    files = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    assert all((tmp_path / "cut" / name).stat().st_size < 40_000 for name in files[1:])
    index = read_json(tmp_path / "cut" / "model.safetensors.index.json")
    parts = load_file(whole / "model.safetensors")
    assert index["weight_map"].keys() == parts.keys()
    assert index["metadata"]["total_size"] == sum(part.nbytes for part in parts.values())
    assert_same(model.state_dict(), read_hf(tmp_path / "cut")[1])


NOTES = {"e": "1", "d": "2", "c": "3", "b": "4", "a": "5"}


def test_the_same_model_gives_the_same_bytes(exported, tmp_path):
    model, _ = exported
    found = set()
    for number in range(8):  # in random order, six keys would be alike once in 720 times
        out = tmp_path / str(number)
        write_hf(model.state_dict(), model.config, out, metadata=NOTES)
        found.add((out / "model.safetensors").read_bytes())
    assert len(found) == 1
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == NOTES | {"format": "pt"}
    assert_same(model.state_dict(), read_hf(out)[1])


def test_bfloat16_rounds_once(tmp_path):
    model = random_model("moe")
    write_hf(model.state_dict(), model.config, tmp_path / "hf", dtype=torch.bfloat16)
    config = read_json(tmp_path / "hf" / "config.json")
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    rounded = {name: value.bfloat16() for name, value in model.state_dict().items()}
    assert_same(rounded, read_hf(tmp_path / "hf")[1])


def test_different_checkpoints_have_different_digests_and_equal_ones_equal(tmp_path):
    digests = []
    for name, seed in (("a", 0), ("b", 1), ("c", 0)):
        model = random_model("dense", seed)
        write_hf(model.state_dict(), model.config, tmp_path / name)
        digests.append(sha256_file(tmp_path / name / "model.safetensors"))
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_files_follow_the_umask(exported):
    mask = os.umask(0)
    os.umask(mask)
    for path in exported[1].iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_a_crash_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(hf, "tokenizer_json", full)
    model = random_model("dense")
    with pytest.raises(OSError, match="disk full"):
        write_hf(model.state_dict(), model.config, tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_the_models_is_refused(tmp_path):
    model = random_model("dense")
    state = model.state_dict()
    state["surplus"] = torch.ones(1)
    with pytest.raises(UserError, match="has surplus"):
        write_hf(state, model.config, tmp_path / "hf")
    del state["surplus"], state["norm.weight"]
    with pytest.raises(UserError, match="lacks norm.weight"):
        write_hf(state, model.config, tmp_path / "hf")


def lose(parts):
    del parts["model.layers.1.mlp.experts.2.up_proj.weight"]


def add(parts):
    parts["model.layers.9.mlp.gate.weight"] = torch.ones(4, 32)


def reshape(parts):
    parts["model.norm.weight"] = torch.ones(1)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lose, "lacks model.layers.1.mlp.experts.2.up_proj.weight"),
        (add, "has model.layers.9.mlp.gate.weight"),
        (reshape, r"model.norm.weight in .* has shape \(1,\), the config asks for \(32,\)"),
    ],
)
def test_damaged_directories_are_named(exported, damage, message):
    path = exported[1] / "model.safetensors"
    parts = load_file(path)
    damage(parts)
    save_file(parts, path)
    with pytest.raises(UserError, match=message):
        read_hf(exported[1])


def test_missing_and_cut_files_are_user_errors(exported):
    path = exported[1] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot read .*model.safetensors"):
        read_hf(exported[1])
    path.unlink()
    with pytest.raises(UserError, match="model.safetensors: No such file"):
        read_hf(exported[1])


def changed(**changes):
    values = to_hf_config(random_model("moe", rope_theta=5e5).config, "float32") | changes
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("absent", ["rope_theta", "rope_parameters"])
def test_either_spelling_of_theta_is_enough(absent):
    assert from_hf_config(changed(**{absent: None}), "x").rope_theta == 5e5


@pytest.mark.parametrize("absent", ["num_experts", "num_local_experts"])
def test_either_spelling_of_experts_is_enough(absent):
    assert from_hf_config(changed(**{absent: None}), "x").num_experts == 4


def test_absent_keys_mean_what_the_library_takes_them_for():
    config = from_hf_config(changed(norm_topk_prob=None), "x")
    assert config.norm_topk_prob is False


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rope_theta": 1e4}, "contradicts itself: rope_theta 10000.0"),
        ({"num_local_experts": 8}, "contradicts itself: num_experts 4"),
        ({"rope_theta": None, "rope_parameters": None}, "none of rope_theta"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn"}}, "scales RoPE"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"vocab_size": 32000}, "vocab_size 32000"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"head_dim": None}, "no head_dim"),
    ],
)
def test_configs_of_other_models_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        from_hf_config(changed(**changes), "x")


def test_floats_are_written_as_floats(tmp_path):
    model = random_model("moe", rope_theta=1_000_000)
    write_hf(model.state_dict(), model.config, tmp_path / "hf")
    values = read_json(tmp_path / "hf" / "config.json")
    assert isinstance(values["rope_theta"], float)
    assert isinstance(values["rope_parameters"]["rope_theta"], float)


def test_command_exports_final_weights_and_steps(tmp_path, capsys):
    run = write_run(tmp_path / "run", random_model("moe"))
    (run / "step7").mkdir()
    save_file(random_model("moe", seed=7).state_dict(), run / "step7" / "model.safetensors")
    assert hf.main([str(run), "--out", str(tmp_path / "hf"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    weights = tmp_path / "hf" / "model.safetensors"
    assert result["sha256"] == {"model.safetensors": sha256_file(weights)}
    assert_same(read_run(run)[1], read_hf(tmp_path / "hf")[1])
    hf.main([str(run), "--out", str(tmp_path / "hf7"), "--step", "7"])
    assert capsys.readouterr().out == ""
    assert_same(random_model("moe", seed=7).state_dict(), read_hf(tmp_path / "hf7")[1])
    with pytest.raises(UserError, match="step8"):
        hf.main([str(run), "--out", str(tmp_path / "hf8"), "--step", "8"])


def test_an_older_export_is_replaced_whole(exported):
    model, directory = exported
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    write_hf(model.state_dict(), model.config, directory)
    assert not (directory / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize("module", ["export.hf", "export.check", "evaluate", "generate"])
def test_help_does_not_wait_for_torch(module):
    code = (
        f"import sys; from sparkgpt.{module} import main\n"
        "try: main(['--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.startswith("usage: sparkgpt ")
