"""Text <-> token ids: seven ways to cut text into pieces, and whatever a vocabulary from elsewhere does, in one interface.

The work is done by the `tokenizers` library. A tokenizer knows which of its tokens are special (`Tokenizer.special`): a
vocabulary that Regard learned by their names, one from elsewhere by vocabulary.json beside it. Every kind

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
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, pre_tokenizers

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.files import exists, read_json, read_text, shorten_path, write_text
from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer_training import KINDS, NAMES, SPACE, check_text, learn, library_errors

__all__ = ["KINDS", "Tokenizer", "TokenizerConfig", "Tokenizers"]


class Tokenizer:
    """A trained vocabulary with its rules; make one with `train` or `load`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special: SpecialTokens | None = None, size: int | None = None
    ) -> None:
        """Wrap a `tokenizers` object.

        `special`: its special tokens; None: those that bear Regard's names. `size`: how many ids the vocabulary has, of
        which some may stand for nothing; None: one for each piece, without a gap.
        """
        self.special = named(backend) if special is None else special
        self._size = checked_size(backend, self.special, size)
        self._text: str | None = None  # what `save` writes, where the backend is not that any more
        if special is not None:
            self._text = backend.to_str(pretty=True)
            guard(backend, special.unk)
        # None of these three may depend on a file: the first is not saved in it, the others would cut or pad sentences.
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)

    @classmethod
    def train(cls, lines: Iterable[str], config: TokenizerConfig) -> "Tokenizer":
        """Learn a vocabulary from `lines`, which are read once and not kept."""
        return cls(learn(lines, config))

    @classmethod
    def load(cls, path: Path, special: SpecialTokens | None = None, size: int | None = None) -> "Tokenizer":
        """Read a tokenizer.json; any file that is not one, or lacks its special tokens, is a `RegardError`."""
        try:
            text = read_text(Path(path))
        except OSError as error:
            raise RegardError(f"cannot read the tokenizer {shorten_path(path)}: {error.strerror or error}") from error
        except ValueError as error:
            raise RegardError(f"cannot read the tokenizer {path}: {error}") from error
        with library_errors(f"{path} is not a usable tokenizer.json (train one with `regard tokenizer train`)"):
            return cls(tokenizers.Tokenizer.from_str(text), special, size)

    def save(self, path: Path) -> None:
        """Write a tokenizer.json in the format of the `tokenizers` library; the file appears whole or not at all."""
        write_text(Path(path), self.to_str())

    def to_str(self) -> str:
        """What `save` writes: one from elsewhere as it came."""
        return self._backend.to_str(pretty=True) if self._text is None else self._text

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
        tokens = [self.token(i) for i in self._known(ids)]
        byte_level = isinstance(self._backend.decoder, decoders.ByteLevel)
        return [_readable(token) for token in tokens] if byte_level else tokens

    def token(self, id: int) -> str:
        """The name of a token in tokenizer.json; nothing for an id that no piece stands for."""
        return self._backend.id_to_token(id) or ""

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
        """SHA-256 of how text is cut and of which tokens are special: equal fingerprints, equal ids."""
        roles = json.dumps([asdict(self.special), self._size])
        return hashlib.sha256((self._backend.to_str() + roles).encode()).hexdigest()

    def _known(self, ids: Iterable[int]) -> list[int]:
        known = [int(i) for i in ids]
        if known and not 0 <= min(known) <= max(known) < self._size:
            wrong = next(i for i in known if not 0 <= i < self._size)
            raise RegardError(f"token id {wrong} is outside the vocabulary of {self._size}: use the model's tokenizer")
        return known


FILES = ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json")  # a joint vocabulary, or one for each side
VOCABULARY = "vocabulary.json"  # beside those of a vocabulary from elsewhere: its special tokens and its size


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
        if self.source._text is None:
            (folder / VOCABULARY).unlink(missing_ok=True)
        else:  # no name of a token says what it is for
            values = {"size": len(self.source), "special_tokens": asdict(self.source.special)}
            write_text(folder / VOCABULARY, json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        joint_file, *files = (folder / name for name in FILES)
        roles = read_roles(folder / VOCABULARY) if exists(folder / VOCABULARY) else (None, None)
        if exists(files[0]):
            return cls(*(Tokenizer.load(file, *roles) for file in files))
        joint = Tokenizer.load(joint_file, *roles)
        return cls(joint, joint)


def read_roles(path: Path) -> tuple[SpecialTokens, int]:
    """The special tokens and the size of a vocabulary from elsewhere."""
    try:
        values = read_json(path)
        special, size = SpecialTokens(**values["special_tokens"]), values["size"]
        ids = [size, *(i for i in asdict(special).values() if i is not None)]
        if not all(type(i) is int and 0 <= i <= size for i in ids):
            raise ValueError(f"ids {ids[1:]} of a vocabulary of {size!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegardError(f"cannot read {path} ({type(error).__name__}: {error}); copy the folder anew") from None
    return special, size


def named(backend: tokenizers.Tokenizer) -> SpecialTokens:
    """The special tokens that bear Regard's names; without an end token a vocabulary is not one of Regard's."""
    added = backend.get_added_tokens_decoder()
    by_name = {token.content: i for i, token in added.items() if token.special}
    if NAMES["eos"] not in by_name:
        raise ValueError(f"it has no special token {NAMES['eos']}: import the model it belongs to with `regard import`")
    return SpecialTokens(**{role: by_name.get(name) for role, name in NAMES.items()})


def checked_size(backend: tokenizers.Tokenizer, special: SpecialTokens, size: int | None) -> int:
    """How many ids a vocabulary has, which all its pieces and special tokens must lie below."""
    ids = set(backend.get_vocab().values())
    if size is None and ids != set(range(len(ids))):
        raise ValueError(f"its {len(ids)} tokens do not have the ids 0 to {len(ids) - 1}")
    size = len(ids) if size is None else size
    if max((*ids, *special.ids), default=0) >= size:
        raise ValueError(f"it has the id {max(*ids, *special.ids)}, outside a vocabulary of {size}")
    return size


def guard(backend: tokenizers.Tokenizer, unknown: int | None) -> None:
    """Keep a text that reads "</s>" four characters. Where the model of a vocabulary would find the piece of that name in
    it, the text is cut after its first character."""
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    backend.encode_special_tokens = True
    text = " ".join(f"a {name} b{name}" for name in special)
    said = set(backend.encode(text, add_special_tokens=False).ids)
    found = [name for name, i in special.items() if i in said and i != unknown and len(name) > 1]
    if found:
        cuts = (f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in found)
        cut = pre_tokenizers.Split(Regex("|".join(cuts)), "merged_with_previous")
        first = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, cut])


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
