"""The special tokens of a vocabulary that Regard trained, and the model settings that follow from them."""

from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, bert_template

_SPECIAL = DEFAULT_SPECIAL_TOKENS
SOS, EOS, UNK, MASK = (i for i in (_SPECIAL.bos, _SPECIAL.eos, _SPECIAL.unk, _SPECIAL.mask) if i is not None)
PADDING = _SPECIAL.pad or 0  # the token of that name, which models do not use as padding
SETTINGS = _SPECIAL.model_settings()  # ModelConfig(**SETTINGS, ...)
BERT_TEMPLATE = bert_template(_SPECIAL)
