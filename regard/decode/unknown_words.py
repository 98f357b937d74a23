"""Replacement of unknown words: an `<unk>` becomes the source word that it is aligned to, or a translation of that word.

The source word of an unknown word is found in one of two ways:

| token                   | source word                                                                             |
|-------------------------|-----------------------------------------------------------------------------------------|
| `<unk>`                 | by the attention weights of the step that predicts the token (`attended_word`)          |
| `<unk:+2>`              | the one two places before that of the token (PosUnk, Luong et al. 2015)                 |
| `<unk:null>`            | as for `<unk>`, if the model has attention; otherwise the token is left out             |

The source word is looked up in a dictionary (`decode.unknown_dictionary`), and copied if that does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np

from regard.config import DecodeConfig
from regard.decode.source_attention import forced_attention, has_cross_attention
from regard.errors import RegardError
from regard.models.model import TranslationModel
from regard.text.glossary import Glossary
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.text.tokenizer_training import SPACE


def allow_unknown(options: DecodeConfig, model: TranslationModel, tokenizers: Tokenizers) -> DecodeConfig:
    """Return options under which the token of unknown words may be generated, if they say that it is to be replaced."""
    if options.unknown_dictionary:
        load_dictionary(options.unknown_dictionary)  # a file that cannot be read is an error before anything is decoded
    if options.replace_unknown == "none" or tokenizers.target.positional_unknown():
        return options
    unknown = tokenizers.target.special.require("unk", "decode.replace_unknown")
    if not has_cross_attention(model):
        raise RegardError(
            "decode.replace_unknown needs to know which source word an unknown word stands for: use a model with attention, "
            "or train with tokenizer.positional_unknown 7"
        )
    return replace(options, allow_tokens=(*options.allow_tokens, unknown))


def replace_unknown(
    model: TranslationModel,
    tokenizers: Tokenizers,
    token_template: SpecialTokenTemplate,
    options: DecodeConfig,
    texts: Sequence[str],
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
) -> list[str]:
    """Return the texts of translations `targets`, in token ids, with unknown words replaced.

    `texts` and `sources` are the source of each translation, as text and as ids, which may begin with a language token."""
    positional, unknown = tokenizers.target.positional_unknown(), tokenizers.target.special.unk
    dictionary = load_dictionary(options.unknown_dictionary) if options.unknown_dictionary else {}
    asked = [
        [t for t, id in enumerate(target) if id == unknown or (id in positional and positional[id] is None)]
        for target in targets
    ]
    rows = [i for i, places in enumerate(asked) if places] if has_cross_attention(model) else []
    weights: dict[int, np.ndarray] = {}
    if rows:
        given = [sources[i] for i in rows], [targets[i] for i in rows]
        weights = dict(zip(rows, forced_attention(model, *given, token_template), strict=True))
    found = []
    for i, (text, source, target) in enumerate(zip(texts, sources, targets, strict=True)):
        if not asked[i] and not positional.keys() & set(target):
            found.append(tokenizers.target.decode(target))
            continue
        ids, spans = tokenizers.source.encode_with_offsets(text)
        words = [SourceWord.of(text, span) for span in spans]
        places: dict[int, int] = {}
        for t, id in enumerate(target):
            distance = positional.get(id)
            if distance is not None:
                places[t] = t - distance
        if i in weights and words:
            first = len(token_template.before) + len(source) - len(words)
            own = weights[i][:, first : first + len(words)]
            known = np.array([id != tokenizers.source.special.unk for id in ids])
            places |= {t: attended_word(own[t], known) for t in asked[i]}
        chosen = {t: words[j] for t, j in places.items() if 0 <= j < len(words)}
        found.append(write_text(tokenizers.target, target, chosen, dictionary))
    return found


def attended_word(weights: np.ndarray, known: np.ndarray) -> int:
    """Return the position of the source word that an unknown word with these attention weights (S,) stands for.

    It is one that is unknown too, if the source has any (`known` (S,) is False there), because a name is unknown on both
    sides. Among several, weights of words nearby count too, half as much with each step: the outputs of a bidirectional
    encoder know their neighbours, so that attention may rest beside a word."""
    if known.all():
        return int(weights.argmax())
    at = np.arange(len(weights))
    near = weights @ 0.5 ** np.abs(at[:, None] - at[None])
    return int(np.where(known, -1.0, near).argmax())


class SourceWord(NamedTuple):
    """A word of a source text, and whether white space or nothing stands before it."""

    text: str
    is_spaced: bool

    @classmethod
    def of(cls, text: str, span: tuple[int, int]) -> SourceWord:
        """Return the word at a span of a text, which may begin with white space."""
        begin, end = span
        whole = text[begin:end]
        return cls(whole.strip(), begin == 0 or whole[:1].isspace() or text[begin - 1].isspace())


def write_text(
    tokenizer: Tokenizer, ids: Sequence[int], words: Mapping[int, SourceWord], dictionary: Mapping[str, str]
) -> str:
    """Return the text of ids in which source words, or their translations, stand at some positions."""
    pieces = []
    for t, id in enumerate(ids):
        if t in words:
            word, is_spaced = words[t]
            written = dictionary.get(normalize("NFC", word.casefold()), word)
            pieces.append(SPACE + written if tokenizer.marks_spaces and is_spaced else written)
        elif id not in tokenizer.special_ids:
            pieces.append(tokenizer.token(id))
    return tokenizer.join_pieces(pieces)


def load_dictionary(path: str) -> dict[str, str]:
    """Return the translations of words, in lower case, in a file of lines SOURCE<TAB>TARGET; it is read when it changes."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError:
        changed = 0  # reading it says what is wrong
    return read_dictionary(path, changed)


@lru_cache(maxsize=4)
def read_dictionary(path: str, changed: int) -> dict[str, str]:
    """Return the translations of words in a file that was changed last at this time."""
    terms = Glossary.load(path, "decode.unknown_dictionary").terms
    return {normalize("NFC", term.folded): term.target for term in terms}
