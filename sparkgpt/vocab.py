"""Token ids: a byte's id is its value, followed by three specials."""

BOS = 256
EOS = 257
PAD = 258
VOCAB_SIZE = 259

# The text of each special, as the exported tokenizer spells it.
SPECIAL_TEXT = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}

# The target of a filler position; torch's cross_entropy ignores it by default.
IGNORE_INDEX = -100
FILLER = 256  # positions in a segment of PAD, at most
