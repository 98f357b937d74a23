"""Learning a vocabulary: seven ways to cut text, one layout of ids, the same result in every process.

The special tokens stand at the same ids in every vocabulary that is learned here; the pieces follow without a gap.
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
from regard.text.special_tokens import SpecialTokens

NAMES = {"pad": "<pad>", "bos": "<sos>", "eos": "<eos>", "unk": "<unk>", "mask": "<mask>"}  # in the order of their ids
LEARNED = SpecialTokens(**{role: i for i, role in enumerate(NAMES)})  # where they stand in a vocabulary that is learned
UNKNOWN = NAMES["unk"]
KINDS: tuple[str, ...] = TokenizerConfig.__dataclass_fields__["kind"].metadata["choices"]
SPACE = "▁"  # how a space looks inside a piece
NAMED = (
    rf"(?<!\S)(?:{'|'.join(NAMES.values())}|<to-\S+>|<extra-\d+>)(?!\S)"  # a word that is spelt like a special token
)


def specials_of(config: TokenizerConfig) -> list[str]:
    return [
        *NAMES.values(),
        *(f"<to-{language}>" for language in config.tags),
        *(f"<extra-{i}>" for i in range(config.extra)),
    ]


def learn(lines: Iterable[str], config: TokenizerConfig) -> tokenizers.Tokenizer:
    """A trained `tokenizers` object; `lines` are read once and not kept."""
    if config.kind not in KINDS:
        raise RegardError(f"unknown tokenizer kind {config.kind!r}: choose one of {', '.join(KINDS)}")
    backend = _untrained(config)
    with library_errors("cannot train the tokenizer"):
        backend.train_from_iterator(_feed(lines, config, backend.normalizer), _trainer(config))
    if config.kind == "wordpiece":
        _finish_wordpiece(backend, config)
    elif config.kind == "unigram":
        _finish_unigram(backend, config)
    return backend


def _untrained(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """An empty tokenizer of the asked kind: normalizer, cutting rules, model and decoder."""
    model: models.Model
    if config.kind in ("word", "split"):
        model = models.WordLevel(unk_token=UNKNOWN)
    elif config.kind == "unigram":
        model = models.Unigram()
    else:
        model = models.BPE(unk_token=None if config.kind == "byte-bpe" else UNKNOWN)
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    if config.nfc:
        steps.append(normalizers.NFC())
    if config.kind == "byte-bpe":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif config.kind == "split":
        # Published texts say <unk> themselves; other names of special tokens are words nobody knows.
        steps.append(normalizers.Replace(Regex(NAMED), UNKNOWN))
        ends, spaces = Regex(r"\n"), Regex(r"[^\S\n]+")
        cuts = [pre_tokenizers.Split(ends, "isolated"), pre_tokenizers.Split(spaces, "removed")]
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    elif config.kind == "wordpiece":
        # For training only: a space in front of each word, so that a piece tells whether it begins one.
        mark = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="always")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), mark])
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    else:
        # One space more in front makes the first word equal to the others; the decoder takes exactly that one away.
        steps.append(normalizers.Prepend(" "))
        backend.pre_tokenizer = _spaced(one_by_one=config.kind == "char")
        backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _spaced(one_by_one: bool) -> pre_tokenizers.PreTokenizer:
    """Cut before each space (now "▁"), and around punctuation and other white space; or around every character."""
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")]
    if one_by_one:
        cuts.append(pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"))
    else:
        cuts += [pre_tokenizers.Punctuation("isolated"), pre_tokenizers.Split(Regex(r"\s"), "isolated")]
    return pre_tokenizers.Sequence(cuts)


def _trainer(config: TokenizerConfig) -> trainers.Trainer:
    specials = specials_of(config)
    size = max(config.vocab_size, len(specials))
    if config.kind in ("word", "split"):
        return trainers.WordLevelTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    if config.kind == "unigram":
        return trainers.UnigramTrainer(vocab_size=size, special_tokens=specials, unk_token=UNKNOWN, show_progress=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if config.kind == "byte-bpe" else []
    if config.kind == "wordpiece":
        size += 1  # the mark of a word's beginning, which the finished vocabulary does not hold
    return trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)


def _feed(lines: Iterable[str], config: TokenizerConfig, normalizer: normalizers.Normalizer | None) -> Iterator[str]:
    """Pass on the lines that hold text; after the last, before training starts, refuse what cannot be trained."""
    alphabet: set[str] = set()
    for number, line in enumerate(lines, start=1):
        check_text(line, f"line {number} of the training text")
        if line.strip():
            normal = normalizer.normalize_str(line) if normalizer else line
            alphabet.update(normal)
            yield re.sub(NAMED, "", normal) if config.kind == "split" else line  # they have their places already
    if not alphabet:
        raise RegardError("cannot train a tokenizer: the training text is empty; give it at least one line of text")
    specials = len(specials_of(config))
    minimum = specials + _fewest(config.kind, alphabet)
    if config.vocab_size < minimum:
        raise RegardError(
            f"vocab_size {config.vocab_size} is too small for a {config.kind} tokenizer on this text: "
            f"it needs at least {minimum}, the {specials} special tokens included"
        )


def _fewest(kind: str, alphabet: set[str]) -> int:
    """How many pieces a vocabulary needs so that every character of the training text can be written."""
    if kind in ("word", "split"):
        return 1
    if kind == "byte-bpe":
        return 256
    if kind == "wordpiece":
        return 2 * sum(not char.isspace() for char in alphabet)  # "x" and "##x"
    return len(alphabet - {" "} | {SPACE})


def _finish_wordpiece(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Turn byte-pair merges into a WordPiece vocabulary: " the" -> "the", "ing" -> "##ing".

    The library's own WordPiece trainer breaks ties in hash order, so that no two runs agree; its BPE trainer does not.
    Every character is kept in both forms, and then the merges in the order in which they were learnt.
    """
    vocab, specials = backend.get_vocab(), specials_of(config)
    learnt = sorted(vocab, key=vocab.__getitem__)[len(specials) :]
    alphabet = [piece for piece in learnt if len(piece) == 1 and piece != " "]
    merged = [piece[1:] if piece[0] == " " else f"##{piece}" for piece in learnt if len(piece) > 1]
    kept = dict.fromkeys([*specials, *alphabet, *(f"##{char}" for char in alphabet), *merged])
    numbered = {piece: i for i, piece in enumerate(list(kept)[: config.vocab_size])}
    backend.model = models.WordPiece(numbered, unk_token=UNKNOWN)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _finish_unigram(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Give the trained pieces scores and an order that do not change from run to run, and cut them to `size`.

    The library's trainer adds in hash order, so that the last digits differ: they are rounded away. Characters too rare
    to keep a probability get the lowest one plus a step for each, in hash order too: here they all get the lowest.
    """
    specials = specials_of(config)
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
    backend.model = models.Unigram(pieces, unk_id=LEARNED.unk, byte_fallback=False)


def check_text(text: str, where: str) -> None:
    """A Python string may hold halves of UTF-16 pairs, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RegardError(
            f"{where} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start + 1}: "
            "it is not Unicode text; read it again with the right encoding"
        ) from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn whatever the library raises into a `RegardError`: its panics are not even an `Exception`."""
    try:
        yield
    except (RegardError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RegardError(f"{what}: {' '.join(str(error).split())}") from error
