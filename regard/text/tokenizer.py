"""Text <-> token ids: seven ways to cut text into pieces, one interface, one vocabulary layout.

The work is done by the `tokenizers` library; this file chooses its parts so that every kind

* has the special tokens at the same ids (`PAD` ... `MASK`, 0 to 4), followed by the pieces without a gap,
* never takes text for a special token: a user who types "<eos>" gets the five characters, not the end of the sentence,
* learns the same vocabulary from the same lines, in every process and with any number of threads.

What comes back from `decode(encode(text))`:

* `byte-bpe`: exactly the text (after NFC and lower-casing, where these are on), whatever it holds.
* `char`, `bpe`, `unigram`, `word`: exactly the text, spaces included, where its characters (`word`: its pieces) are in
  the vocabulary; others become `<unk>`, which decodes to nothing. One character is not kept: "▁" (U+2581) is the mark
  for a space and comes back as one.
* `split`: the words between white space, as they stand, with one space between any two; the end of a line is a word too.
  For texts that come as words: the one kind that takes "<unk>" in a text for what it says.
* `wordpiece`: the words, but not the spacing: runs of white space shrink to one space, and punctuation is set by rule.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.files import exists, read_text, shortened, write_text
from regard.text.vocabulary import (
    EOS,
    KINDS,
    MASK,
    PAD,
    SOS,
    SPACE,
    SPECIALS,
    UNK,
    check_text,
    learn,
    library_errors,
)

__all__ = ["EOS", "KINDS", "MASK", "PAD", "SOS", "SPECIALS", "UNK", "Tokenizer", "TokenizerConfig", "Tokenizers"]


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
        return cls(learn(lines, config))

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Read a tokenizer.json; any file that is not one, or not laid out as ours are, is a `RegardError`."""
        try:
            text = read_text(Path(path))
        except OSError as error:
            raise RegardError(f"cannot read the tokenizer {shortened(path)}: {error.strerror or error}") from error
        except ValueError as error:
            raise RegardError(f"cannot read the tokenizer {path}: {error}") from error
        with library_errors(f"{path} is not a usable tokenizer.json (train one with `regard tokenizer train`)"):
            return cls(tokenizers.Tokenizer.from_str(text))

    def save(self, path: Path) -> None:
        """Write a tokenizer.json in the format of the `tokenizers` library; the file appears whole or not at all."""
        write_text(Path(path), self._backend.to_str(pretty=True))

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without any special token but `<unk>`."""
        check_text(text, "the text")
        with library_errors("cannot encode the text"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        for number, text in enumerate(texts, start=1):
            check_text(text, f"text {number}")
        with library_errors("cannot encode the texts"):
            return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; special tokens are skipped."""
        known = self._known(ids)
        with library_errors("cannot decode the ids"):
            return self._backend.decode(known, skip_special_tokens=True)

    def decode_batch(self, batch: Iterable[Iterable[int]]) -> list[str]:
        """The texts of many lists of ids."""
        known = [self._known(ids) for ids in batch]
        with library_errors("cannot decode the ids"):
            return self._backend.decode_batch(known, skip_special_tokens=True)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token as a person reads it: spaces as "▁", bytes that are only a part of a character as \\xNN."""
        tokens = [self._backend.id_to_token(i) or "" for i in self._known(ids)]
        byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        return [_readable(token) for token in tokens] if byte_level else tokens

    def sentinels(self) -> list[int]:
        """The ids of <extra-0>, <extra-1>, ...: special tokens that stand for gaps in a text."""
        added = self._backend.get_added_tokens_decoder()
        named = {i: re.fullmatch(r"<extra[-_](?:id_)?(\d+)>", token.content) for i, token in added.items()}
        return sorted((i for i, found in named.items() if found), key=lambda i: int(named[i][1]))  # type: ignore[index]

    def tags(self) -> dict[str, int]:
        """The ids of <to-de>, <to-fr>, ... by language: special tokens that say what to translate to."""
        added = self._backend.get_added_tokens_decoder()
        named = {re.fullmatch(r"<to-(.+)>", token.content): i for i, token in added.items()}
        return {found[1]: i for found, i in named.items() if found}

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


FILES = ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json")  # a joint vocabulary, or one for each side


@dataclass(frozen=True)
class Tokenizers:
    """One for each side; the same object twice when the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    def save(self, folder: Path) -> None:
        if self.source is self.target:
            self.source.save(folder / "tokenizer.json")
        else:
            self.source.save(folder / "tokenizer.source.json")
            self.target.save(folder / "tokenizer.target.json")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        joint_file, *files = (folder / name for name in FILES)
        if exists(files[0]):
            return cls(*(Tokenizer.load(file) for file in files))
        joint = Tokenizer.load(joint_file)
        return cls(joint, joint)


def _check_layout(backend: tokenizers.Tokenizer) -> None:
    """The special tokens are ours, at our ids and marked as special, and the ids have no gap."""
    added = backend.get_added_tokens_decoder()
    for i, special in enumerate(SPECIALS):
        if backend.token_to_id(special) != i or i not in added or not added[i].special:
            raise ValueError(f"its token {i} is not the special token {special}")
    vocab = backend.get_vocab()
    if set(vocab.values()) != set(range(len(vocab))):
        raise ValueError(f"its {len(vocab)} tokens do not have the ids 0 to {len(vocab) - 1}")


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
    return bytes(_BYTE[char] for char in token).decode("utf-8", errors="backslashreplace").replace(" ", SPACE)
