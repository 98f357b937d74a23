"""Training of tokenizers: seven kinds of subword segmentation with one layout of ids.

The special tokens have the same ids in every vocabulary that is trained here; the pieces follow without a gap. The same
lines give the same vocabulary in every process, which the trainers of the `tokenizers` library alone do not guarantee.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, SPECIAL_TOKEN_NAMES

UNKNOWN = SPECIAL_TOKEN_NAMES["unk"]
KINDS: tuple[str, ...] = TokenizerConfig.__dataclass_fields__["kind"].metadata["choices"]
SPACE = "▁"  # stands for a space inside a piece
# A word that is spelt like a special token.
SPECIAL_TOKEN_WORD = rf"(?<!\S)(?:{'|'.join(SPECIAL_TOKEN_NAMES.values())}|<to-\S+>|<extra-\d+>|<unk:[^\s>]+>)(?!\S)"


def special_token_list(config: TokenizerConfig) -> list[str]:
    """Return all special tokens of a vocabulary in the order of their ids: roles, language tokens, sentinels."""
    return [
        *SPECIAL_TOKEN_NAMES.values(),
        *(f"<to-{language}>" for language in config.language_tokens),
        *(f"<extra-{i}>" for i in range(config.n_sentinels)),
        *positional_unknown_names(config.positional_unknown),
    ]


def positional_unknown_names(window: int) -> list[str]:
    """Return the tokens of unknown words that stand up to `window` places after or before their source words."""
    return [f"<unk:{d:+d}>" for d in range(-window, window + 1)] + ["<unk:null>"] if window else []


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Return a trained object of the `tokenizers` library; `lines` are read once and not kept."""
    if config.kind not in KINDS:
        raise RegardError(f"unknown tokenizer kind {config.kind!r}: choose one of {', '.join(KINDS)}")
    if config.positional_unknown and config.kind not in ("word", "split"):
        raise RegardError(
            f"tokenizer.positional_unknown is for vocabularies of words, tokenizer.kind word or split, not {config.kind}"
        )
    backend = _untrained_tokenizer(config)
    with library_errors("cannot train the tokenizer"):
        backend.train_from_iterator(_check_lines(lines, config, backend.normalizer), _trainer(config))
    if config.kind == "wordpiece":
        _finish_wordpiece(backend, config)
    elif config.kind == "unigram":
        _finish_unigram(backend, config)
    return backend


def _untrained_tokenizer(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """Return an empty tokenizer of the configured kind: normalizer, pre-tokenizer, model and decoder."""
    model: models.Model
    if config.kind in ("word", "split"):
        model = models.WordLevel(unk_token=UNKNOWN)
    elif config.kind == "unigram":
        model = models.Unigram()
    else:
        model = models.BPE(unk_token=None if config.kind == "byte-bpe" else UNKNOWN)
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    cuts: list[pre_tokenizers.PreTokenizer]
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    if config.nfc:
        steps.append(normalizers.NFC())
    if config.kind == "byte-bpe":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif config.kind == "split":
        # Published corpora contain the word <unk> itself; names of other special tokens become unknown words too.
        steps.append(normalizers.Replace(Regex(SPECIAL_TOKEN_WORD), UNKNOWN))
        ends, spaces = Regex(r"\n"), Regex(r"[^\S\n]+")
        cuts = [pre_tokenizers.Split(ends, "isolated"), pre_tokenizers.Split(spaces, "removed")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    elif config.kind == "wordpiece":
        # For training only: a space before each word, so that a piece tells whether it begins a word.
        mark = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="always")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), mark])
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    else:
        # A space before the text makes the first word equal to the others; the decoder removes exactly that one.
        steps.append(normalizers.Prepend(" "))
        cuts = [pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")]
        if config.kind == "char":
            cuts.append(pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"))
        else:
            cuts += [pre_tokenizers.Punctuation("isolated"), pre_tokenizers.Split(Regex(r"\s"), "isolated")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _trainer(config: TokenizerConfig) -> trainers.Trainer:
    specials = special_token_list(config)
    size = max(config.vocab_size, len(specials))
    if config.kind in ("word", "split"):
        return trainers.WordLevelTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    if config.kind == "unigram":
        return trainers.UnigramTrainer(vocab_size=size, special_tokens=specials, unk_token=UNKNOWN, show_progress=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if config.kind == "byte-bpe" else []
    if config.kind == "wordpiece":
        size += 1  # the space before a word, which the finished vocabulary does not contain
    return trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)


def _check_lines(
    lines: Iterable[str], config: TokenizerConfig, normalizer: normalizers.Normalizer | None
) -> Iterator[str]:
    """Yield the lines that contain text; after the last line raise a RegardError if no vocabulary can be trained on them."""
    alphabet: set[str] = set()
    for number, line in enumerate(lines, start=1):
        check_text(line, f"line {number} of the training text")
        if line.strip():
            normal = normalizer.normalize_str(line) if normalizer else line
            alphabet.update(normal)
            yield re.sub(SPECIAL_TOKEN_WORD, "", normal) if config.kind == "split" else line  # special tokens have ids
    if not alphabet:
        raise RegardError("cannot train a tokenizer: the training text is empty; give it at least one line of text")
    specials = len(special_token_list(config))
    minimum = specials + _min_pieces(config.kind, alphabet)
    if config.vocab_size < minimum:
        raise RegardError(
            f"vocab_size {config.vocab_size} is too small for a {config.kind} tokenizer on this text: "
            f"it needs at least {minimum}, the {specials} special tokens included"
        )


def _min_pieces(kind: str, alphabet: set[str]) -> int:
    """Return how many pieces a vocabulary needs so that every character of the training text can be encoded."""
    if kind in ("word", "split"):
        return 1
    if kind == "byte-bpe":
        return 256
    if kind == "wordpiece":
        return 2 * sum(not char.isspace() for char in alphabet)  # "x" and "##x"
    return len(alphabet - {" "} | {SPACE})


def _finish_wordpiece(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Turn byte-pair merges into a WordPiece vocabulary: " the" -> "the", "ing" -> "##ing".

    The library's own WordPiece trainer breaks ties in hash order, which differs from run to run; its BPE trainer does not.
    The vocabulary holds every character in both forms, then the merges in the order in which they were learned.
    """
    vocab, specials = backend.get_vocab(), special_token_list(config)
    learnt = sorted(vocab, key=vocab.__getitem__)[len(specials) :]
    alphabet = [piece for piece in learnt if len(piece) == 1 and piece != " "]
    merged = [piece[1:] if piece[0] == " " else f"##{piece}" for piece in learnt if len(piece) > 1]
    kept = dict.fromkeys([*specials, *alphabet, *(f"##{char}" for char in alphabet), *merged])
    numbered = {piece: i for i, piece in enumerate(list(kept)[: config.vocab_size])}
    backend.model = models.WordPiece(numbered, unk_token=UNKNOWN)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _finish_unigram(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Give the trained pieces scores and an order that are the same in every run, and keep the best `vocab_size`.

    The library's trainer sums in hash order, so the last digits of scores differ from run to run: they are rounded away.
    It gives the rarest characters the lowest score plus a small step each, in hash order too: here all get the lowest.
    """
    specials = special_token_list(config)
    scores = {piece: round(s, 6) for piece, s in json.loads(backend.to_str())["model"]["vocab"][len(specials) :]}
    alphabet = [piece for piece in scores if len(piece) == 1]
    lowest = min(scores.values())
    for char in alphabet:
        if scores[char] < lowest + 1e-4 * len(alphabet):
            scores[char] = lowest
    best = sorted(scores, key=lambda piece: (len(piece) > 1, -scores[piece], piece))[
        : config.vocab_size - len(specials)
    ]
    pieces = [(special, 0.0) for special in specials] + [(piece, scores[piece]) for piece in best]
    backend.model = models.Unigram(pieces, unk_id=DEFAULT_SPECIAL_TOKENS.unk, byte_fallback=False)


def check_text(text: str, where: str) -> None:
    """Raise a RegardError if a string contains a lone surrogate (half of a UTF-16 pair), which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RegardError(
            f"{where} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start + 1}: "
            "it is not Unicode text; read it again with the right encoding"
        ) from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever the `tokenizers` library raises into a `RegardError`; its panics do not derive from `Exception`."""
    try:
        yield
    except (RegardError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RegardError(f"{what}: {' '.join(str(error).split())}") from error
