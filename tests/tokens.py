"""The special tokens of a vocabulary that Regard learned, and what a model with such a vocabulary is told about them."""

from regard.text.tokenizer_training import LEARNED

SOS, EOS, UNK, MASK = (i for i in (LEARNED.bos, LEARNED.eos, LEARNED.unk, LEARNED.mask) if i is not None)
PADDING = LEARNED.pad or 0  # the piece of that name, which means nothing to models
SETTINGS = LEARNED.settings()  # ModelConfig(**SETTINGS, ...)
