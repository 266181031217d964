"""The exported tokenizer in transformers: bytes in, the same bytes out."""

import pytest
from helpers.random_runs import random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparkgpt.export.hf import write_hf
from sparkgpt.export.questions import round_trips
from sparkgpt.export.tokenizer import byte_characters
from sparkgpt.files import read_json, write_json

FEW = settings(max_examples=200, deadline=None)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "hf"
    model = random_model("dense")
    write_hf(model.state_dict(), model.config, path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def tried(tokenizer):
    return round_trips(
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        lambda text: tokenizer(text)["input_ids"],
        tokenizer.decode,
    )


def test_characters_are_those_of_the_library():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    assert byte_characters() == [bytes_to_unicode()[byte] for byte in range(256)]


def test_every_round_trip_of_the_check_holds(tokenizer):
    count, failures = tried(tokenizer)
    assert count > 1000
    assert failures == []


def test_the_check_sees_special_texts_turned_into_ids(directory, tmp_path):
    values = read_json(directory / "tokenizer_config.json") | {"split_special_tokens": False}
    write_json(tmp_path / "tokenizer_config.json", values)
    write_json(tmp_path / "tokenizer.json", read_json(directory / "tokenizer.json"))
    write_json(tmp_path / "config.json", read_json(directory / "config.json"))
    _, failures = tried(AutoTokenizer.from_pretrained(tmp_path))
    assert "text '<|eos|>'" in failures


@FEW
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_text_becomes_its_bytes(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@FEW
@given(value=st.binary())
def test_any_bytes_decode_as_python_does(tokenizer, value):
    assert tokenizer.decode(list(value)) == value.decode("utf-8", "replace")


def test_specials_have_their_ids_and_are_skipped_on_demand(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        256,
        257,
        258,
    )
    assert len(tokenizer) == 259
    assert tokenizer.decode([256, 104, 105, 257]) == "<|bos|>hi<|eos|>"
    assert tokenizer.decode([256, 104, 105, 257], skip_special_tokens=True) == "hi"


def test_batches_are_padded_on_the_right(tokenizer):
    batch = tokenizer(["ab", "é<|pad|>"], padding=True)
    assert batch["input_ids"][0] == [256, 97, 98] + [258] * 7
    assert batch["attention_mask"][0] == [1] * 3 + [0] * 7
    assert batch["input_ids"][1] == [256, *"é<|pad|>".encode()]
    assert set(batch) == {"input_ids", "attention_mask"}
