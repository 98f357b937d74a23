"""Text <-> token ids: six ways to cut text into pieces, one interface, one vocabulary layout.

The work is done by the `tokenizers` library; this file chooses its parts so that every kind

* has the special tokens at the same ids (`PAD` ... `MASK`, 0 to 4), followed by the pieces without a gap,
* never takes text for a special token: a user who types "<eos>" gets the five characters, not the end of the sentence,
* learns the same vocabulary from the same lines, in every process and with any number of threads.

What comes back from `decode(encode(text))`:

* `byte-bpe`: exactly the text (after NFC and lower-casing, where these are on), whatever it holds.
* `char`, `bpe`, `unigram`, `word`: exactly the text, spaces included, where its characters (`word`: its pieces) are in
  the vocabulary; others become `<unk>`, which decodes to nothing. One character is not kept: "▁" (U+2581) is the mark
  for a space and comes back as one.
* `wordpiece`: the words, but not the spacing: runs of white space shrink to one space, and punctuation is set by rule.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from regard.errors import RegardError

SPECIALS = ("<pad>", "<sos>", "<eos>", "<unk>", "<mask>")
PAD, SOS, EOS, UNK, MASK = range(5)
KINDS = ("char", "word", "wordpiece", "bpe", "byte-bpe", "unigram")

_SPACE = "▁"


@dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens."""

    kind: str = "bpe"
    """How text is cut: char, word, wordpiece, bpe, byte-bpe or unigram."""
    vocab_size: int = 8000
    """The most tokens the vocabulary may hold, the five special ones included; a small corpus may fill fewer."""
    joint: bool = True
    """One vocabulary for source and target together (which tied embeddings need), or one for each side."""
    nfc: bool = True
    """Compose characters first (Unicode NFC), so that "e" + accent and "é" are the same token."""
    lowercase: bool = False
    """Lower-case the text first; what is decoded is then lower-cased too."""


class Tokenizer:
    """A trained vocabulary with its rules; make one with `train` or `load`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Wrap a `tokenizers` object, after checking that its vocabulary is laid out as ours is."""
        _check_layout(backend)
        # None of these three may depend on a file: the first is not saved in it, the others would cut or pad sentences.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._size: int = backend.get_vocab_size()
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> "Tokenizer":
        """Learn a vocabulary from `lines`, which are read once and not kept."""
        if config.kind not in KINDS:
            raise RegardError(f"unknown tokenizer kind {config.kind!r}: choose one of {', '.join(KINDS)}")
        backend = _untrained(config)
        with _library("cannot train the tokenizer"):
            backend.train_from_iterator(_feed(lines, config, backend.normalizer), _trainer(config))
        if config.kind == "wordpiece":
            _finish_wordpiece(backend, config.vocab_size)
        elif config.kind == "unigram":
            _finish_unigram(backend, config.vocab_size)
        return cls(backend)

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json; any file that is not one, or not laid out as ours are, is a `RegardError`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RegardError(f"cannot read the tokenizer {path}: {error}") from error
        with _library(f"{path} is not a usable tokenizer.json (train one with `regard tokenizer train`)"):
            return cls(tokenizers.Tokenizer.from_str(text))

    def save(self, path: Path) -> None:
        """Write a tokenizer.json in the format of the `tokenizers` library; the file appears whole or not at all."""
        path = Path(path)
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_text(self._backend.to_str(pretty=True), encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            raise RegardError(f"cannot write the tokenizer {path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without any special token but `<unk>`."""
        _check_text(text, "the text")
        with _library("cannot encode the text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        for number, text in enumerate(texts, start=1):
            _check_text(text, f"text {number}")
        with _library("cannot encode the texts"):
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are skipped."""
        known = self._known(ids)
        with _library("cannot decode the ids"):
            return self._backend.decode(known, skip_special_tokens=True)

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """The texts of many lists of ids."""
        known = [self._known(ids) for ids in batch]
        with _library("cannot decode the ids"):
            return self._backend.decode_batch(known, skip_special_tokens=True)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token as a person reads it: spaces as "▁", bytes that are only a part of a character as \\xNN."""
        tokens = [self._backend.id_to_token(i) or "" for i in self._known(ids)]
        byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        return [_readable(token) for token in tokens] if byte_level else tokens

    def __len__(self) -> int:
        return self._size

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides how text is cut: equal fingerprints, equal ids."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    def _known(self, ids: Iterable[int]) -> list[int]:
        known = [int(i) for i in ids]
        if known and not 0 <= min(known) <= max(known) < self._size:
            wrong = next(i for i in known if not 0 <= i < self._size)
            raise RegardError(f"token id {wrong} is outside the vocabulary of {self._size}: use the model's tokenizer")
        return known


# ---- training ----


def _untrained(config: TokenizerConfig) -> tokenizers.Tokenizer:
    """An empty tokenizer of the asked kind: normalizer, cutting rules, model and decoder."""
    model: models.Model
    if config.kind == "word":
        model = models.WordLevel(unk_token=SPECIALS[UNK])
    elif config.kind == "unigram":
        model = models.Unigram()
    else:
        model = models.BPE(unk_token=None if config.kind == "byte-bpe" else SPECIALS[UNK])
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = []
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    if config.nfc:
        steps.append(normalizers.NFC())
    if config.kind == "byte-bpe":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    elif config.kind == "wordpiece":
        # For training only: a space in front of each word, so that a piece tells whether it begins one.
        mark = pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="always")
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), mark])
        backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    else:
        # One space more in front makes the first word equal to the others; the decoder takes exactly that one away.
        steps.append(normalizers.Prepend(" "))
        backend.pre_tokenizer = _spaced(one_by_one=config.kind == "char")
        backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    return backend


def _spaced(one_by_one: bool) -> pre_tokenizers.PreTokenizer:
    """Cut before each space (now "▁"), and around punctuation and other white space; or around every character."""
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never")]
    if one_by_one:
        cuts.append(pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"))
    else:
        cuts += [pre_tokenizers.Punctuation("isolated"), pre_tokenizers.Split(Regex(r"\s"), "isolated")]
    return pre_tokenizers.Sequence(cuts)


def _trainer(config: TokenizerConfig) -> trainers.Trainer:
    specials, size = list(SPECIALS), max(config.vocab_size, len(SPECIALS))
    if config.kind == "word":
        return trainers.WordLevelTrainer(vocab_size=size, special_tokens=specials, show_progress=False)
    if config.kind == "unigram":
        return trainers.UnigramTrainer(
            vocab_size=size, special_tokens=specials, unk_token=SPECIALS[UNK], show_progress=False
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet() if config.kind == "byte-bpe" else []
    if config.kind == "wordpiece":
        size += 1  # the mark of a word's beginning, which the finished vocabulary does not hold
    return trainers.BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)


def _feed(lines: Iterable[str], config: TokenizerConfig, normalizer: normalizers.Normalizer | None) -> Iterator[str]:
    """Pass on the lines that hold text; after the last, before training starts, refuse what cannot be trained."""
    alphabet: set[str] = set()
    for number, line in enumerate(lines, start=1):
        _check_text(line, f"line {number} of the training text")
        if line.strip():
            alphabet.update(normalizer.normalize_str(line) if normalizer else line)
            yield line
    if not alphabet:
        raise RegardError("cannot train a tokenizer: the training text is empty; give it at least one line of text")
    minimum = len(SPECIALS) + _fewest(config.kind, alphabet)
    if config.vocab_size < minimum:
        raise RegardError(
            f"vocab_size {config.vocab_size} is too small for a {config.kind} tokenizer on this text: "
            f"it needs at least {minimum}, the {len(SPECIALS)} special tokens included"
        )


def _fewest(kind: str, alphabet: set[str]) -> int:
    """How many pieces a vocabulary needs so that every character of the training text can be written."""
    if kind == "word":
        return 1
    if kind == "byte-bpe":
        return 256
    if kind == "wordpiece":
        return 2 * sum(not char.isspace() for char in alphabet)  # "x" and "##x"
    return len(alphabet - {" "} | {_SPACE})


def _finish_wordpiece(backend: tokenizers.Tokenizer, size: int) -> None:
    """Turn byte-pair merges into a WordPiece vocabulary: " the" -> "the", "ing" -> "##ing".

    The library's own WordPiece trainer breaks ties in hash order, so that no two runs agree; its BPE trainer does not.
    Every character is kept in both forms, and then the merges in the order in which they were learnt.
    """
    vocab = backend.get_vocab()
    learnt = sorted(vocab, key=vocab.__getitem__)[len(SPECIALS) :]
    alphabet = [piece for piece in learnt if len(piece) == 1 and piece != " "]
    merged = [piece[1:] if piece[0] == " " else f"##{piece}" for piece in learnt if len(piece) > 1]
    kept = list(dict.fromkeys([*SPECIALS, *alphabet, *(f"##{char}" for char in alphabet), *merged]))[:size]
    backend.model = models.WordPiece({piece: i for i, piece in enumerate(kept)}, unk_token=SPECIALS[UNK])
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()


def _finish_unigram(backend: tokenizers.Tokenizer, size: int) -> None:
    """Give the trained pieces scores and an order that do not change from run to run, and cut them to `size`.

    The library's trainer adds in hash order, so that the last digits differ: they are rounded away. Characters too rare
    to keep a probability get the lowest one plus a step for each, in hash order too: here they all get the lowest.
    """
    scores = {piece: round(s, 6) for piece, s in json.loads(backend.to_str())["model"]["vocab"][len(SPECIALS) :]}
    alphabet = [piece for piece in scores if len(piece) == 1]
    lowest = min(scores.values())
    for char in alphabet:
        if scores[char] < lowest + 1e-4 * len(alphabet):
            scores[char] = lowest
    best = sorted(scores, key=lambda piece: (len(piece) > 1, -scores[piece], piece))[: size - len(SPECIALS)]
    pieces = [(special, 0.0) for special in SPECIALS] + [(piece, scores[piece]) for piece in best]
    backend.model = models.Unigram(pieces, unk_id=UNK, byte_fallback=False)


# ---- checks and readable bytes ----


def _check_layout(backend: tokenizers.Tokenizer) -> None:
    """The special tokens are ours, at our ids and marked as special, and the ids have no gap."""
    added = backend.get_added_tokens_decoder()
    for i, special in enumerate(SPECIALS):
        if backend.token_to_id(special) != i or i not in added or not added[i].special:
            raise ValueError(f"its token {i} is not the special token {special}")
    vocab = backend.get_vocab()
    if set(vocab.values()) != set(range(len(vocab))):
        raise ValueError(f"its {len(vocab)} tokens do not have the ids 0 to {len(vocab) - 1}")


def _check_text(text: str, where: str) -> None:
    """A Python string may hold halves of UTF-16 pairs, which no encoding can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RegardError(
            f"{where} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start + 1}: "
            "it is not Unicode text; read it again with the right encoding"
        ) from error


@contextmanager
def _library(what: str) -> Iterator[None]:
    """Turn whatever the library raises into a `RegardError`: its panics are not even an `Exception`."""
    try:
        yield
    except (RegardError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise RegardError(f"{what}: {' '.join(str(error).split())}") from error


def _byte_of_char() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary, backwards.

    A byte whose Latin-1 character can be seen stands for itself; the others take the characters from U+0100 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE = _byte_of_char()


def _readable(token: str) -> str:
    """A byte-level token as text: "Ġcaf" -> "▁caf", "Ã" (half of an "é") -> "\\xc3"."""
    if not _BYTE.keys() >= set(token):
        return token  # a whole word that a vocabulary made elsewhere has added
    return bytes(_BYTE[char] for char in token).decode("utf-8", errors="backslashreplace").replace(" ", _SPACE)
