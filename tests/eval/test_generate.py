"""Generation: the cached path against the full forward, sampling against a slow reference."""

import io
import json
import types

import pytest
import torch
from helpers.random_runs import VARIANTS, logits, random_model, write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkgpt import generate as module
from sparkgpt.errors import UserError
from sparkgpt.generate import KVCache, Sampling, choose, extend, generate, main, stream_text
from sparkgpt.vocab import BOS, EOS, PAD

TOKENS = [BOS, *"Ünïcode, twice: 二度。".encode(), 0xFF, *range(40)]
GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prefill", [1, 17, len(TOKENS) - 1])
def test_cached_logits_equal_the_full_forward(variant, prefill):
    model = random_model(variant)
    cache = KVCache(model, len(TOKENS))
    parts = [extend(model, cache, TOKENS[:prefill])]
    parts += [extend(model, cache, [token]) for token in TOKENS[prefill:]]
    assert cache.length == len(TOKENS)
    # Float32 noise of another order of summation; logits reach 10 here.
    torch.testing.assert_close(torch.cat(parts), logits(model, TOKENS), rtol=0, atol=1e-4)


def test_greedy_is_the_argmax_of_the_full_forward():
    model = random_model("mixed")
    tokens = [BOS, *b"abc"]
    for value in generate(model, b"abc", GREEDY, 40):
        scores = logits(model, tokens)[-1]
        scores[[BOS, PAD]] = -torch.inf
        assert value == scores.argmax()
        tokens.append(value)
    assert len(tokens) == 44


def test_equal_seeds_give_equal_text():
    model = random_model("dense")
    drawn = [bytes(generate(model, b"x", Sampling(seed=seed), 60)) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generation_stops_at_eos_and_never_emits_the_other_specials():
    logits_V = torch.full((259,), -30.0)
    logits_V[[BOS, PAD]] = 30.0
    logits_V[7] = 0.0
    generator = torch.Generator().manual_seed(0)
    assert choose(logits_V, GREEDY, generator) == 7
    assert {choose(logits_V, Sampling(), generator) for _ in range(50)} == {7}
    logits_V[EOS] = 20.0
    assert choose(logits_V, GREEDY, generator) == EOS


def test_eos_ends_the_stream(monkeypatch):
    tokens = iter([65, 66, EOS, 67])
    monkeypatch.setattr(module, "choose", lambda *_: next(tokens))
    assert list(generate(random_model("dense"), b"", GREEDY, 10)) == [65, 66]


def reference(logits_V, temperature, top_k, top_p):
    """Probabilities by the definitions, one candidate after the other."""
    allowed = [i for i in range(259) if i not in (BOS, PAD)]
    ranked = sorted(allowed, key=lambda i: (-logits_V[i].item(), i))[: top_k or None]
    weights = [torch.exp(logits_V[i].double() / temperature).item() for i in ranked]
    kept, mass = {}, 0.0
    for index, weight in zip(ranked, weights, strict=True):
        if mass >= top_p:
            break
        kept[index] = weight / sum(weights)
        mass += kept[index]
    return {index: value / sum(kept.values()) for index, value in kept.items()}


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1, 0, 1), (0.7, 5, 1), (1.3, 0, 0.5), (1, 8, 0.6), (2, 1, 0.1)]
)
def test_draws_follow_the_reference_distribution(temperature, top_k, top_p):
    logits_V = 2 * torch.randn(259, generator=torch.Generator().manual_seed(5))
    expected = reference(logits_V, temperature, top_k, top_p)
    generator = torch.Generator().manual_seed(1)
    sampling = Sampling(temperature, top_k, top_p)
    count = 4000
    drawn = [choose(logits_V, sampling, generator) for _ in range(count)]
    assert set(drawn) <= expected.keys()
    for index, probability in expected.items():
        # Six standard deviations of a binomial share, and one draw for the rarest.
        slack = 6 * (probability * (1 - probability) / count) ** 0.5 + 1 / count
        assert abs(drawn.count(index) / count - probability) <= slack


def test_choosing_leaves_the_logits_alone():
    logits_V = torch.zeros(259, dtype=torch.float64)
    choose(logits_V, GREEDY, torch.Generator())
    assert torch.equal(logits_V, torch.zeros(259, dtype=torch.float64))


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 2}])
def test_impossible_sampling_is_a_user_error(values):
    with pytest.raises(UserError, match=next(iter(values)).replace("_", "-")):
        Sampling(**values)


@settings(max_examples=300, deadline=None)
@given(value=st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "replace"))))
def test_streamed_text_is_the_decoded_bytes(value):
    parts = list(stream_text(value))
    assert "".join(parts) == value.decode("utf-8", "replace")
    assert all(parts)


def test_text_is_streamed_as_soon_as_it_is_complete():
    given_so_far = []

    def feed():
        for value in "aé".encode() + b"\xe2\x82":
            given_so_far.append(value)
            yield value

    stream = stream_text(feed())
    assert (next(stream), len(given_so_far)) == ("a", 1)
    assert (next(stream), len(given_so_far)) == ("é", 3)
    assert next(stream) == "\ufffd"  # the cut tail, at the end
    assert list(stream) == []


def test_context_limits():
    model = random_model("dense", max_position_embeddings=16)
    assert len(list(generate(model, b"x" * 10, GREEDY, 100))) == 5
    assert len(list(generate(model, b"x" * 14, GREEDY, 100))) == 1
    with pytest.raises(UserError, match="the prompt has 15 bytes, .* 16 positions"):
        list(generate(model, b"x" * 15, GREEDY, 100))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", random_model("mixed", max_position_embeddings=32))


def test_command_streams_what_json_reports(run, capfdbinary):
    base = ["--model", str(run), "--prompt", "é", "--temperature", "0", "--device", "cpu"]
    assert main([*base, "--max-bytes", "20"]) == 0
    text = capfdbinary.readouterr().out.decode()
    assert main([*base, "--max-bytes", "20", "--json"]) == 0
    result = json.loads(capfdbinary.readouterr().out)
    assert result["text"] == text
    assert bytes.fromhex(result["hex"]).decode("utf-8", "replace") == text
    assert result["stopped"] == "max-bytes"
    model = random_model("mixed", max_position_embeddings=32)
    assert bytes.fromhex(result["hex"]) == bytes(generate(model, "é".encode(), GREEDY, 20))


def test_command_says_when_the_context_is_full(run, capfdbinary):
    assert main(["--model", str(run), "--prompt", "abc", "--json", "--temperature", "0"]) == 0
    output = capfdbinary.readouterr()
    assert json.loads(output.out)["stopped"] == "context"
    assert b"the context of 32 positions is full" in output.err


def test_prompts_come_from_files_and_stdin_as_bytes(run, tmp_path, capfdbinary, monkeypatch):
    raw = b"\xff\x00\r\n"
    (tmp_path / "prompt").write_bytes(raw)
    texts = []
    for source in (str(tmp_path / "prompt"), "-"):
        monkeypatch.setattr("sys.stdin", types.SimpleNamespace(buffer=io.BytesIO(raw)))
        main(["--model", str(run), "--prompt-file", source, "--json", "--max-bytes", "9"])
        texts.append(json.loads(capfdbinary.readouterr().out)["hex"])
    model = random_model("mixed", max_position_embeddings=32)
    assert texts == [bytes(generate(model, raw, Sampling(), 9)).hex()] * 2
    with pytest.raises(UserError, match="--prompt-file .*absent: No such file"):
        main(["--model", str(run), "--prompt-file", str(tmp_path / "absent")])
