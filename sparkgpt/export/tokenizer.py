"""The byte tokenizer as transformers and mlx_lm read it: one token a byte, id = the byte's value.

It is a byte-level BPE without merges, written as plain JSON; no tokenizer library is needed.
"""

from sparkgpt.vocab import BOS, EOS, PAD, SPECIAL_TEXT


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE (256 of them).

    Source: GPT-2's table. A byte that is a visible Latin-1 character stands for itself; the
    others take the code points from U+0100 on, in order.
    """
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


def tokenizer_json() -> dict:
    """Content of tokenizer.json (format of the `tokenizers` library, version 1.0)."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(token) for token in SPECIAL_TEXT],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": _bos_first(),
        # A sequence of one: given the bare decoder, mlx_lm picks a streaming decoder that drops
        # the first space and garbles NUL.
        "decoder": {"type": "Sequence", "decoders": [byte_level]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict:
    """Content of tokenizer_config.json."""
    return {
        # The generic class: model-specific ones normalise the text, which changes its bytes.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TEXT[BOS],
        "eos_token": SPECIAL_TEXT[EOS],
        "pad_token": SPECIAL_TEXT[PAD],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        # A document may contain the text of a special token; it stays text.
        "split_special_tokens": True,
        # transformers 4 otherwise also returns token_type_ids, which generate() refuses.
        "model_input_names": ["input_ids", "attention_mask"],
    }


def _special(token: int) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": SPECIAL_TEXT[token], **flags, "special": True}


def _bos_first() -> dict:
    """The post-processor that puts BOS before each document, the only thing that does."""
    bos = SPECIAL_TEXT[BOS]

    def document(sequence: str, type_id: int) -> list[dict]:
        return [
            {"SpecialToken": {"id": bos, "type_id": type_id}},
            {"Sequence": {"id": sequence, "type_id": type_id}},
        ]

    return {
        "type": "TemplateProcessing",
        "single": document("A", 0),
        "pair": document("A", 0) + document("B", 1),
        "special_tokens": {bos: {"id": bos, "ids": [BOS], "tokens": [bos]}},
    }
