"""An exported directory in transformers, in this process: logits, greedy text, where it stops."""

import pytest
import torch
from helpers.random_runs import VARIANTS, logits, random_model
from transformers import AutoModelForCausalLM

from sparkgpt.export.hf import write_hf
from sparkgpt.export.questions import inputs_of, make_questions
from sparkgpt.files import read_json, write_json
from sparkgpt.generate import Sampling, generate

DOCUMENTS = make_questions(max_positions=256).documents


def load(directory):
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def difference(model, library):
    worst = 0.0
    for document in DOCUMENTS:
        ids = inputs_of(document)
        with torch.no_grad():
            theirs = library(torch.tensor([ids])).logits[0]
        worst = max(worst, (logits(model, ids) - theirs).abs().max().item())
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_librarys(variant, tmp_path):
    model = random_model(variant)
    write_hf(model.state_dict(), model.config, tmp_path / "hf", shard_bytes=60_000)
    assert difference(model, load(tmp_path / "hf")) <= 1e-4


def test_the_comparison_sees_a_swapped_norm_and_a_lost_theta(tmp_path):
    model = random_model("dense")
    state = model.state_dict()
    swapped = {
        name: state[name.replace("q_norm", "?").replace("k_norm", "q_norm").replace("?", "k_norm")]
        for name in state
    }
    write_hf(swapped, model.config, tmp_path / "swapped")
    assert difference(model, load(tmp_path / "swapped")) > 1e-2
    write_hf(state, model.config, tmp_path / "theta")
    values = read_json(tmp_path / "theta" / "config.json")
    values["rope_theta"] = values["rope_parameters"]["rope_theta"] = 10_000.0
    write_json(tmp_path / "theta" / "config.json", values)
    assert difference(model, load(tmp_path / "theta")) > 1e-2


@pytest.mark.parametrize("variant", ["dense", "mixed"])
def test_generation_of_the_library_equals_ours(variant, tmp_path):
    model = random_model(variant)
    greedy = Sampling(temperature=0)
    # Random weights never end a document: let EOS win wherever a byte would that does come up.
    winner = list(generate(model, b"a", greedy, 20))[9]
    with torch.no_grad():
        model.lm_head.weight[257] = 1.01 * model.lm_head.weight[winner]
    write_hf(model.state_dict(), model.config, tmp_path / "hf")
    library = load(tmp_path / "hf")
    ended = 0
    for prompt in (b"", b"a", b"Whole documents", bytes(range(200, 240)), b"\xe2\x82"):
        inputs = torch.tensor([inputs_of(prompt)])
        output = library.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=100,
            suppress_tokens=[256, 258],
        )
        theirs = output[0, inputs.shape[1] :].tolist()
        ours = list(generate(model, prompt, greedy, 100))
        ended += theirs[-1] == 257
        assert ours == [token for token in theirs if token != 257]
        assert len(ours) == 100 or theirs[-1] == 257
    assert ended
